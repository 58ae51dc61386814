"""Within ``strict_transfers`` a program that meddles with what is under way is caught."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.ir.text.parser import parse
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.placement import placement
from graphzero.testing import strict_transfers
from graphzero.testing.strict_stages import fill_with_poison_, is_poison

N = 2


class TrainGraph(gz.Graph):
    def __init__(self, stage: int, **axes: int) -> None:
        names = tuple(axes) or ("dp",)
        grid = torch.arange(4).reshape(*(axes.values() or (4,))).tolist()
        super().__init__(gz.placement("cpu", grid, names=names, virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1), clip_grad_norm=0.5)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def results_of(graph: gz.Graph) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [graph(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(2)]
    return [*losses, *graph.full_state_dict()["modules"]["model"].values()]


@pytest.mark.at_once
@pytest.mark.parametrize("stage", range(4))
def test_a_step_is_the_same_to_the_bit(stage: int) -> None:
    expected = results_of(TrainGraph(stage))
    with strict_transfers():
        seen = results_of(TrainGraph(stage))
    assert all(map(torch.equal, seen, expected))


def world() -> VirtualWorld:
    return VirtualWorld(placement("cpu", range(N), virtual=True))


def buffers(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    collective = COLLECTIVES[kind]
    first, after = collective.sent(0, N)
    ins = [torch.arange(3.0 * (after - first)) + 10 * rank for rank in range(N)]
    if collective.is_in_place:
        return ins, ins
    first, after = collective.received(N)
    return [torch.zeros(3 * (after - first)) for _ in range(N)], ins


@pytest.mark.at_once
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_arrives_is_there_after_the_wait_and_not_before(kind: str) -> None:
    expected, ins = buffers(kind)
    world().begin(kind, expected, ins, "dp").wait()
    received, ins = buffers(kind)
    with strict_transfers():
        handle = world().begin(kind, received, ins, "dp")
        assert all(map(is_poison, received))
        handle.wait()
        assert all(map(torch.equal, received, expected))
        received[0].zero_()
        handle.wait()  # a second wait moves nothing
    assert not received[0].any()


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_writing_to_what_is_to_be_filled_is_refused_at_the_wait(kind: str) -> None:
    received, ins = buffers(kind)
    with strict_transfers():
        handle = world().begin(kind, received, ins, "dp")
        received[1][0] = 0
        with pytest.raises(gz.GraphZeroError, match=rf"wrote to the \d+ elements that a {kind} was about to fill"):
            handle.wait()


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_writing_to_what_is_sent_is_refused_at_the_wait(kind: str) -> None:
    received, ins = buffers(kind)
    with strict_transfers():
        handle = world().begin(kind, received, ins, "dp")
        ins[1][-1] += 1
        with pytest.raises(gz.GraphZeroError, match=f"wrote to the .* elements that a {kind} sends"):
            handle.wait()


def test_what_is_reduced_holds_nothing_afterwards() -> None:
    received, ins = buffers("reduce_scatter")
    with strict_transfers():
        world().begin("reduce_scatter", received, ins, "dp").wait()
    assert all(map(is_poison, ins))


def test_a_gather_in_the_place_of_what_is_sent() -> None:
    whole = [torch.zeros(6) for _ in range(N)]
    lines = [whole[rank][3 * rank : 3 * rank + 3].fill_(rank + 1) for rank in range(N)]
    with strict_transfers():
        world().begin("all_gather", whole, lines, "dp").wait()
    assert all(one.tolist() == [1, 1, 1, 2, 2, 2] for one in whole)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int16, torch.int64, torch.bool]
)
def test_poison_is_known_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.zeros(5, dtype=dtype)
    assert not is_poison(x)
    fill_with_poison_(x)
    assert is_poison(x)
    assert is_poison(x[2])


PROGRAM = """
graph step(dp=2) local
  w  = param()                                       : f32[4, 3]  S(0)
  v  = param()                                       : f32[4, 3]  S(0)
forward:
  h  = launch('bucket_all_gather', 0, [w], [0], 'dp') : (f32[4, 3]  B)
  k  = launch('bucket_all_gather', 1, [v], [0], 'dp') : (f32[4, 3]  B)
  a  = wait(h)                                       : (f32[4, 3]  B)
  b  = wait(k)                                       : (f32[4, 3]  B)
  ga = a[0]                                          : f32[4, 3]  B
  gb = b[0]                                          : f32[4, 3]  B
  s  = add(ga, gb)                                   : f32[4, 3]  B
  return s
"""


def test_two_transfers_in_one_slot_are_caught() -> None:
    """``verify`` refuses such a program too: here it runs all the same."""
    place = placement("cpu", range(N), virtual=True)
    for slot in (1, 0):
        graph = parse(PROGRAM, place)
        (second,) = (node for node in graph.nodes if node.name == "k")
        second.update_arg(1, slot)
        with strict_transfers():
            executor = Executor(graph, VirtualWorld(place))
            executor.bind({name: [torch.randn(2, 3) for _ in range(N)] for name in "wv"})
            if slot:
                executor.run_step({})
                continue
            with pytest.raises(gz.GraphZeroError, match="was about to fill"):
                executor.run_step({})
