"""A large value that is cut in sections travels without a buffer, run by run, and is the same as through one."""

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.ir.transfer import transfer_of
from graphzero.ir.transfer_layout import LONG, lay_out
from graphzero.testing import trace_step

pytestmark = pytest.mark.strict
WIDTH = 256


def model(out):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, out), nn.Tanh(), nn.Linear(out, 3)).double()


def batch(step):
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def momentum_graph(hierarchy, stage, out) -> TrainGraph:
    ranks = torch.arange(hierarchy[0] * hierarchy[1]).view(hierarchy).tolist()
    net = model(out)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    place = gz.placement("cpu", ranks, names=("dp_node", "dp_gpu"), virtual=True)
    return TrainGraph(net, mean_square, optimizer, placement=place, stage=stage)


def expected(out):
    net, losses = model(out), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, net.state_dict()


def in_runs(graph):
    """The sections of each transfer without a slot that moves several."""
    found = (transfer_of(node) for node in graph.program.nodes)
    direct = [lay_out(graph.program, moves) for moves in found if moves is not None and moves.is_direct and moves.dims]
    return [layout.sections[0] for layout in direct if layout.sections[0] > 1]


@pytest.mark.parametrize(("hierarchy", "stage"), [((2, 2), 2), ((2, 3), 3)])
def test_a_step_of_large_values_is_that_of_plain_pytorch_and_sends_what_is_planned(hierarchy, stage):
    out = 2 * LONG // 8 // WIDTH * 3
    graph = momentum_graph(hierarchy, stage, out)
    losses, state = expected(out)
    for step, loss in enumerate(losses):
        torch.testing.assert_close(graph(batch(step)), loss, rtol=1e-12, atol=1e-12)
    found = graph.full_state_dict()["modules"]["model"]
    for name, x in state.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)
    assert 2 in in_runs(graph)
    sent = [(entry.kind, entry.axis, entry.nbytes) for entry in trace_step(graph, batch(0))]
    assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives]


def test_short_runs_and_uneven_ones_travel_through_a_slot():
    assert not in_runs(momentum_graph((2, 2), 3, 64).compile(batch(0)))
    assert not in_runs(momentum_graph((2, 2), 3, 2 * LONG // 8 // WIDTH * 3 + 1).compile(batch(0)))
