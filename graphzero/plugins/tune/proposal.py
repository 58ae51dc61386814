"""Splits of weights for an axis: which of the groups are worth it, judged by the programs that they make.

Groups of one kind, those of the layers of a stack, stand or fall together.  Of kinds that need one weight split in
different ways, those are tried that promise most together.  Each is put into the step and the step compiled: it stays
if the modelled step is shorter for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

import torch

from graphzero.ir.graph import StepGraph
from graphzero.ir.value import DTYPE_NAMES
from graphzero.plan.device import Device
from graphzero.plugins.tune.captured_step import CapturedStep
from graphzero.plugins.tune.groups import WeightGroup, groups
from graphzero.plugins.tune.layout import Layout
from graphzero.plugins.tune.patterns import starred
from graphzero.plugins.tune.price import Price, price
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Sbp

TRIED = 10  # kinds of groups, the most promising ones
WORTH = 1e-3  # of a step, that a kind has to save
PASSES_OF_UPDATE = 7  # reads and writes of a parameter's bytes by an optimizer with two states


@dataclass(frozen=True)
class Kind:
    """Groups that differ in numbers of layers alone.  promise: seconds that they may save, by an estimate."""

    groups: tuple[WeightGroup, ...] = field(repr=False)
    promise: float

    @property
    def splits(self) -> dict[str, Sbp]:
        return {path: sbp for group in self.groups for path, sbp in group.splits.items()}

    @property
    def pattern(self) -> frozenset[tuple[str, Sbp]]:
        return _pattern(self.groups[0])

    def agrees(self, other: Mapping[str, Sbp]) -> bool:
        """Return whether no weight would be split in two ways."""
        return all(group.agrees(other) for group in self.groups)


@dataclass(frozen=True)
class Verdict:
    """Result for a kind of groups: the seconds of a step without it and with it, and the additional bytes sent."""

    kind: Kind
    without: float
    with_it: float
    sent: float

    @property
    def is_taken(self) -> bool:
        return self.with_it < (1 - WORTH) * self.without


@dataclass(frozen=True)
class Proposal:
    """A proposal of how weights are split over the tensor axis of a grid.

    kinds: that are split so.  verdicts: of the kinds that were tried one by one.  plain: the layout with these splits.
    """

    kinds: tuple[Kind, ...]
    plain: Price = field(repr=False)
    verdicts: tuple[Verdict, ...] = ()

    @property
    def splits(self) -> dict[str, Sbp]:
        return {path: sbp for kind in self.kinds for path, sbp in kind.splits.items()}


def propose(step: CapturedStep, layout: Layout, device: Device) -> Proposal:
    """Splits for the tensor axis of ``layout``, each kind judged by the step that it makes."""
    taken, verdicts = list[Kind](), list[Verdict]()
    best = price(step, layout, {}, device)
    for kind in _kinds(step, layout, device):
        splits = {path: sbp for one in taken for path, sbp in one.splits.items()}
        if len(verdicts) == TRIED or not kind.agrees(splits):
            continue
        priced = price(step, layout, splits | kind.splits, device)
        verdicts.append(Verdict(kind, best.seconds, priced.seconds, priced.plan.comm_bytes - best.plan.comm_bytes))
        if verdicts[-1].is_taken:
            taken, best = [*taken, kind], priced
    return Proposal(tuple(taken), best, tuple(verdicts))


def propose_like(step: CapturedStep, layout: Layout, device: Device, other: Proposal) -> Proposal:
    """Splits for the tensor axis of ``layout``: those of ``other``, as far as its number of ranks allows them."""
    wanted = {kind.pattern for kind in other.kinds}
    kinds = tuple(kind for kind in _kinds(step, layout, device, wanted) if kind.pattern in wanted)
    return Proposal(kinds, price(step, layout, {path: sbp for k in kinds for path, sbp in k.splits.items()}, device))


def _kinds(
    step: CapturedStep, layout: Layout, device: Device, wanted: Collection[frozenset[tuple[str, Sbp]]] = ()
) -> list[Kind]:
    """The kinds of groups that may be worth it: those that promise most together, then the others; and ``wanted``."""
    graph, _ = step.on(layout.placement(device.type).without_pipeline(), {})
    promised = _Promise(graph.placement, device, _dtype(step, graph))
    alike: dict[frozenset[tuple[str, Sbp]], list[WeightGroup]] = {}
    for group in groups(graph, len(graph.placement.names) - 1):
        alike.setdefault(_pattern(group), []).append(group)
    kinds = [Kind(tuple(same), sum(map(promised, same))) for same in alike.values()]
    kinds = sorted((k for k in kinds if k.promise > 0 or k.pattern in wanted), key=lambda kind: -kind.promise)
    together = _best_together(kinds[:TRIED])
    return [*together, *(kind for kind in kinds if kind not in together)]


def _best_together(kinds: Sequence[Kind]) -> list[Kind]:
    """Of kinds that may split one weight in several ways, those that agree and gain most."""

    def agree(some: Sequence[Kind]) -> bool:
        return all(a.agrees(b.splits) for a, b in combinations(some, 2))

    sets = (list(some) for n in range(len(kinds) + 1) for some in combinations(kinds, n))
    return max(filter(agree, sets), key=lambda some: sum(kind.promise for kind in some))


def _dtype(step: CapturedStep, graph: StepGraph) -> str:
    """Dtype in which forward computes, by its name in device files."""
    if step.settings.amp.dtype is not None:
        return DTYPE_NAMES[step.settings.amp.dtype]
    dtypes = (node.meta["type"].dtype for node in graph.placeholders("param"))
    return DTYPE_NAMES[next(dtypes, torch.float32)]


def _pattern(group: WeightGroup) -> frozenset[tuple[str, Sbp]]:
    return frozenset((starred(path), sbp) for path, sbp in group.splits.items())


@dataclass(frozen=True)
class _Promise:
    """Seconds that a group may save: work and updates that ranks share, gradients that are smaller, less what it
    sends.
    """

    placement: Placement
    device: Device
    dtype: str

    def __call__(self, group: WeightGroup) -> float:
        place, device = self.placement, self.device
        ranks, data = place.hierarchy[-1], prod(place.hierarchy[:-1])
        work = device.seconds("mm", self.dtype, 3 * group.flops / data, 0.0)
        update = device.seconds("add", self.dtype, 0.0, PASSES_OF_UPDATE * group.nbytes)
        reduced = 2 * group.nbytes / device.link(place, place.names[0]).bandwidth if data > 1 else 0.0
        sent = group.sent / data / device.link(place, place.names[-1]).bandwidth
        return (1 - 1 / ranks) * (work + update + reduced) - sent
