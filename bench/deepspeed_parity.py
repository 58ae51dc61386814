"""One JSON, DeepSpeed itself and its port here: the same steps on two gloo ranks, beside each other.

    python bench/deepspeed_parity.py

Needs ``pip install deepspeed`` (``DS_BUILD_OPS=0`` without a compiler).  Per stage it prints the largest difference of
the losses of 20 steps, and of the weights after them; float32, accumulation, clipping and a schedule included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from _run import on_gloo
from systems import import_deepspeed
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz

RANKS, STEPS = 2, 20
STAGES = (0, 1, 2, 3)


def document(stage: int) -> dict[str, Any]:
    """``torch_adam``: DeepSpeed's own kernel needs a compiler, and its formula is the same."""
    adam = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage},
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of both ranks."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, 3 * torch.tanh(x[:, :4])


class Port(gz.Graph):
    def __init__(self, stage: int) -> None:
        super().__init__(config=gz.GraphConfig.from_deepspeed(document(stage)))
        self.model = model()
        self.add_optimizer(**self.config.deepspeed.optimizer_arguments(self.model.parameters()))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def port(rank: int, stage: int) -> tuple[list[float], list[Tensor]]:
    """Losses, and weights in the end."""
    graph = Port(stage)
    losses = [graph(*(x.chunk(RANKS)[rank] for x in batch(step))).item() for step in range(STEPS)]
    return losses, list(graph.full_state_dict()["modules"]["model"].values())


def original(rank: int, stage: int) -> tuple[list[float], list[Tensor]]:
    """The same by DeepSpeed."""
    deepspeed = import_deepspeed()

    module = model()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=document(stage))
    losses = []
    for step in range(STEPS):
        mean = torch.zeros(())
        for x, y in zip(*(x.chunk(RANKS)[rank].chunk(4) for x in batch(step)), strict=True):
            loss = F.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / 4 / RANKS
        dist.all_reduce(mean)
        losses.append(mean.item())
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        return losses, [p.detach().float().clone() for p in module.parameters()]


def work(rank: int, stage: int) -> tuple[float, float]:
    """The largest differences of losses, relative, and of weights."""
    (ours, weights), (theirs, expected) = port(rank, stage), original(rank, stage)
    loss = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    return loss, max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))


def main() -> None:
    for stage in STAGES:
        loss, weight = on_gloo(RANKS, work, stage)
        print(f"stage {stage}: losses differ by {loss:.1e} at most (relative), weights by {weight:.1e}", flush=True)


if __name__ == "__main__":
    main()
