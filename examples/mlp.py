"""The smallest training program: an MLP learns the classes of a fixed random teacher, under ZeRO stage 2.

    python examples/mlp.py                                      # one process
    torchrun --standalone --nproc-per-node=2 examples/mlp.py    # two ranks, half of each batch on either

The global batch is the same, and so are the losses, but for rounding.
"""

import os

import torch
from torch import nn

import graphzero as gz

BATCH, INPUTS, CLASSES = 64, 256, 10  # of the whole batch, however many ranks share it
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

torch.manual_seed(0)
teacher = torch.randn(INPUTS, CLASSES)
model = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, CLASSES))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


class TrainGraph(gz.Graph):
    def __init__(self):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.add_optimizer(optimizer)
        self.config.enable_zero(True, stage=2)

    def build(self, x, y):
        """Written for one device and the whole batch."""
        preds = self.model(x)
        loss = self.loss_fn(preds, y)
        loss.backward()
        return loss, (preds.argmax(1) == y).float().mean()


def batches(steps: int):
    """This rank's share of each batch."""
    for step in range(steps):
        x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
        yield x.chunk(RANKS)[RANK], (x @ teacher).argmax(1).chunk(RANKS)[RANK]


graph = TrainGraph()
for step, (x, y) in enumerate(batches(200)):
    loss, accuracy = graph(x, y)
    if RANK == 0 and step % 20 == 0:
        print(f"step {step:3}  loss {loss:.4f}  accuracy {accuracy:.2f}")

if RANK == 0:
    print(f"step {step:3}  loss {loss:.4f}  accuracy {accuracy:.2f}\n")
    print("\n".join(str(graph.program).splitlines()[:24]), "\n  ...\n", sep="\n")
    print(graph.plan)
