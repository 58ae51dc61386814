"""A model with a tied weight, its data and its Graph, for what several gloo processes check."""

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(6, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + self.second(x)))


def make(seed):
    torch.manual_seed(seed)
    return Tied().double()


def batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


def share(seed):
    return tuple(t.chunk(2)[dist.get_rank()] for t in batch(seed))


def output_and_loss(model, x, y):
    out = model(x)
    return {"out": out, "loss": nn.functional.mse_loss(out, y)}


def mse_graph(model, optimizer=None, stage=0, scheduler=None, kind=TrainGraph) -> TrainGraph:
    return kind(model, output_and_loss, optimizer, placement=None, scheduler=scheduler, stage=stage)


def sgd(model, lr=0.1):
    return torch.optim.SGD([{"params": list(model.parameters())}], lr=lr, momentum=0.9)


def eager(steps, seed=0):
    model = make(seed)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


def trained(stage, steps=3):
    """Only rank 0 begins with the right values, rate and schedule."""
    rank = dist.get_rank()
    model = make(rank)
    optimizer = sgd(model, lr=0.1 if rank == 0 else 7.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    graph = mse_graph(model, optimizer, stage, scheduler)
    found = [graph(*share(step)) for step in range(steps)]
    return graph, found


def same(ours, theirs):
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, name=name: f"{name}: {m}")


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()
    dist.barrier()
