"""A tensor-parallel plan for every benchmark model: which weights are split, and nothing else; activations follow.

The usual pairs: a column of units (heads, channels, gates), then a row that sums over them.  A fused projection of
q, k and v falls into three sections, each with its own heads; the gates of a recurrent layer likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

import graphzero as gz
from graphzero.sbp import B, S
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Sbp


@dataclass(frozen=True)
class Split:
    """The split over the tensor axis of parameters and buffers whose names match ``pattern``.

    units: a dotted name, seen from the model, of how many units (heads) must each stay whole; where the ranks do not
        divide them, nothing is split.  Empty: any cut will do.
    """

    pattern: str
    sbp: Sbp
    units: str = ""


def column(*layers: str, units: str = "", sections: int = 1) -> list[Split]:
    """Outputs of an ``nn.Linear`` or a convolution, [out, in], and what is as long: its bias, a batch norm."""
    return [Split(f"*{layer}{end}", S(0, sections), units) for layer in layers for end in (".*", "_weight", "_bias")]


def row(*layers: str, units: str = "") -> list[Split]:
    """Inputs of an ``nn.Linear`` or a convolution; the bias stays whole."""
    return [Split(f"*{layer}.weight", S(1), units) for layer in layers]


HEADS, GROUPS = "config.num_attention_heads", "config.num_key_value_heads"
ATTENTION = [
    *column("self_attn.q_proj", units=HEADS), *column("self_attn.k_proj", "self_attn.v_proj", units=GROUPS),
    *row("self_attn.o_proj", units=HEADS),
]  # fmt: skip


def recurrent(gates: int) -> list[Split]:
    names = ("weight_ih_l*", "weight_hh_l*", "bias_ih_l*", "bias_hh_l*")
    return [*(Split(f"*.recurrent.{name}", S(0, gates)) for name in names), *row("head")]


PLANS: dict[str, list[Split]] = {
    "mlp": [*column("body.0"), *row("body.2")],
    "convnet": [*column("body.0", "body.1"), *row("body.3")],
    "gpt2": [  # its Conv1D holds [in, out]
        Split("*.attn.c_attn.weight", S(1, 3), HEADS), Split("*.attn.c_attn.bias", S(0, 3), HEADS),
        Split("*.attn.c_proj.weight", S(0), HEADS),
        Split("*.mlp.c_fc.weight", S(1)), Split("*.mlp.c_fc.bias", S(0)), Split("*.mlp.c_proj.weight", S(0)),
    ],
    "llama": [*ATTENTION, *column("gate_proj", "up_proj"), *row("down_proj")],
    "qwen3moe": [*ATTENTION, Split("*.experts.gate_up_proj", S(1, 2)), Split("*.experts.down_proj", S(2))],
    "lstm": recurrent(4),
    "gru": recurrent(3),
    "encoder": [
        *column("self_attn.in_proj", units="encoder.layers.0.self_attn.num_heads", sections=3),
        *row("self_attn.out_proj", units="encoder.layers.0.self_attn.num_heads"),
        *column("linear1"), *row("linear2"),
    ],
    "bert": [
        *column("self.query", "self.key", "self.value", units=HEADS), *row("attention.output.dense", units=HEADS),
        *column("intermediate.dense"), *row("layer.*.output.dense"),
    ],
    "vit": [
        *column("attention.q_proj", "attention.k_proj", "attention.v_proj", units=HEADS),
        *row("attention.o_proj", units=HEADS), *column("fc1"), *row("fc2"),
    ],
    "t5": [
        *column("Attention.q", "Attention.k", "Attention.v", units="config.num_heads"),
        *row("Attention.o", "relative_attention_bias", units="config.num_heads"), *column("wi"), *row("wo"),
    ],
}  # fmt: skip


def parallelise(model: nn.Module, plan: list[Split], placement: Placement, axis: str = "tp") -> list[str]:
    """Split ``model`` as ``plan`` says over ``axis``, in place; the names of what is split."""
    at = placement.names.index(axis)
    ranks, wanted = placement.hierarchy[at], {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        split = next((s for s in plan if tensor.dim() and fnmatchcase(name, s.pattern)), None)
        if split is not None and not (split.units and _number(model, split.units) % ranks):
            wanted[name] = tuple(split.sbp if i == at else B for i in range(len(placement.names)))
    gz.to_global(model, placement, wanted)
    return list(wanted)


def _number(model: nn.Module, name: str) -> int:
    found: Any = getattr(model, "body", None) or model.inner
    for part in name.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return int(found)
