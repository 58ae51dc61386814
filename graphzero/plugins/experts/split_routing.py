"""SplitRouting: where a data axis splits tokens, each rank sorts its own by expert."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import GROUPED_MM
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.plugins.experts.exchange_writer import ExchangeWriter
from graphzero.plugins.experts.expert_ways import AUTO_WAY, CAPACITY, SUMS, WAYS, ExpertChoice, ExpertWays
from graphzero.plugins.experts.region_writer import RegionWriter
from graphzero.plugins.experts.room_check import ROOM_FOR_ROWS, check_room
from graphzero.plugins.experts.routing_ops import SORTS
from graphzero.plugins.experts.sorted_rows import SortedRows
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import S

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitRouting(BuiltinPass):
    """Sorts the rows of each rank by themselves, where all that depends on the sort is per row.

    A sort needs all rows, so without this a mixture of experts gathers the tokens of all data ranks, and cannot run in
    micro-batches.  What depends on the sort becomes per-rank code on the axes that split the rows.

    split_experts: how tokens and weights of experts come together on a data axis that splits these by expert:
        "exchange", "tokens", "weights"; "auto": what sends fewest bytes, or takes fewest seconds if ``links`` are
        given.  See ``ExpertWays``.
    expert_capacity: of an exchange, for how many rows of one rank another has room, over an even share of them.
    links: what communication costs on each axis, () for bytes.
    cuda_graph: whether no check can stop the step: an exchange then has room for all rows.

    Requires: pins on inputs and uses.
    Ensures: sorts of rows that data axes split are per-rank code on these axes, if their order is undone again.

    Example::

        split_routing

         graph experts(dp=2) captured
           x = batch() : f32[6, 4]  S(0)!
           r = batch() : f32[6, 3]  S(0)!
           w = param() : f32[3, 4, 4]  B!
         forward:
           u = use(w) : f32[3, 4, 4]  B!
           k = argmax(r, 1) : i64[6]
        -  s = sort.default(k) : (i64[6], i64[6])
        -  keys = s[0] : i64[6]
        -  o = s[1] : i64[6]
        -  f = _to_copy(keys, dtype=torch.float32) : f32[6]
        -  n = histc(f, 3, 0, 2) : f32[3]
        -  ends = cumsum(n, 0, dtype=torch.int32) : i32[3]
        -  rows = index(x, [o]) : f32[6, 4]
        -  y = grouped_mm(rows, u, ends) : f32[6, 4]
        -  z = relu(y) : f32[6, 4]
        +  as_local = as_local(k, ['S(0)'], [3]) : i64[3]
        +  s = sort.default(as_local) : (i64[3], i64[3])
        +  keys = s[0] : i64[3]
        +  o = s[1] : i64[3]
        +  f = _to_copy(keys, dtype=torch.float32) : f32[3]
        +  n_own = histc(f, 3, 0, 2) : f32[3]
        +  ends_own = cumsum(n_own, 0, dtype=torch.int32) : i32[3]
        +  as_local_1 = as_local(x, ['S(0)'], [3, 4]) : f32[3, 4]
        +  rows = index(as_local_1, [o]) : f32[3, 4]
        +  as_local_2 = as_local(u, ['B'], [3, 4, 4]) : f32[3, 4, 4]
        +  y = grouped_mm(rows, as_local_2, ends_own) : f32[3, 4]
        +  z = relu(y) : f32[3, 4]
           zero = zeros([6, 4]) : f32[6, 4]
        -  back = index_put(zero, [o], z, True) : f32[6, 4]
        +  as_local_3 = as_local(zero, ['S(0)'], [3, 4]) : f32[3, 4]
        +  back_own = index_put(as_local_3, [o], z, True) : f32[3, 4]
        +  back = as_global(back_own, ['S(0)'], [6, 4]) : f32[6, 4]
           return back
    """

    split_experts: str = AUTO_WAY
    expert_capacity: float = CAPACITY
    links: Links = field(default=(), repr=False)
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        if self.split_experts not in (AUTO_WAY, *WAYS):
            raise ConfigError(
                f"SplitRouting(split_experts={self.split_experts!r}): the ways are {', '.join((AUTO_WAY, *WAYS))}"
            )

    def __call__(self, graph: StepGraph) -> StepGraph:
        self.take_ways(graph)
        return graph

    def take_ways(self, graph: StepGraph) -> list[ExpertChoice]:
        """Rewrite the graph.  Returns the choices where an axis splits the weights of experts."""
        data_axes, others = list[AxisPropagation](), list[AxisPropagation]()
        local: set[fx.Node] = set()  # ops that are per-rank code on all data axes by now
        excesses, choices = list[fx.Node](), list[ExpertChoice]()
        for sort in [node for node in graph.nodes if node.target in SORTS]:
            if sort in local:
                continue
            if not data_axes or not all(_splits_rows(axis, sort) for axis in data_axes):
                # rows of earlier mixtures, which are left split by now, may come to this sort split
                sweep = [axis for axis in swept(graph, self.links) if axis.ranks > 1]
                data_axes, others = ([axis for axis in sweep if axis.is_data is is_data] for is_data in (True, False))
            axes = [axis for axis in data_axes if _splits_rows(axis, sort)]
            for axis in (*data_axes, *others):
                if axis not in axes:  # all ranks have these tokens already
                    whole = self._ways([axis], _sorted_rows(graph, sort, [axis]))
                    choices += [one.choice("tokens" if axis.is_data else SUMS) for one in whole]
            rows = _sorted_rows(graph, sort, axes)
            splitting = self._ways(axes, rows)
            while splitting and splitting[-1].is_innermost and self._way(splitting[-1]) == "tokens":
                choices.append(splitting.pop().choice("tokens"))
                axes.pop()
                rows = _sorted_rows(graph, sort, axes)
                splitting = self._ways(axes, rows)
            exchange = self._exchange(splitting)
            choices += [one.choice("exchange" if one is exchange else "weights") for one in splitting]
            numbers = [axis.axis for axis in axes]
            if exchange is None:
                RegionWriter(graph, numbers, rows).rewrite_graph()
            else:
                exchange.pin_uses()
                writer = ExchangeWriter(graph, numbers, rows, exchange.axis.axis, exchange.room)
                writer.rewrite_graph()
                excesses += writer.excesses
            if len(axes) == len(data_axes):
                local.update(rows.ops)
        if excesses:
            check_room(graph, excesses, "room_for_rows", ROOM_FOR_ROWS.message)
        if self.split_experts == "exchange" and all(choice.way != "exchange" for choice in choices):
            _warn_of_none(graph)
        return choices

    def _ways(self, axes: Sequence[AxisPropagation], rows: SortedRows) -> list[ExpertWays]:
        """The ways of a mixture on each axis that splits its weights."""
        ranks = prod(axes[0].graph.placement.hierarchy) if axes else 1
        capacity = float(ranks) if self.cuda_graph else self.expert_capacity
        ways = (ExpertWays(axis, rows, capacity, axis is axes[-1]) for axis in axes)
        return [one for one in ways if one.is_there]

    def _exchange(self, splitting: Sequence[ExpertWays]) -> ExpertWays | None:
        """The innermost axis along which rows are exchanged; None for none."""
        able = [one for one in splitting if one.may_exchange and self._way(one) == "exchange"]
        return able[-1] if able else None

    def _way(self, one: ExpertWays) -> str:
        return one.cheapest if self.split_experts == AUTO_WAY else self.split_experts


def _warn_of_none(graph: StepGraph) -> None:
    """Say that no rows are exchanged, where there are experts."""
    if any(node.target is GROUPED_MM for node in graph.nodes):
        warnings.warn(
            f'set_split_experts("exchange"): no rows are exchanged in {graph.name}; a data axis has to split weights '
            "evenly by expert, as enable_zero(stage=3) does or gz.to_global(model, placement, "
            '{"*.experts.*": gz.sbp.S(0)}), and between the products no op may read other rows',
            stacklevel=2,
        )


def _splits_rows(axis: AxisPropagation, sort: fx.Node) -> bool:
    """Return whether a data axis splits the rows that are sorted."""
    keys = value.operand(sort)
    return keys in axis.found and len(value.tensor_type(keys).shape) == 1 and axis.sbp(keys) is S(0)


def _sorted_rows(graph: StepGraph, sort: fx.Node, axes: Sequence[AxisPropagation]) -> SortedRows:
    return SortedRows(sort, list(graph.nodes), prod(axis.ranks for axis in axes))
