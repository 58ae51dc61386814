"""Plans of Qwen3-30B-A3B, a mixture of 128 experts, on 8 ranks: what a rank holds, and what a layer sends.

    python bench/experts.py               # the table of docs/experts.md, of 2 and of 1 of its 48 layers
    python bench/experts.py --tokens 512  # of shorter sequences

bfloat16 under float32 masters, AdamW.  One sequence of so many tokens in all on an axis ``ep``, one on each rank of an
axis ``dp``.  A layer is the difference of two plans, of which one has a layer more, so embedding and head are not in
it.  The models are on the meta device, and nothing is computed.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from _run import markdown

import graphzero as gz

RANKS = 8
GB, MB = 1e9, 1e6


class Train(gz.Graph):
    """layers: of the model.  axis: of the placement.  splits: the SBPs of its weights.  stage: of ZeRO, 0 for none."""

    def __init__(self, layers: int, axis: str, splits: str | None, stage: int) -> None:
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        super().__init__(gz.placement("cpu", range(RANKS), names=(axis,), virtual=True))
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

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss


def plan_of(layers: int, axis: str, splits: str | None, stage: int, tokens: int) -> tuple[float, float, float]:
    """Bytes of a rank: of parameters and states, sent of parameters and their gradients, sent otherwise."""
    ids = torch.empty(RANKS if axis == "dp" else 1, tokens, dtype=torch.long, device="meta")
    plan = Train(layers, axis, splits, stage).compile(ids).plan
    weights = sum(c.bytes for c in plan.collectives if c.what_for in ("parameters", "gradients"))
    states = plan.memory["parameters"] + plan.memory["optimizer_states"]
    return states, weights, sum(c.bytes for c in plan.collectives) - weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    warnings.simplefilter("ignore")
    rows = []
    for name, axis, splits, stage in (
        ("`ep`, weights whole", "ep", None, 0),
        ("`ep`, experts split", "ep", "auto", 0),
        ("`dp`, ZeRO 3", "dp", None, 3),
    ):
        one, two = (plan_of(layers, axis, splits, stage, tokens) for layers in (1, 2))
        states, weights, others = (after - before for before, after in zip(one, two, strict=True))
        rows.append([name, f"{states / GB:.2f} GB", f"{weights / MB:.1f} MB", f"{others / MB:.1f} MB"])
    print(markdown(["8 ranks of", "parameters and states", "weights and gradients sent", "others sent"], rows))


if __name__ == "__main__":
    main()
