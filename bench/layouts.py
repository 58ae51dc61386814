"""Layouts of four ranks, Graphs that train a model in them, and what the program of such a Graph must not do.

``grid.py layouts`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import torch
from models import CASES, OPTIMIZERS, bert, gpt2, t5, vit
from parity import BATCH, Cell, Trained, TrainGraph, plain
from torch import fx
from weight_splits import PLANS, parallelise

import graphzero as gz
from graphzero.ir import value
from graphzero.plan import Collective
from graphzero.sbp.placement import Placement

STEPS, LIMIT = 5, 1e-6
STAGES = (0, 1, 2, 3)
_PHASES = ("forward", "backward")
for _name, _make in (("gpt2", gpt2), ("bert", bert), ("vit", vit), ("t5", t5)):  # heads that four ranks divide
    CASES[f"{_name}, 4 heads"] = replace(CASES[_name], make=partial(_make, heads=4))
    PLANS[f"{_name}, 4 heads"] = PLANS[_name]
MODELS = [name for name in CASES if f"{name}, 4 heads" not in CASES]


@dataclass(frozen=True)
class Layout:
    """Ranks: their hierarchy and the names of its axes; over which axis ZeRO splits, by default all data axes."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    axis: str | None = None

    def placement(self, virtual: bool = True) -> Placement:
        ranks = torch.arange(prod(self.ranks)).reshape(self.ranks).tolist()
        return gz.placement("cpu", ranks, names=self.names, virtual=virtual)

    @property
    def parts(self) -> int:
        """Into how many parts the data axes split a batch."""
        return prod(count for count, name in zip(self.ranks, self.names, strict=True) if name != "tp")

    @property
    def stages(self) -> tuple[int, ...]:
        return STAGES if self.parts > 1 else (0,)  # ZeRO splits over data axes


HYBRID = ("dp_replicate", "dp_shard")
LAYOUTS = {
    "dp4": Layout((4,), ("dp",)),
    "dp2 x tp2": Layout((2, 2), ("dp", "tp")),
    "tp4": Layout((4,), ("tp",)),
    "dp2 x dp2": Layout((2, 2), HYBRID),
    "dp2 x dp2, inner": Layout((2, 2), HYBRID, "dp_shard"),
}


@cache
def reference(model: str) -> Trained:
    return plain(Cell(model, "adamw", 0, 1), STEPS)


def graph_of(model: str, layout: Layout, stage: int, virtual: bool = True) -> TrainGraph:
    """A Graph that is to train ``model``, tensor-parallel where the layout has a tensor axis."""
    placement = layout.placement(virtual)
    network = CASES[model].model(torch.float64)
    if "tp" in layout.names and not parallelise(network, PLANS[model], placement):
        raise ValueError(f"the plan of {model} splits nothing on {placement!r}")
    graph = TrainGraph(network, *OPTIMIZERS["adamw"](network.parameters(), STEPS), placement=placement)
    set_stage(graph, layout, stage)
    return graph


def set_stage(graph: TrainGraph, layout: Layout, stage: int) -> None:
    graph.config.enable_zero(stage > 0, stage=stage or 2, axis=layout.axis)


def train(graph: TrainGraph, model: str, parts: int = 1, part: int = 0, through: Layout | None = None) -> Trained:
    """Five steps.  ``part`` of so many ``parts`` of each batch is what this process gives: all, on virtual ranks.

    through: each step is at the next stage of this layout; the Graph is captured once.
    """
    losses = []
    for step in range(STEPS):
        if through is not None:
            set_stage(graph, through, through.stages[step % len(through.stages)])
        batch = CASES[model].batch(step, BATCH, torch.float64)
        losses.append(graph(*(x.chunk(parts)[part] for x in batch)).item())
    return Trained(losses, graph.full_state_dict()["modules"]["model"])


# ---- what a program must not do


def batch_gathers(graph: TrainGraph) -> list[Collective]:
    """Activations that are moved whole or across along a data axis, in forward and backward; ZeRO's are not meant."""
    data = graph.placement.data_axes
    return [
        c
        for c in graph.plan.collectives
        if c.axis in data and c.what_for == "other" and c.phase != "update" and c.kind in ("all_gather", "all_to_all")
    ]


def whole_batches(graph: TrainGraph, other: TrainGraph) -> list[str]:
    """Values of forward and backward that are made from the batch, have a dim of it, and are whole on a data axis.

    other: the same step for a batch of another size, which tells what has such a dim: what has grown.
    """
    axes = [graph.placement.names.index(name) for name in graph.placement.data_axes]
    grown = {node.name: value.type_of(node) for node in _made_from_batch(other)}
    return [
        node.name
        for node in _made_from_batch(graph)
        if grown.get(node.name, value.type_of(node)) != value.type_of(node)
        and any(value.nd_of(node)[axis].is_broadcast for axis in axes)
    ]


def _made_from_batch(graph: TrainGraph) -> list[fx.Node]:
    """Tensors of forward and backward that depend on an input."""
    made = set(graph.program.placeholders("batch"))
    for node in graph.program.nodes:
        if node.op == "call_function" and made.intersection(node.all_input_nodes):
            made.add(node)
    return [n for n in graph.program.nodes if n in made and value.is_tensor(n) and value.phase_of(n) in _PHASES]
