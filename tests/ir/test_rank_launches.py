"""What ranks launch is one order, which comes to its end, and it is what is begun."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import graphzero as gz
from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.streams.launches import RankLaunch, check_rank_launches, list_rank_launches
from graphzero.ir.text.parser import parse
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.world.virtual import VirtualWorld

TWO_AXES = """
graph step(dp=2, tp=2) local
  g = batch() : f32[4]  (P, P)
  h = batch() : f32[6]  (P, P)
backward:
  l = launch('bucket_all_reduce', 0, [g], 'dp', 'sum') : (f32[4]  (B, P))
  m = launch('bucket_all_reduce', 1, [h], 'tp', 'sum') : (f32[6]  (P, B))
  a = wait(l) : (f32[4]  (B, P))
  b = a[0] : f32[4]  (B, P)
  c = wait(m) : (f32[6]  (P, B))
  d = c[0] : f32[6]  (P, B)
  return b, d
"""


def lists_of(graph: StepGraph) -> dict[int, list[RankLaunch]]:
    return {int(rank): list_rank_launches(graph, int(rank)) for rank in graph.placement.ranks.flat}


def test_ranks_that_launch_alike_come_to_the_end() -> None:
    lists = lists_of(parse(TWO_AXES))
    assert [launch.ranks for launch in lists[1]] == [(1, 3), (0, 1)]
    check_rank_launches(lists)


def test_an_order_in_which_ranks_wait_for_each_other_is_refused_with_rank_and_line() -> None:
    lists = lists_of(parse(TWO_AXES))
    lists[2].reverse()
    check_rank_launches(lists)  # rank 2 waits for 3, which waits for 1, which waits for nobody
    lists[1].reverse()
    with pytest.raises(VerifyError, match=r"does not end: rank \d waits in all_reduce among ranks \[.*\n\n  > [lm]"):
        check_rank_launches(lists)


def test_what_one_rank_does_not_launch_is_refused() -> None:
    lists = lists_of(parse(TWO_AXES))
    del lists[3][1]
    with pytest.raises(VerifyError, match=r"rank 2 launches all_reduce among ranks \[2, 3\].*, which rank 3 does not"):
        check_rank_launches(lists)


def test_another_size_on_one_rank_is_refused() -> None:
    lists = lists_of(parse(TWO_AXES))
    lists[3][1] = lists[3][1]._replace(sent=5)
    with pytest.raises(VerifyError, match=r"number 0 of rank 2 is .* 6 to 6 elements, and of rank 3 .* 5 to 6"):
        check_rank_launches(lists)


class TrainGraph(gz.Graph):
    def __init__(self, stage: int, sizes: Sequence[int]) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.model = nn.Sequential(*layers)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), clip_grad_norm=0.5)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(2)
        self.config.bucket_bytes = 1 << 14

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("stage", range(4))
def test_the_list_is_what_is_begun(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = [], VirtualWorld.begin_transfer

    def note(world: VirtualWorld, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], *more: str) -> Handle:
        begun.append((kind, ins[0].numel(), outs[0].numel()))
        return begin(world, kind, outs, ins, *more)

    graph, x = TrainGraph(stage, (8, 130, 64, 3)), torch.randn(8, 8)
    program = graph.compile(x).program
    monkeypatch.setattr(VirtualWorld, "begin_transfer", note)
    graph(x)
    listed = [(launch.kind, launch.sent, launch.received) for launch in list_rank_launches(program, 0)]
    assert begun[-len(listed) :] == listed and listed
