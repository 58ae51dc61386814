"""A model of a step's seconds on ranks that are not there: a plan, what links cost, and the seconds of compute.

Communication is the plan's: every collective of the program for so many ranks, by the alpha-beta model of its axis
(``gz.Link``).  How much of it hides behind compute is not known before a run, so there are two bounds.  *worst*:
nothing hides.  *best*: gradients and the parameters that backward reads hide behind all of backward, the parameters
that forward reads behind all of forward, and the updated parameters of stages 1 and 2, which travel when the step ends,
behind nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from parity import TrainGraph
from torch import Tensor, nn

import graphzero as gz
from graphzero.plan import Collective, Plan
from graphzero.sbp.placement import Placement

UPDATE_BYTES = 3.5  # read and written by AdamW for a byte of its states: p, g, m, v read, p, m, v written, of m, v


@dataclass(frozen=True)
class Compute:
    """Seconds of a rank in each phase of a step.  update: where nothing is split."""

    forward: float
    backward: float
    update: float

    def times(self, factor: float) -> Compute:
        return Compute(factor * self.forward, factor * self.backward, factor * self.update)


@dataclass(frozen=True)
class Cluster:
    """Hosts of ``per_host`` ranks, and what a rank pays to talk within a host and between hosts."""

    per_host: int
    inside: gz.Link
    between: gz.Link

    def links(self, place: Placement) -> dict[str, gz.Link]:
        """An axis that leaves a host is as slow as what lies between hosts."""
        found, inner = {}, 1
        for name, ranks in reversed([*zip(place.names, place.hierarchy, strict=True)]):
            inner *= ranks
            found[name] = self.inside if inner <= self.per_host else self.between
        return found

    def describe(self) -> str:
        return f"{self.per_host} ranks a host; inside {_link(self.inside)}, between hosts {_link(self.between)}"


@dataclass(frozen=True)
class Bounds:
    """Seconds of a step between which the truth should lie, and what they consist of."""

    compute: float
    communication: float
    best: float
    worst: float


def bounds(plan: Plan, compute: Compute, states: int) -> Bounds:
    """states: bytes of optimizer states where nothing is split; a rank updates its share of them."""
    comm: Counter[str] = Counter()
    for one in plan.collectives:
        comm[_hides_behind(one)] += one.seconds or 0.0
    update = compute.update * plan.memory["optimizer_states"] / states
    alone = compute.forward + compute.backward + update
    hidden = sum(min(comm[phase], getattr(compute, phase)) for phase in ("forward", "backward"))
    return Bounds(alone, comm.total(), alone + comm.total() - hidden, alone + comm.total())


def _hides_behind(one: Collective) -> str:
    return "backward" if one.what_for == "gradients" else one.phase


def planned(
    model: nn.Module, share: tuple[Tensor, ...], stages: Iterable[int], cluster: Cluster, shape: tuple[int, ...]
) -> dict[int, Plan]:
    """By stage, the plan of rank 0 of a world of this hierarchy that is not there: (n,), or (replicas, n) for hybrid
    sharding.

    model and share, a rank's part of the batch, may be on the meta device.  The step is captured once.
    """
    ranks = torch.arange(torch.Size(shape).numel())
    names = ("dp",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    with gz.testing.fake_world(len(ranks)):
        place = gz.placement("cpu", ranks.reshape(shape).tolist(), names=names)
        graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, 0, place)
        graph.config.set_links(cluster.links(place))
        found = {}
        for stage in stages:
            graph.config.enable_zero(stage > 0, stage=stage or 2, axis=names[-1])
            found[stage] = graph.compile(*share).plan
        return found


def hierarchies(ranks: int, per_host: int) -> Iterator[tuple[int, ...]]:
    """All ranks alike; and, where there are several hosts, split within a host and repeated over hosts."""
    yield (ranks,)
    if ranks > per_host:
        yield ranks // per_host, per_host


def _link(link: gz.Link) -> str:
    return f"{link.latency * 1e6:.1f} us a message, {link.bandwidth / 1e9:.2f} GB/s a rank"
