"""The ways in which an axis that splits experts brings tokens and weights together, and what each sends.

``exchange``: rows of tokens go to the ranks of their experts, and results back, by all-to-all; see ``RowExchange``.
``tokens``: each rank gathers all tokens, and computes what its experts make of them; see ``SplitExperts``.
``weights``: each rank gathers the weights of all experts, and computes its own tokens.

These are the ways of a data axis.  The ranks of any other axis have the same tokens:

``sums``: each rank computes what its experts make of all tokens, and results are added up; see ``SplitExperts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ops import AS_LOCAL, GROUPED_MM
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.plugins.experts.sorted_rows import RowOp, SortedRows
from graphzero.plugins.experts.split_experts import may_be_used_in_place
from graphzero.sbp.link_costs import Link
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import S

aten = torch.ops.aten
WAYS = ("exchange", "tokens", "weights")
SUMS = "sums"
AUTO_WAY = "auto"
CAPACITY = 1.25  # of an exchange to begin with, over an even share


@dataclass(frozen=True)
class ExpertChoice:
    """The way that one mixture takes on one axis, next to what each way sends.

    axis: its name, with so many ranks.  way: that is taken.  capacity: of an exchange, over an even share.
    transfers: of each way the larger collectives, each with the bytes that a rank sends; in_micro_batches: of one.
    module: of its weights.  products: names of the products of groups.
    link: of the axis, where it is known.
    """

    axis: str
    ranks: int
    way: str
    capacity: float
    transfers: Mapping[str, Sequence[tuple[str, float]]]
    module: str
    products: tuple[str, ...]
    in_micro_batches: bool
    link: Link | None

    def nbytes(self, way: str) -> float:
        """Bytes that a rank sends."""
        return sum(sent for _, sent in self.transfers[way])

    def price(self, way: str) -> float:
        """Seconds of the transfers, one after the other; bytes where the link is not known."""
        if self.link is None:
            return self.nbytes(way)
        return sum(self.link.seconds(kind, sent, self.ranks) for kind, sent in self.transfers[way])


@dataclass(frozen=True)
class ExpertWays:
    """The ways of one mixture on an axis.

    rows: of its sort, in as many parts as the axis and those around it make.
    capacity: of an exchange, over an even share.
    is_innermost: whether no other axis cuts the rows further, so that gathered tokens stay together.
    """

    axis: AxisPropagation
    rows: SortedRows
    capacity: float
    is_innermost: bool

    @cached_property
    def is_there(self) -> bool:
        """Whether the axis splits the weights evenly by expert; on a data axis products of groups alone read them."""
        if not self.axis.is_data:
            return bool(self._stacked) and all(
                self.axis.sbp(x) is S(0) and value.tensor_type(x).shape[0] % self.axis.ranks == 0 for x in self._stacked
            )
        uses = self._uses
        return bool(uses) and all(
            use is not None and may_be_used_in_place(self.axis.graph, use, self.axis.axis) for use in uses
        )

    @property
    def may_exchange(self) -> bool:
        """Whether all products have the same groups, so that one exchange serves them."""
        return self.is_there and len({value.operand(node, 2) for node in self._products}) == 1

    @property
    def ways(self) -> list[str]:
        """Possible ways; of several that cost the same the first is taken."""
        if not self.axis.is_data:
            return [SUMS, "weights"]
        return ["weights", *["tokens"] * self.is_innermost, *["exchange"] * self.may_exchange]

    @property
    def cheapest(self) -> str:
        """The way that sends fewest bytes, or takes fewest seconds where links are known."""
        return min(self.ways, key=self.choice("").price)

    def pin_uses(self) -> None:
        """Let weights be used where they are."""
        for use in self._uses:
            assert use is not None
            self.axis.graph.pin(use, self.axis.graph.placement.names[self.axis.axis], S(0))

    @cached_property
    def transfers(self) -> dict[str, list[tuple[str, float]]]:
        """The larger collectives of each way, each with the bytes that a rank sends.

        Each phase gathers tokens, and reduces their results; or sends rows, of which a token has several, and results
        back; or gathers weights, whose gradients are reduced once, if ranks have different tokens.
        """
        gradients = [node for node, op in self._products.items() if not op.enters]
        read = [x for node, op in self.rows.ops.items() for x in op.enters if self._reads_tokens(node)]
        tokens = max(read, key=self.axis.bytes_in_line, default=None)
        phases, ranks = len({value.phase_of(node) for node in self._products}), self.axis.ranks
        gathered = self.axis.bytes_in_line(tokens) if tokens is not None else 0.0
        each = self.rows.rows / value.tensor_type(tokens).shape[0] if tokens is not None else 0.0
        weights = [("all_gather", self.axis.bytes_in_line(x)) for x in self._stacked]
        if self.axis.is_data:
            weights += [("reduce_scatter", self.axis.bytes_in_line(x)) for x in gradients]
        wholes = {
            "exchange": [("all_to_all", gathered * each * self.room / self._own_rows)] * (2 * phases),
            "tokens": [("all_gather", gathered), ("reduce_scatter", gathered)] * phases,
            "weights": weights,
            SUMS: [("all_reduce", 2 * gathered)] * phases,
        }
        return {way: [(kind, whole * (ranks - 1) / ranks) for kind, whole in wholes[way]] for way in sorted(self.ways)}

    @property
    def room(self) -> int:
        """For how many rows of one rank another has room, in an exchange: at most for all of them."""
        return min(self._own_rows, ceil(self.capacity * self._own_rows / self.axis.ranks))

    def choice(self, way: str) -> ExpertChoice:
        """This way with what each sends, which is known until the ops are rewritten."""
        names, links = self.axis.graph.placement.names, self.axis.costs.links
        return ExpertChoice(
            names[self.axis.axis], self.axis.ranks, way, self.capacity, self.transfers, self._module,
            tuple(node.name for node in self._products), MICRO_BATCHES in names,
            links[self.axis.axis] if links else None,
        )  # fmt: skip

    @property
    def _own_rows(self) -> int:
        return self.rows.rows // self.rows.parts

    @cached_property
    def _products(self) -> dict[fx.Node, RowOp]:
        return {node: op for node, op in self.rows.ops.items() if node.target is GROUPED_MM}

    @cached_property
    def _stacked(self) -> dict[fx.Node, None]:
        """Weights of all experts, as products read them."""
        return dict.fromkeys(x for op in self._products.values() for x in op.enters)

    @property
    def _uses(self) -> dict[fx.Node | None, None]:
        return dict.fromkeys(map(_use_of, self._stacked))

    @property
    def _module(self) -> str:
        """The path of the module whose weights they are, of the first of them."""
        x = next(iter(self._stacked))
        while x.all_input_nodes:
            x = x.all_input_nodes[0]
        path = role.of if (role := value.role_of(x)) is not None else x.name
        return path.rpartition(".")[0] or path

    def _reads_tokens(self, node: fx.Node) -> bool:
        """Return whether an op brings rows as given into the order of the sort."""
        return node is not self.rows.sort and node.target in (aten.index.Tensor, aten.index_select.default)


def _use_of(x: fx.Node) -> fx.Node | None:
    while x.target in (aten.transpose.int, aten._to_copy.default, AS_LOCAL):
        x = value.operand(x)
    return x if x.target is ops.use else None
