"""Layouts of four ranks, and Graphs that train a model in them.

``grid.py layouts`` prints the table.  Every benchmark model has a tensor-parallel plan, which says which weights are
split and nothing else; activations follow.  The usual pairs: a column of units (heads, channels, gates), then a row
that sums over them.  A fused projection of q, k and v falls into three sections, each with its own heads; the gates of
a recurrent layer likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any

import torch
from models import CASES, OPTIMIZERS, bert, gpt2, t5, vit
from parity import BATCH, Trained, TrainGraph
from torch import nn

import graphzero as gz
from graphzero.sbp import B, S
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Sbp

# ---- tensor-parallel plans


@dataclass(frozen=True)
class Split:
    """The split over the tensor axis of parameters and buffers whose names match ``pattern``.

    units: a dotted name, seen from the model, of how many units (heads) must each stay whole; where the ranks do not
        divide them, nothing is split.  Empty: any cut will do.
    """

    pattern: str
    sbp: Sbp
    units: str = ""


def colwise(*layers: str, units: str = "", sections: int = 1) -> list[Split]:
    """Outputs of an ``nn.Linear`` or a convolution, [out, in], and what is as long: its bias, a batch norm."""
    return [Split(f"*{layer}{end}", S(0, sections), units) for layer in layers for end in (".*", "_weight", "_bias")]


def rowwise(*layers: str, units: str = "") -> list[Split]:
    """Inputs of an ``nn.Linear`` or a convolution; the bias stays whole."""
    return [Split(f"*{layer}.weight", S(1), units) for layer in layers]


HEADS, GROUPS = "config.num_attention_heads", "config.num_key_value_heads"
ATTENTION = [
    *colwise("self_attn.q_proj", units=HEADS), *colwise("self_attn.k_proj", "self_attn.v_proj", units=GROUPS),
    *rowwise("self_attn.o_proj", units=HEADS),
]  # fmt: skip


def split_gates(gates: int) -> list[Split]:
    names = ("weight_ih_l*", "weight_hh_l*", "bias_ih_l*", "bias_hh_l*")
    return [*(Split(f"*.recurrent.{name}", S(0, gates)) for name in names), *rowwise("head")]


PLANS: dict[str, list[Split]] = {
    "mlp": [*colwise("body.0"), *rowwise("body.2")],
    "convnet": [*colwise("body.0", "body.1"), *rowwise("body.3")],
    "gpt2": [  # its Conv1D holds [in, out]
        Split("*.attn.c_attn.weight", S(1, 3), HEADS), Split("*.attn.c_attn.bias", S(0, 3), HEADS),
        Split("*.attn.c_proj.weight", S(0), HEADS),
        Split("*.mlp.c_fc.weight", S(1)), Split("*.mlp.c_fc.bias", S(0)), Split("*.mlp.c_proj.weight", S(0)),
    ],
    "llama": [*ATTENTION, *colwise("gate_proj", "up_proj"), *rowwise("down_proj")],
    "qwen3moe": [*ATTENTION, Split("*.experts.gate_up_proj", S(1, 2)), Split("*.experts.down_proj", S(2))],
    "lstm": split_gates(4),
    "gru": split_gates(3),
    "encoder": [
        *colwise("self_attn.in_proj", units="encoder.layers.0.self_attn.num_heads", sections=3),
        *rowwise("self_attn.out_proj", units="encoder.layers.0.self_attn.num_heads"),
        *colwise("linear1"), *rowwise("linear2"),
    ],
    "bert": [
        *colwise("self.query", "self.key", "self.value", units=HEADS), *rowwise("attention.output.dense", units=HEADS),
        *colwise("intermediate.dense"), *rowwise("layer.*.output.dense"),
    ],
    "vit": [
        *colwise("attention.q_proj", "attention.k_proj", "attention.v_proj", units=HEADS),
        *rowwise("attention.o_proj", units=HEADS), *colwise("fc1"), *rowwise("fc2"),
    ],
    "t5": [
        *colwise("Attention.q", "Attention.k", "Attention.v", units="config.num_heads"),
        *rowwise("Attention.o", "relative_attention_bias", units="config.num_heads"), *colwise("wi"), *rowwise("wo"),
    ],
}  # fmt: skip
MEGATRON = [*PLANS["llama"], *colwise("embed_tokens", "lm_head")]  # also along the vocabulary


def parallelise(model: nn.Module, plan: list[Split], placement: Placement, axis: str = "tp") -> list[str]:
    """Split ``model`` as ``plan`` says over ``axis``, in place; the names of what is split."""
    network: Any = getattr(model, "body", None) or model.inner
    ranks, sbps = placement.hierarchy[placement.names.index(axis)], {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        split = next((s for s in plan if tensor.dim() and fnmatchcase(name, s.pattern)), None)
        if split is not None and not (split.units and attrgetter(split.units)(network) % ranks):
            sbps[name] = tuple(split.sbp if other == axis else B for other in placement.names)
    gz.to_global(model, placement, sbps)
    return list(sbps)


# ---- layouts

STEPS, LIMIT = 5, 1e-6
STAGES = (0, 1, 2, 3)
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

    @property
    def size(self) -> int:
        return prod(self.ranks)

    def placement(self, virtual: bool = True) -> Placement:
        ranks = torch.arange(self.size).reshape(self.ranks).tolist()
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
    **{f"dp{ranks}": Layout((ranks,), ("dp",)) for ranks in (1, 2, 3, 4)},
    "dp2 x tp2": Layout((2, 2), ("dp", "tp")),
    "tp4": Layout((4,), ("tp",)),
    "dp2 x dp2": Layout((2, 2), HYBRID),
    "dp2 x dp2, inner": Layout((2, 2), HYBRID, "dp_shard"),
}


@cache
def train_eagerly(
    name: str, optimizer_name: str = "adamw", dtype: torch.dtype = torch.float64, steps: int = STEPS
) -> Trained:
    """Plain PyTorch on the whole batch."""
    model = CASES[name].model(dtype)
    optimizer, schedule = OPTIMIZERS[optimizer_name](model.parameters(), steps)
    losses = []
    for step in range(steps):
        loss = model(*CASES[name].batch(step, BATCH, dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return Trained(losses, {name: x.detach().clone() for name, x in model.state_dict().items()})


def build_graph(
    model: str, layout: Layout, stage: int, virtual: bool = True, optimizer: str = "adamw",
    dtype: torch.dtype = torch.float64, steps: int = STEPS,
) -> TrainGraph:  # fmt: skip
    """A Graph that is to train ``model`` for so many steps, tensor-parallel where the layout has a tensor axis."""
    placement = layout.placement(virtual)
    network = CASES[model].model(dtype)
    if "tp" in layout.names and not parallelise(network, PLANS[model], placement):
        raise ValueError(f"the plan of {model} splits nothing on {placement!r}")
    graph = TrainGraph(network, *OPTIMIZERS[optimizer](network.parameters(), steps), placement=placement)
    set_stage(graph, layout, stage)
    return graph


def set_stage(graph: TrainGraph, layout: Layout, stage: int) -> None:
    graph.config.enable_zero(stage > 0, stage=stage or 2, axis=layout.axis)


def train_graph(
    graph: TrainGraph, model: str, parts: int = 1, part: int = 0, through: Layout | None = None,
    dtype: torch.dtype = torch.float64, steps: int = STEPS,
) -> Trained:  # fmt: skip
    """``part`` of so many ``parts`` of each batch is what this process gives: all, on virtual ranks.

    through: each step is at the next stage of this layout; the Graph is captured once.
    """
    losses = []
    for step in range(steps):
        if through is not None:
            set_stage(graph, through, through.stages[step % len(through.stages)])
        batch = CASES[model].batch(step, BATCH, dtype)
        losses.append(graph(*(x.chunk(parts)[part] for x in batch)).item())
    return Trained(losses, graph.full_state_dict()["modules"]["model"])
