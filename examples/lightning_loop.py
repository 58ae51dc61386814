"""A LightningModule whose training step a Graph takes; ``--plain`` is Lightning's own, to compare.

    pip install pytorch-lightning
    torchrun --standalone --nproc-per-node=2 examples/lightning_loop.py

Optimization is manual, so Lightning reduces no gradients; ``gradient_clip_val``, ``accumulate_grad_batches`` and
``precision`` are settings of the Graph.  At stage 3 modules hold shards: save with ``gz.save``, not with Lightning's
checkpoints, and evaluate with a Graph without ``backward()``.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytorch_lightning as lightning
import torch
from accelerate_loop import LoopGraph, make_loader
from torch import Tensor
from trainer import make_model

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)


class PlainModule(lightning.LightningModule):
    """A language model that Lightning trains."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.model = make_model(context, width)
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss


class GraphModule(PlainModule):
    """The same, with the step of a Graph."""

    def __init__(self, context: int, width: int, stage: int):
        super().__init__(context, width)
        self.stage, self.automatic_optimization = stage, False

    def on_train_start(self) -> None:
        self.graph = LoopGraph(self.model, self.optimizers().optimizer, self.stage)  # the process group is there by now

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.graph(**batch)
        self.losses.append(loss.item())
        self.optimizers().step()  # finds no gradients, for the Graph has stepped; Lightning counts it in global_step
        return loss


def fit(module: PlainModule, samples: int, context: int, ranks: int, **more: Any) -> list[float]:
    """Train in one epoch; the loss of each step.  ranks: those that torchrun has started."""
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=ranks,
        strategy="ddp" if ranks > 1 else "auto", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    trainer.fit(module, make_loader(samples, context))
    assert trainer.global_step == len(module.losses)
    return module.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--plain", action="store_true", help="Lightning's own step")
    options = parser.parse_args()
    module = PlainModule(64, 64) if options.plain else GraphModule(64, 64, options.stage)
    losses = fit(module, 400, 64, options.ranks)
    if module.global_rank == 0:
        for i, loss in enumerate(losses, 1):
            print(f"step {i}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
