"""A LightningModule whose training step a Graph takes; ``--plain`` is Lightning's own, to compare.

    pip install pytorch-lightning
    torchrun --standalone --nproc-per-node=2 examples/lightning_loop.py

Optimization is manual, so Lightning reduces no gradients; ``gradient_clip_val``, ``accumulate_grad_batches`` and
``precision`` are settings of the Graph.  Lightning's checkpoints hold whole tensors, whatever the stage.  At stage 3
modules hold shards: evaluate with a Graph without ``backward()``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as lightning
import torch
from accelerate_loop import LoopGraph, make_loader
from torch import Tensor
from trainer import make_model

import graphzero as gz

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
        self.random: dict[str, Any] | None = None

    def on_fit_start(self) -> None:
        """The process group and the optimizer are there by now, and no batch has been read."""
        self.graph = LoopGraph(self.model, self.optimizers().optimizer, self.stage)
        if self.random is not None:
            self.graph.load_state_dict({"random": self.random}, strict=False)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.graph(**batch)
        self.losses.append(loss.item())
        self.optimizers().step()  # finds no gradients, for the Graph has stepped; Lightning counts it in global_step
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put whole tensors in the place of shards; every rank calls it."""
        full = self.graph.full_state_dict()
        checkpoint["state_dict"] = {f"model.{name}": x for name, x in full["modules"]["model"].items()}
        checkpoint["random"] = full["random"]
        if "optimizer_states" in checkpoint:  # not with save_weights_only
            checkpoint["optimizer_states"] = full["optimizers"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.random = checkpoint["random"]  # Lightning loads the rest, before the first step splits it


class UntilAllEnd:
    """Batches of ``loader``, and batches without rows until the loaders of all ranks have ended."""

    def __init__(self, loader: Iterable[Any], module: GraphModule):
        self.loader, self.module = loader, module

    def __iter__(self) -> Any:
        return gz.until_all_end(self.loader, self.module.graph)


def fit(
    module: PlainModule, loader: Iterable[Any], ranks: int, checkpoint: str | None = None, **more: Any
) -> list[float]:
    """Train, in one epoch unless told otherwise; the loss of each step.  ranks: those that torchrun has started."""
    options = {"max_epochs": 1, "enable_checkpointing": False} | more
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu", devices=ranks,
        strategy="ddp" if ranks > 1 else "auto", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--plain", action="store_true", help="Lightning's own step")
    options = parser.parse_args()
    module = PlainModule(64, 64) if options.plain else GraphModule(64, 64, options.stage)
    losses = fit(module, make_loader(400, 64), options.ranks)
    if module.global_rank == 0:
        for i, loss in enumerate(losses, 1):
            print(f"step {i}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
