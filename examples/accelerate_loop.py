"""A loop over Accelerate's loader whose step a Graph takes; ``--plain`` is Accelerate's own, to compare.

    torchrun --standalone --nproc-per-node=2 examples/accelerate_loop.py

Accelerate gives each rank its share of the batches, and that is all: model and optimizer are not prepared, because this
wraps them in DDP.  Clipping, mixed precision and micro-batches are settings of the Graph.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer import make_model, windows
from transformers import default_data_collator

import graphzero as gz


class LoopGraph(gz.Graph):
    """One step of a language model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, clip: float | None = None):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, clip_grad_norm=clip)
        self.config.enable_zero(stage=stage)

    def build(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        return loss


def make_loader(samples: int, context: int) -> DataLoader[dict[str, Tensor]]:
    """Rows of equally many targets: where ranks have unequal numbers of them, the mean of DDP is not that of tokens."""
    rows = [{"input_ids": one["input_ids"], "labels": one["input_ids"]} for one in windows(samples, context)]
    return DataLoader(rows, batch_size=4, collate_fn=default_data_collator, drop_last=True)  # type: ignore[arg-type]


def train(samples: int, context: int, width: int, stage: int) -> list[float]:
    """The loss of each step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = make_model(context, width)
    graph = LoopGraph(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage, clip=1.0)
    return [graph(**batch).item() for batch in accelerator.prepare(make_loader(samples, context))]


def train_plainly(samples: int, context: int, width: int) -> list[float]:
    """The same in a loop in which Accelerate prepares everything; the mean over ranks of their losses."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = make_model(context, width)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), make_loader(samples, context)
    )
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--plain", action="store_true", help="Accelerate's own loop")
    options = parser.parse_args()
    losses = train_plainly(400, 64, 64) if options.plain else train(400, 64, 64, options.stage)
    if Accelerator().is_main_process:
        for i, loss in enumerate(losses, 1):
            print(f"step {i}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
