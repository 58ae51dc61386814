"""Zero: optimizer states, gradients and parameters from broadcast to split.

It moves no data: it moves pins (Rajbhandari et al., "ZeRO", arXiv 1910.02054).  Propagation carries them on, and
``LowerBoxing`` creates the collectives that follow, such as the reduce_scatter of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.pin import pin_gradients
from graphzero.sbp.shards import nests
from graphzero.sbp.types import B, Nd, S

PADDING = 0.02  # dim 0 is split if its padding is under this share, else the dim with least padding


@dataclass(frozen=True)
class Zero(BuiltinPass):
    """Splits broadcast model state over the data axes.

    ===== ========================================================================================
    stage what is split
    ===== ========================================================================================
    1     optimizer states, and the update's work; a gradient is cut when backward has ended.  Parameters that only
          the update reads are states
    2     and gradients: each is reduced to this rank's part as soon as it is complete
    3     and parameters: gathered once per phase that reads them, dropped after the last reader
    ===== ========================================================================================

    stage: 1, 2 or 3.
    shard_min_size: a parameter with ``numel // n`` below it stays broadcast, n = ranks sharded over.
    axis: names of the placement axes to shard over; default every data axis.
    masters: whether parameters are masters of 16-bit casts: those that the step changes are split from stage 1 on.
    optimizer_in_backward: whether the optimizer steps while backward runs: stage 1 too then cuts a gradient when it is
        made.

    Requires: the pins of ``pin``.
    Ensures: the same pins, split by the stage; no op is added, and nothing is sent yet.

    Example::

        zero{stage=2}

         graph step(dp=2) captured
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  B!
        -  m = state(w) : f32[4, 2]  B!
        +  m = state(w) : f32[4, 2]  S(0)!
         forward:
           wf = use(w) : f32[4, 2]  B!
           y = mm(x, wf) : f32[8, 2]
         backward:
           xt = t(x) : f32[4, 8]
           gw = mm(xt, y) : f32[4, 2]  ; gradient(w)
        -  gw_pin = pin(gw, -1) : f32[4, 2]  B!  ; gradient(w)
        +  gw_pin = pin(gw, -1) : f32[4, 2]  S(0)!  ; gradient(w)
         update:
        -  wu = use(w) : f32[4, 2]  B!
        +  wu = use(w) : f32[4, 2]  S(0)!
           m1 = add(m, gw_pin) : f32[4, 2]
           w1 = add(wu, m1, alpha=-0.1) : f32[4, 2]
           return y; update(m=m1, w=w1)
    """

    stage: int = 2
    shard_min_size: int = 1
    axis: tuple[str, ...] | None = None
    masters: bool = False
    optimizer_in_backward: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ConfigError(
                f"Zero(stage={self.stage!r}): the stages are 1 (states), 2 (and gradients), 3 (and parameters)"
            )

    def __call__(self, graph: StepGraph) -> StepGraph:
        params = {value.role_of(node).of: node for node in graph.placeholders("param")}  # type: ignore[union-attr]
        splits = {path: self._split(graph, node) for path, node in params.items()}
        for state in graph.placeholders("state"):
            path = state.meta["role"].of
            like_param = path in params and value.type_of(state).shape == value.type_of(params[path]).shape
            _pin(graph, state, splits[path] if like_param else self._split(graph, state))
        for node in list(graph.nodes):
            if node.target is ops.use and value.phase_of(node) == "update":
                _pin(graph, node, splits[value.role_of(value.operand(node)).of])  # type: ignore[union-attr]
        for path, param in params.items():
            changes = param.name in graph.updates
            if self.stage == 3 or (changes and (self.masters or value.is_average(param))):
                _pin(graph, param, splits[path])
        pinned = pin_gradients(graph, splits)
        if self.stage == 1 and not self.optimizer_in_backward:
            _move_to_update(graph, pinned.values())
        return graph

    def _split(self, graph: StepGraph, node: fx.Node) -> Nd:
        """The SBP of a sharded parameter or state."""
        shape, hierarchy = value.tensor_type(node).shape, graph.placement.hierarchy
        return zero_split(shape, value.nd_of(node), hierarchy, self._axes(graph), self.shard_min_size)

    def _axes(self, graph: StepGraph) -> list[int]:
        names = self.axis if self.axis is not None else graph.placement.data_axes
        return [graph.placement.axis(name) for name in names]


def zero_split(
    shape: tuple[int, ...], nd: Nd, hierarchy: Sequence[int], axes: Iterable[int], shard_min_size: int
) -> Nd:
    """``nd`` with B turned to S over the axes that shard: how a parameter or state of ``shape`` is cut.

    Over several axes the splits are nested in one dim: one gather and one scatter per axis, as many bytes as over
    one axis of all ranks.  A dim that another axis splits is taken only where it has to be, so that the new cuts
    come and go within its own: in as many sections as that axis makes pieces, or as nested cuts if it lies outside.
    Not if that axis cuts it in sections itself: torch's ``full_tensor`` joins such a DTensor in another order.
    """
    over = [i for i in axes if nd[i] is B and hierarchy[i] > 1]
    ranks = prod(hierarchy[i] for i in over)
    taken = {sbp.dim: i for i, sbp in enumerate(nd) if sbp.is_split}
    free = [dim for dim in range(len(shape)) if dim not in taken]
    if not over or not (free or taken) or prod(shape) // ranks < max(shard_min_size, 1):
        return tuple(nd)
    if free:
        cut = S(split_dim(shape, free, ranks))
    else:
        dim = max(taken, key=lambda dim: shape[dim])
        cutters = [i for i, sbp in enumerate(nd) if sbp.is_split and sbp.dim == dim]
        if any(nd[i].sections > 1 for i in cutters):
            return tuple(nd)
        cut = S(dim, 1 if max(cutters) < over[0] else prod(hierarchy[i] for i in cutters))
    split = tuple(cut if i in over else sbp for i, sbp in enumerate(nd))
    return split if nests(shape, split, hierarchy) else tuple(nd)


def split_dim(shape: tuple[int, ...], free: list[int], ranks: int) -> int:
    """The dim to split: dim 0 if that pads under 2 %, else the one that pads least, the lowest on ties."""

    def padding(dim: int) -> float:
        return (-(-shape[dim] // ranks) * ranks - shape[dim]) / shape[dim] if shape[dim] else float("inf")

    if 0 in free and padding(0) < PADDING:
        return 0
    return min(free, key=lambda dim: (padding(dim), dim))


def _pin(graph: StepGraph, node: fx.Node, nd: Nd) -> None:
    for axis, sbp in zip(graph.placement.names, nd, strict=True):
        graph.pin(node, axis, sbp)


def _move_to_update(graph: StepGraph, pins: Iterable[fx.Node]) -> None:
    """Make the cuts of gradients the first thing that the update does: until backward ends they stay whole."""
    first = next(
        (node for node in graph.nodes if node.op == "call_function" and value.phase_of(node) == "update"), None
    )
    for pin in pins:
        if first is not None and all(value.phase_of(user) == "update" or user.op == "output" for user in pin.users):
            first.prepend(pin)
            pin.meta["phase"] = "update"
