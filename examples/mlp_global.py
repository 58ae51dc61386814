"""mlp.py written with global tensors: where each tensor lies is said with a placement and an SBP.

    python examples/mlp_global.py                                     # two virtual ranks in this process
    torchrun --standalone --nproc-per-node=2 examples/mlp_global.py   # two ranks

Stage 3 then splits the parameters, which the list at the end shows.
"""

import os

import torch
from torch import nn

import graphzero as gz

BATCH, INPUTS, CLASSES = 64, 256, 10
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 2))

placement = gz.placement("cpu", range(RANKS), virtual="RANK" not in os.environ)
torch.manual_seed(0)
teacher = torch.randn(INPUTS, CLASSES)
model = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES))
model = gz.to_global(model, placement=placement, sbp=gz.sbp.broadcast)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


class TrainGraph(gz.Graph):
    def __init__(self):
        super().__init__(placement)
        self.model = model
        self.loss_fn = nn.CrossEntropyLoss()
        self.add_optimizer(optimizer)
        self.config.enable_zero(True, stage=3)

    def build(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def global_batch(step: int):
    """A batch that is split along dim 0: every rank gives its own part of it (virtual ranks: the whole)."""
    x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    pieces = (x, (x @ teacher).argmax(1))
    if not placement.virtual:
        pieces = tuple(piece.chunk(RANKS)[RANK] for piece in pieces)
    return tuple(gz.to_global(piece, placement=placement, sbp=gz.sbp.split(0)) for piece in pieces)


def show(*args):
    if RANK == 0:
        print(*args)


graph = TrainGraph()
for step in range(200):
    loss = graph(*global_batch(step))  # an annotation comes in, so an annotation comes out
    loss = gz.to_local(loss)
    if step % 20 == 0:
        show(f"step {step:3}  loss {loss:.4f}")

show(f"step {step:3}  loss {loss:.4f}\n")
for name, parameter in model.named_parameters():
    show(f"{name:<10} {list(parameter.shape)!s:<12} {gz.sbp.of(parameter)}")
show()
show(graph.plan)
