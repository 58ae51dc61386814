"""TileRows: where a step needs its largest values only on the way, they are there for some of their rows at a time.

Logits, their log-softmax and their gradient live between the hidden values of all tokens and the sums and gradients
that are made of them.  Forward and backward of a tile of rows run together, then those of the next, so that nothing is
computed twice.  ``row_region`` finds the part of the step; micro-batches' ops join the results of tiles.

With 50,257 classes and 2,048 tokens on one rank, 2, 4 and 8 tiles take 0.94, 0.86 and 0.82 of the planned peak
(``python bench/ablation.py tiles``, which times them too).  Where the logits are not at the peak, tiles save nothing.
``F.linear_cross_entropy`` in as many chunks (torch 2.13) would not hold the logits either where the user writes it, but
has no SBP rule: several ranks would gather the batch for it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.passes.base import BuiltinPass
from graphzero.passes.micro.loop_partition import SHAPED
from graphzero.passes.micro.micro_batch_types import MicroBatchTypes
from graphzero.passes.place.forward_sweep import HALF
from graphzero.plugins.row_tiles.row_region import NoRegion, RowRegion, row_region, sized
from graphzero.sbp.types import B

aten = torch.ops.aten


@dataclass(frozen=True)
class TileRows(BuiltinPass):
    """Computes the largest values of a step in tiles of rows, forward and backward of a tile together.

    tiles: how many; the next number that divides the rows of a rank.  A step without such values stays as it is:
    one that hands them out, or in which backward of a row needs something of all rows.

    Requires: boxes wherever a value is read in another SBP than it has; the count of a loss as a value of its targets.
    Ensures: the same values, except for the rounding of sums over rows, which are added up tile by tile.

    Example::

        tile_rows{tiles=2}

         graph head(dp=2) boxed
           h = batch() : f32[8, 4]  S(0)
           w = param() : f32[64, 4]  B
         forward:
           t = t(w) : f32[4, 64]  B
        -  z = mm(h, t) : f32[8, 64]  S(0)
        -  p = exp(z) : f32[8, 64]  S(0)
        -  s = sum.dim_IntList(p, [0, 1]) : f32[]  P
         backward:
        -  gh = mm(p, w) : f32[8, 4]  S(0)
        -  b = box(s) : f32[]  B
        -  return b, gh
        +  s_sum = accumulator([], torch.float32) : f32[]  P
        +  gh_rows = accumulator([8, 4], torch.float32) : f32[8, 4]  S(0)
        +  take = take(h, 0, 0, 2) : f32[4, 4]  S(0)
        +  z_tile = mm(take, t) : f32[4, 64]  S(0)
        +  p_tile = exp(z_tile) : f32[4, 64]  S(0)
        +  s_tile = sum.dim_IntList(p_tile, [0, 1]) : f32[]  P
        +  accumulate = accumulate(s_sum, s_tile, 0, 2, 'sum') : f32[]  P
        +  gh_tile = mm(p_tile, w) : f32[4, 4]  S(0)
        +  put = put(gh_rows, gh_tile, 0, 0, 2) : f32[8, 4]  S(0)
        +  take_1 = take(h, 0, 1, 2) : f32[4, 4]  S(0)
        +  z_tile_1 = mm(take_1, t) : f32[4, 64]  S(0)
        +  p_tile_1 = exp(z_tile_1) : f32[4, 64]  S(0)
        +  s_tile_1 = sum.dim_IntList(p_tile_1, [0, 1]) : f32[]  P
        +  accumulate_1 = accumulate(accumulate, s_tile_1, 1, 2, 'sum') : f32[]  P
        +  gh_tile_1 = mm(p_tile_1, w) : f32[4, 4]  S(0)
        +  put_1 = put(put, gh_tile_1, 0, 1, 2) : f32[8, 4]  S(0)
        +  b = box(accumulate_1) : f32[]  B
        +  return b, put_1
    """

    tiles: int = field(default=4, metadata={"setting": "row_tiles"})

    def __call__(self, graph: StepGraph) -> StepGraph:
        try:
            region = row_region(graph, self.tiles)
        except NoRegion:
            return graph
        _TileWriter(graph, region).write_tiles()
        return graph


class _TileWriter:
    """Puts the tiles in the place of the ops that they are of."""

    def __init__(self, graph: StepGraph, region: RowRegion) -> None:
        self.graph, self.region, self.sizes = graph, region, MicroBatchTypes(0, region.count)
        self.inside = set(region.nodes)
        self.phase = max((value.phase_of(node) for node in region.nodes), key=value.PHASES.index)
        self.place = next(node for node in region.nodes if value.phase_of(node) == self.phase)
        self.given = {node: self._again(node) for node in region.inputs}
        self.accumulators: dict[fx.Node, fx.Node] = {}  # what tiles have made so far of each result

    def write_tiles(self) -> None:
        inputs = set(self.region.inputs)
        self._fill_shaped()
        late = self._late()
        self._move(self._early())
        with self.graph.graph.inserting_before(self.place):
            for result in self.region.results:
                self._begin(result)
            for number in range(self.region.count):
                self._write_tile(number)
            instead = {result: self._ended(result) for result in self.region.results}
        self._move(late)
        for result, replacement in instead.items():
            result.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in self.inside)
        for node in reversed(self.region.nodes):
            self.graph.graph.erase_node(node)
        self._drop_unread(inputs)

    # ---- what is around the tiles

    def _again(self, node: fx.Node) -> fx.Node:
        """The value that backward makes of a parameter as forward does, so that only one is held."""
        if self.phase != "backward" or value.phase_of(node) != "forward":
            return node
        chain = [node]
        while chain[-1].op != "placeholder" and len(chain[-1].all_input_nodes) == 1:
            chain += chain[-1].all_input_nodes
        repeats = value.repeats_of(self.place)
        is_once = any(value.repeats_of(link) != repeats for link in chain[:-1])  # a step, as a move to another stage
        if is_once or not value.has_role(chain[-1], "param"):
            return node
        copy = param = chain.pop()
        for link in reversed(chain):
            args, kwargs = fx.map_arg((link.args, link.kwargs), lambda _, copy=copy: copy)  # type: ignore[misc]
            like = next(
                (x for x in copy.users if value.phase_of(x) == "backward" and _alike(x, link, args, kwargs)), None
            )
            if like is None and copy is param:
                return node  # backward has no use of it
            if like is None:
                with self.graph.graph.inserting_after(copy):
                    like = self.graph.graph.create_node("call_function", link.target, args, kwargs, name=link.name)
                like.meta = {**link.meta, "phase": "backward"}
            copy = like
        return copy

    def _fill_shaped(self) -> None:
        """Write ops that read only the shape of a tile's value as ``full``."""
        after = self._after(through_shapes=True)
        for node in after:
            if node.target in SHAPED:
                type_ = value.tensor_type(node)
                node.args, node.kwargs = (list(type_.shape), SHAPED[node.target]), {"dtype": type_.dtype}
                node.target = aten.full.default

    def _after(self, through_shapes: bool = False) -> list[fx.Node]:
        """Ops outside that depend on values of tiles, in order."""
        dependent: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node in self.inside or (node.target in SHAPED and not through_shapes):
                continue
            if any(x in self.inside or x in dependent for x in node.all_input_nodes):
                dependent[node] = None
        return list(dependent)

    def _late(self) -> list[fx.Node]:
        """Ops above the place of the tiles that depend on their results."""
        at = {node: i for i, node in enumerate(self.graph.nodes)}
        return [node for node in self._after() if at[node] < at[self.place]]

    def _early(self) -> list[fx.Node]:
        """Ops below the place of the tiles on which they depend."""
        needed = {x for given in self.given.values() for x in value.ancestors(given)}
        below = dropwhile(lambda node: node is not self.place, self.graph.nodes)
        return [node for node in below if node in needed]

    def _move(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.place.prepend(node)
            if value.phase_of(node) == "forward":
                node.meta["phase"] = self.phase

    def _drop_unread(self, rest: set[fx.Node]) -> None:
        """Take out what only tiles have read, and they read otherwise now."""
        while rest:
            node = rest.pop()
            if node.op == "call_function" and not node.users:
                rest.update(node.all_input_nodes)
                self.graph.graph.erase_node(node)

    # ---- tiles

    def _begin(self, result: fx.Node) -> None:
        type_, is_sum = value.tensor_type(result), self.region.cut[result].is_partial
        if is_sum and type_.dtype in HALF:
            type_ = TensorType(torch.float32, type_.shape)
        args = (list(type_.shape), type_.dtype)
        self.accumulators[result] = self._call(
            ops.accumulator, args, type_, result, f"{result.name}_sum" if is_sum else f"{result.name}_rows"
        )

    def _write_tile(self, number: int) -> None:
        done: dict[fx.Node, fx.Node] = {}

        def read(operand: fx.Node) -> fx.Node:
            if operand not in done:
                done[operand] = self._rows_of(operand, number)
            return done[operand]

        for node in self.region.nodes:
            done[node] = self._copied(node, read)
            if node in self.accumulators:
                self._join(node, done[node], number)

    def _rows_of(self, operand: fx.Node, number: int) -> fx.Node:
        """The rows of an outside value that a tile reads."""
        whole, cut = self.given[operand], self.region.cut.get(operand, B)
        if not cut.is_split:
            return whole
        args = (whole, cut.dim, number, self.region.count)
        return self._call(ops.take, args, self.sizes.micro_batch_type(value.type_of(whole), (cut,)), operand)

    def _copied(self, node: fx.Node, read: Any) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        if node.target is operator.getitem:
            type_ = self.sizes.micro_batch_type(value.type_of(node), (self.region.cut[node],))
        else:
            run = self.region.runs[node]
            args, kwargs = sized(node, args, kwargs, run, self.region.count)  # type: ignore[misc]
            type_ = _part_of(self.sizes, value.type_of(node), run.outputs)
        copy = self._call(node.target, args, type_, node, f"{node.name}_tile")
        copy.kwargs = kwargs
        return copy

    def _join(self, result: fx.Node, x: fx.Node, number: int) -> None:
        """Add a tile's share to a sum, or put its rows where they belong."""
        cut, accumulator, count = self.region.cut[result], self.accumulators[result], self.region.count
        type_ = value.type_of(accumulator)
        if cut.is_split:
            total = self._call(ops.put, (accumulator, x, cut.dim, number, count), type_, result)
        else:
            total = self._call(ops.accumulate, (accumulator, x, number, count, cut.reduction), type_, result)
        self.accumulators[result] = total

    def _ended(self, result: fx.Node) -> fx.Node:
        total, type_ = self.accumulators[result], value.tensor_type(result)
        if value.type_of(total) != type_:
            total = self._call(aten._to_copy.default, (total,), type_, result)
            total.kwargs = {"dtype": type_.dtype}
        role = value.role_of(result)
        if role is not None:
            self.graph.set_role(total, role)
        return total

    def _call(self, target: Any, args: Any, type_: Any, like: fx.Node, name: str | None = None) -> fx.Node:
        return self.graph.call(target, args, type_, sbp=value.sbp_of(like), phase=self.phase, like=like, name=name)


def _part_of(sizes: MicroBatchTypes, type_: Any, cuts: tuple[Any, ...]) -> Any:
    """The type of what an op makes in a tile."""
    if not isinstance(type_, tuple):
        return sizes.micro_batch_type(type_, cuts)
    left = iter(cuts)
    return tuple(None if one is None else sizes.micro_batch_type(one, (next(left),)) for one in type_)


def _alike(node: fx.Node, other: fx.Node, args: Any, kwargs: Any) -> bool:
    """Return whether an op does as another one does with these arguments."""
    return (
        node.target is other.target and node.args == args and node.kwargs == kwargs
        and value.type_of(node) == value.type_of(other) and value.sbp_of(node) == value.sbp_of(other)
    )  # fmt: skip
