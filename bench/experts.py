"""Plans of Qwen3-30B-A3B, a mixture of 128 experts, on 8 or 64 ranks: what a rank holds, and what a layer sends.

    python bench/experts.py               # the first table of docs/experts.md, of 2 and of 1 of its 48 layers
    python bench/experts.py --ways        # the second: the ways of a data axis of 64 ranks that splits experts
    python bench/experts.py --tokens 512  # of shorter sequences
    python bench/experts.py --time        # the third: steps of a small one in each way, on two gloo ranks

bfloat16 under float32 masters, AdamW.  One sequence of so many tokens in all on an axis ``ep``, one on each rank of an
axis ``dp``.  A layer is the difference of two plans, of which one has a layer more, so embedding and head are not in
it.  The models are on the meta device, and nothing is computed, but with ``--time``: then a rank has 2 sequences of 256
tokens and weights are float32, beside the same model under DDP, with fused AdamW.  Rounds alternate as in
``step_time.py``; shown is the median over rounds of the ratio to DDP's step, with its quartiles.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from _run import average, markdown, on_gloo
from step_time import Timed, peer_table, time_in_turn
from systems import adamw
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphzero as gz

GB, MB = 1e9, 1e6
SMALL = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 16,
         "num_experts_per_tok": 2}  # fmt: skip
WAYS = (("weights", 1.25), ("tokens", 1.25), ("exchange", 1.25), ("exchange", 2.0))


class Mixture(gz.Graph):
    model: nn.Module

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss


class Train(Mixture):
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


class TrainSmall(Mixture):
    """The same on two gloo ranks at stage 3, in float32."""

    def __init__(self, model: nn.Module, way: str, room: float) -> None:
        super().__init__(gz.placement("cpu", range(2)))
        self.model = model
        self.add_optimizer(adamw(model))
        self.config.enable_zero(stage=3)
        self.config.set_split_experts(way, capacity=room)


def small_model() -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
        Qwen3MoeConfig(**SMALL), experts_implementation="grouped_mm", attn_implementation="sdpa"
    )


def name_of(way: str, room: float) -> str:
    return f"`{way}`" + (f", room for {room:g} shares" if way == "exchange" else "")


def time_ways(rank: int) -> dict[str, Timed]:
    """Every rank: steps of each way, and of DDP."""
    warnings.simplefilter("ignore")
    model = small_model()
    optimizer, ddp = adamw(model), DistributedDataParallel(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ddp(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    steps: dict[str, Any] = {"DDP": step} | {name_of(*way): TrainSmall(small_model(), *way) for way in WAYS}
    generator = torch.Generator().manual_seed(rank)
    batches = [(torch.randint(SMALL["vocab_size"], (2, 256), generator=generator),) for _ in range(4)]
    return time_in_turn(steps, batches, 7, 4, lambda loss: average(float(loss)), between_barriers=True)


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
    parser.add_argument("--time", action="store_true", help="steps on two gloo ranks")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    if options.time:
        print(peer_table(on_gloo(2, time_ways), "DDP"))
        return
    if options.ways:
        for way, room in (*WAYS[:3], ("exchange", 4.0)):
            _, peak, weights, others = layer_of(options.tokens, 64, "dp", None, 3, way, room)
            rows.append([name_of(way, room), f"{peak / GB:.2f} GB", f"{weights / MB:.1f} MB", f"{others / MB:.1f} MB"])
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
