"""A model for the passes of ``examples/passes``, as a Graph and as plain PyTorch on one device."""

from collections import Counter

import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz

NODES = ("dp_node", "dp_gpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(width=16, blocks=1):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 8, bias=False)).double()


def batch(step=0, rows=16, width=16):
    return torch.randn(rows, 4, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def nodes(count=2, ranks=2):
    """Virtual ranks of so many nodes."""
    return gz.placement("cpu", torch.arange(count * ranks).view(count, ranks).tolist(), names=NODES, virtual=True)


def clipped_graph(*passes, where=None, stage=3, net=None, steps=1, after="cast_before_gather") -> TrainGraph:
    net = net or model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    graph = TrainGraph(
        net, mean_square, optimizer, placement=where or nodes(), clip=1.0, stage=stage, micro_batches=steps
    )
    for one in passes:
        graph.config.add_pass(one, after=after)
    return graph


def on_one_device(steps=3):
    """Losses and parameters of the same steps in plain PyTorch."""
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(net.named_parameters())


def assert_trains_as_on_one_device(graph):
    losses, parameters = on_one_device()
    close = {"rtol": 1e-12, "atol": 1e-12}
    for step, loss in enumerate(losses):
        torch.testing.assert_close(graph(batch(step)), loss, **close)
    for name, parameter in graph.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), parameters[name].detach(), **close, msg=name)


def sent(graph, what_for):
    """Bytes by (axis, phase) that a step sends of parameters, or of gradients."""
    found = Counter()
    for one in graph.plan.collectives:
        if one.what_for == what_for:
            found[one.axis, one.phase] += one.bytes
    return found


def assert_sends_what_is_planned(graph, *args):
    planned = Counter((one.kind, one.axis, one.bytes) for one in graph.plan.collectives)
    graph(*args)
    assert Counter((one.kind, one.axis, one.nbytes) for one in gz.testing.trace_step(graph, *args)) == planned
