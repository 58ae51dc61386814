"""When ops run: by hand on programs in text, and operations counted against torch's own counter on a real run."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD
from graphzero.plan.device import Device
from graphzero.plan.seconds import OpWork, work_of
from graphzero.plan.timeline import Timeline, timeline

# A product of 64 x 64 x 64 takes 2 s, a byte of memory nothing, a byte sent 1 s; a start takes what it is said to.
SENT = 64 * 64 * 4 * 3 / 4  # by each of 4 ranks that gather w
PROGRAM = """
graph toy(dp=4) local
  w = param()                                              : f32[64, 64]  S(0)!
  x = batch()                                              : f32[64, 64]  B!
forward:
  l = launch('bucket_all_gather', None, [w], [0], 'dp')    : (f32[64, 64]  B)
  a = mm(x, x)                                             : f32[64, 64]  B
  b = mm(a, x)                                             : f32[64, 64]  B
  h = wait(l)                                              : (f32[64, 64]  B)
  v = h[0]                                                 : f32[64, 64]  B
  c = mm(b, v)                                             : f32[64, 64]  B
  return c
"""


def device(bandwidth: float, call: float = 0.0, runs_ahead: bool = False, overlaps: bool = True) -> Device:
    return Device(
        "toy", "cpu", {"f32": 64**3}, memory=1e30, capacity=1, call=call, links={"dp": gz.Link(0.0, bandwidth)},
        runs_ahead=runs_ahead, overlaps=overlaps,
    )  # fmt: skip


def of(**more: float) -> Timeline:
    return timeline(gz.parse(PROGRAM), device(**more))


def test_a_short_transfer_hides_behind_what_runs_between_launch_and_wait() -> None:
    found = of(bandwidth=SENT / 3)
    assert (found.seconds, found.compute, found.communication, found.exposed) == (6, 6, 3, 0)
    assert {event.name: (event.begin, event.end) for event in found.events} == {
        "l": (0, 3), "a": (0, 2), "b": (2, 4), "c": (4, 6)
    }  # fmt: skip


def test_of_a_long_one_the_rest_is_waited_for() -> None:
    found = of(bandwidth=SENT / 7)
    assert (found.seconds, found.compute, found.communication, found.exposed) == (9, 6, 7, 3)


def test_where_transfers_do_not_run_beside_compute_nothing_hides() -> None:
    found = of(bandwidth=SENT / 3, overlaps=False)
    assert (found.seconds, found.exposed) == (9, 3)


def test_a_call_costs_each_op_where_the_host_computes_and_only_short_ops_where_it_runs_ahead() -> None:
    assert of(bandwidth=SENT, call=0.5).seconds == 3 * 2.5
    found = of(bandwidth=SENT, call=0.5, runs_ahead=True)
    assert found.seconds < 3 * 2.5 and found.host == pytest.approx(1.0)  # the launch, and the first product
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.host)
    slow = of(bandwidth=SENT, call=4.0, runs_ahead=True)
    assert slow.seconds == pytest.approx(4 * 4.0 + 2)  # four starts, and the last product


class Net(gz.Graph):
    """A small convolutional net with attention after it."""

    def __init__(self, batches: int = 1, stage: int = 2, ranks: int = 2):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.conv, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.add_optimizer(torch.optim.AdamW(self.parameters()))
        self.config.enable_zero(stage > 0, stage=stage or 2)
        self.config.set_gradient_accumulation_steps(batches)

    def parameters(self) -> list[nn.Parameter]:
        return [p for held in (self.conv, self.narrow, self.attention, self.head) for p in held.parameters()]

    def build(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.conv(x)).flatten(2).transpose(1, 2)
        y, _ = self.attention(y, y, y, need_weights=False)
        loss = self.head(y).square().mean()
        loss.backward()
        return loss


def test_operations_are_those_that_torch_counts_when_one_device_runs_the_step() -> None:
    graph, x = Net(ranks=1, stage=0), torch.randn(4, 3, 6, 6, requires_grad=True)
    found = timeline(graph.compile(x.detach()).program, device(1.0))
    with FlopCounterMode(display=False) as counter:
        graph.build(x)
    known = counter.get_flop_counts()["Global"]
    mine = Counter[str]()
    for event in found.events:
        mine[event.kind] += int(event.flops)
    assert mine["mm"] + mine["addmm"] == known[torch.ops.aten.mm] + known[torch.ops.aten.addmm]
    assert mine["convolution"] == known[torch.ops.aten.convolution] > 0
    heads, length, width = 4 * 2, 16, 4
    assert mine["attention"] == 2 * 2 * heads * length * length * width
    assert mine["attention_backward"] == 5 * 2 * heads * length * length * width


def test_a_grouped_convolutions_gradients_take_twice_its_operations() -> None:
    program = Net(ranks=1, stage=0).compile(torch.randn(4, 3, 6, 6)).program
    at = liveness(program)
    ops = [work for node in program.nodes if (work := work_of(at, node)) and "convolution" in work.op]
    first, grouped, of_grouped, of_first = (work.flops for work in ops)
    assert of_grouped == 2 * grouped
    assert of_first == first  # nobody wants the gradient of the input


def test_attention_with_dropout_reads_and_writes_its_scores_time_and_again() -> None:
    def works(dropout: float) -> list[OpWork]:
        graph = Net(ranks=1, stage=0)
        graph.attention.dropout = dropout
        program = graph.compile(torch.randn(4, 3, 6, 6)).program
        at = liveness(program)
        ours = [node for node in program.nodes if node.target in (ATTENTION, ATTENTION_BACKWARD)]
        return [work for node in ours if (work := work_of(at, node))]

    heads, length = 4 * 2, 16
    for kept, dropped in zip(works(0.0), works(0.1), strict=True):
        assert dropped.flops == kept.flops
        assert dropped.nbytes > kept.nbytes + 20 * 4 * heads * length * length


def test_micro_batches_run_as_often_as_they_are() -> None:
    whole, found = (
        timeline(Net(count).compile(torch.randn(8, 3, 6, 6)).program, device(1e9, call=1e-6)) for count in (1, 4)
    )
    calls = Counter(event.kind for event in found.events)
    assert calls["convolution"] == 2 * 4 and calls["attention_backward"] == 4
    assert sum(event.flops for event in found.events) == pytest.approx(sum(event.flops for event in whole.events))
    assert found.compute > whole.compute  # more starts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_timeline_has_the_plans_transfers_and_its_parts_add_up(stage: int) -> None:
    graph = Net(stage=stage).compile(torch.randn(8, 3, 6, 6))
    for ahead in (False, True):
        found = timeline(graph.program, device(1e9, call=1e-6, runs_ahead=ahead))
        sent = [event for event in found.events if event.stream == "communication dp"]
        assert [(event.kind, event.nbytes) for event in sent] == [(c.kind, c.bytes) for c in graph.plan.collectives]
        assert found.seconds == pytest.approx(found.compute + found.exposed + found.host)
        for stream in ("compute", "communication dp"):
            ours = [event for event in found.events if event.stream == stream]
            assert all(a.end <= b.begin + 1e-12 for a, b in zip(ours, ours[1:], strict=False))
