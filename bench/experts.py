"""Plans of Qwen3-30B-A3B, a mixture of 128 experts, on 8 or 64 ranks: what a rank holds, and what a layer sends.

    python bench/experts.py               # the first table of docs/experts.md, of 2 and of 1 of its 48 layers
    python bench/experts.py --ways        # the second: the ways of a data axis of 64 ranks that splits experts
    python bench/experts.py --tokens 512  # of shorter sequences

bfloat16 under float32 masters, AdamW.  One sequence of so many tokens in all on an axis ``ep``, one on each rank of an
axis ``dp``.  A layer is the difference of two plans, of which one has a layer more, so embedding and head are not in
it.  The models are on the meta device, and nothing is computed.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from _run import markdown

import graphzero as gz

GB, MB = 1e9, 1e6


class Train(gz.Graph):
    """layers: of the model.  axis: of the placement.  splits: the SBPs of its weights.  stage: of ZeRO, 0 for none.
    way: of experts that a data axis splits."""

    def __init__(
        self, layers: int, ranks: int, axis: str, splits: str | None, stage: int, way: str = "auto", room: float = 1.25
    ) -> None:
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        super().__init__(gz.placement("cpu", range(ranks), names=(axis,), virtual=True))
        config = Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            max_position_embeddings=40960,
        )  # fmt: skip
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
            )
        if splits is not None:
            gz.to_global(self.model, self.placement, splits)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_amp()
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_split_experts(way, capacity=room)

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss


def plan_of(tokens: int, layers: int, ranks: int, axis: str, *how: Any) -> tuple[float, ...]:
    """Bytes of a rank: of parameters and states, what the peak has beside them, sent of parameters and their gradients,
    and sent otherwise."""
    ids = torch.empty(ranks if axis == "dp" else 1, tokens, dtype=torch.long, device="meta")
    plan = Train(layers, ranks, axis, *how).compile(ids).plan
    weights = sum(c.bytes for c in plan.collectives if c.what_for in ("parameters", "gradients"))
    states = plan.memory["parameters"] + plan.memory["optimizer_states"]
    return states, plan.memory.peak - states, weights, sum(c.bytes for c in plan.collectives) - weights


def layer_of(tokens: int, *how: Any) -> tuple[float, ...]:
    """The bytes of one layer."""
    one, two = (plan_of(tokens, layers, *how) for layers in (1, 2))
    return tuple(after - before for before, after in zip(one, two, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ways", action="store_true", help="of a data axis of 64 ranks")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    if options.ways:
        ways = (("weights", 1.25), ("tokens", 1.25), ("exchange", 1.25), ("exchange", 4.0))
        for way, room in ways:
            _, peak, weights, others = layer_of(options.tokens, 64, "dp", None, 3, way, room)
            name = f"`{way}`" + (f", room for {room:g} shares" if way == "exchange" else "")
            rows.append([name, f"{peak / GB:.2f} GB", f"{weights / MB:.1f} MB", f"{others / MB:.1f} MB"])
        print(markdown(["64 ranks, ZeRO 3", "more at peak", "weights and gradients sent", "others sent"], rows))
        return
    for name, axis, splits, stage in (
        ("`ep`, weights whole", "ep", None, 0),
        ("`ep`, experts split", "ep", "auto", 0),
        ("`dp`, ZeRO 3", "dp", None, 3),
    ):
        states, _, weights, others = layer_of(options.tokens, 8, axis, splits, stage)
        rows.append([name, f"{states / GB:.2f} GB", f"{weights / MB:.1f} MB", f"{others / MB:.1f} MB"])
    print(markdown(["8 ranks of", "parameters and states", "weights and gradients sent", "others sent"], rows))


if __name__ == "__main__":
    main()
