"""Updates that stand next to each other are one call, and step as they would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import lower, measured

import graphzero as gz
from graphzero import fused
from graphzero.ir.graph import StepGraph
from graphzero.ops import ADAM
from graphzero.passes import Zero
from graphzero.plan import plan_of
from graphzero.runtime.executor import Executor
from graphzero.runtime.steps import Segment
from graphzero.runtime.virtual import VirtualWorld

SHAPES = [(6, 11), (11,), (11, 3), (3,), (16, 16)]


class Train(gz.Graph):
    def __init__(self, stage: int = 0, ranks: int = 1, groups: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 3)).to(
            dtype
        )
        weights, biases = [[p for p in self.model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
        split = [{"params": weights, "lr": 1e-2}, {"params": biases, "lr": 2e-2}]
        self.add_optimizer(torch.optim.AdamW(split if groups else [*self.model.parameters()], lr=1e-2))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def executor_of(program: StepGraph, ranks: int) -> Executor:
    return Executor(program, VirtualWorld(gz.placement("cpu", range(ranks), virtual=True)))


def calls(program: StepGraph, ranks: int = 1) -> int:
    """How many lines of generated code step parameters."""
    steps = executor_of(program, ranks).program.steps
    lines = [line for step in steps if isinstance(step, Segment) for line in step.lines]
    return sum(line.node.target is ADAM and " = " not in line.text for line in lines)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_neighbours_that_step_alike_are_one_call(stage: int, groups: int) -> None:
    """Per group of the optimizer: behind the first update the group's count of steps is written, then come the rest."""
    ranks = 2 if stage else 1
    graph = Train(stage, ranks, groups == 2)
    assert calls(graph.compile(torch.randn(4, 6)).program, ranks) == 2 * groups


def test_what_ranks_hold_between_them_is_stepped_once() -> None:
    """Virtual ranks share what is not split; each has its own call, in which they meet."""
    graph = Train(0, 2)
    first, twin = graph(torch.ones(4, 6)), Train(0, 1)(torch.ones(4, 6))
    torch.testing.assert_close(first, twin)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_joined_or_not_the_states_are_the_same_to_the_bit(
    stage: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> dict[str, Any]:
        graph, generator = Train(stage, 2, groups), torch.Generator().manual_seed(1)
        for _ in range(3):
            graph(torch.randn(4, 6, generator=generator))
        return graph.full_state_dict()["modules"]["model"]

    joined = trained()
    monkeypatch.setattr("graphzero.runtime.together.FORMS", {})
    for name, wanted in trained().items():
        assert torch.equal(joined[name], wanted), name


STEP = """
graph step(dp=2)
  x    = batch()           : f32[8, 4]   S(0)!
  w    = param()           : f32[4, 64]  B!
  v    = param()           : f32[64, 4]  B!
  wm   = state(w)          : f32[4, 64]  B!
  wv   = state(w)          : f32[4, 64]  B!
  vm   = state(v)          : f32[64, 4]  B!
  vv   = state(v)          : f32[64, 4]  B!
  n    = state()           : f64[]       B!
forward:
  wf   = use(w)            : f32[4, 64]
  vf   = use(v)            : f32[64, 4]
  h    = mm(x, wf)         : f32[8, 64]
  y    = mm(h, vf)         : f32[8, 4]
  l    = sum(y)            : f32[]
backward:
  ht   = t(h)              : f32[64, 8]
  gv   = mm(ht, y)         : f32[64, 4]  ; gradient(v)
  vt   = t(vf)             : f32[4, 64]
  dh   = mm(y, vt)         : f32[8, 64]
  xt   = t(x)              : f32[4, 8]
  gw   = mm(xt, dh)        : f32[4, 64]  ; gradient(w)
update:
  n1   = add(n, 1)         : f64[]
  wu   = use(w)            : f32[4, 64]
  sw   = adam(wu, gw, wm, wv, n1, 0.1, 0.9, 0.99, 1e-08, 0.0) : (f32[4, 64], f32[4, 64], f32[4, 64])
  w1   = sw[0]             : f32[4, 64]
  wm1  = sw[1]             : f32[4, 64]
  wv1  = sw[2]             : f32[4, 64]
  vu   = use(v)            : f32[64, 4]
{between}
  sv   = adam(vu, gv, vm, vv, n1, 0.1, 0.9, 0.99, 1e-08, 0.0) : (f32[64, 4], f32[64, 4], f32[64, 4])
  v1   = sv[0]             : f32[64, 4]
  vm1  = sv[1]             : f32[64, 4]
  vv1  = sv[2]             : f32[64, 4]
  return l; update(w=w1, wm=wm1, wv=wv1, v=v1, vm=vm1, vv=vv1, n=n1)
"""


@pytest.mark.parametrize(
    ("between", "wanted"),
    [
        ("", 1),
        ("  seen = sum(w1)           : f32[]", 2),
        ("  own  = sum(x)            : f32[]", 2),
        ("  s    = operator.mul(2.0, 3.0) : float", 1),
    ],
    ids=["nothing", "a reader", "an op", "a host number"],
)
def test_an_op_between_two_updates_keeps_its_place(between: str, wanted: int) -> None:
    text = STEP.format(between=between)
    if "seen" in between or "own" in between:
        text = text.replace("return l;", f"return l, {between.split()[0]};")
    assert calls(lower(text.replace("dp=2", "dp=1"))) == wanted


def test_the_plan_is_the_memory_that_a_joined_update_takes() -> None:
    program = lower(STEP.format(between=""), Zero(3))
    assert calls(program, 2) == 1
    found, run = plan_of(program).memory, measured(program)
    assert found.peak == run.peak


# ---- the kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_at_once_step_as_each_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.rand(shape, generator=generator, dtype=dtype) for shape in (*SHAPES, (0, 3))] for _ in range(4)]
    steps = [torch.tensor(float(1 + i % 2), dtype=torch.float64) for i in range(len(SHAPES) + 1)]
    settings = (1e-2, 0.9, 0.99, 1e-8, 0.1)
    alone = [fused.adam(*group, step, *settings) for *group, step in zip(*tensors, steps, strict=True)]
    fused.adams_(*tensors, steps, *settings)
    for i, made in enumerate(alone):
        assert all(torch.equal(tensors[k][i], x) for k, x in zip((0, 2, 3), made, strict=True)), i


def test_columns_step_in_place_beside_dense_ones() -> None:
    wide = torch.rand(5, 16)
    columns, kept, dense = wide[:, ::2], wide[:, 1::2].clone(), torch.rand(5, 8)
    grads, first, second = ([torch.rand(5, 8) for _ in range(2)] for _ in range(3))
    step, settings = torch.tensor(2.0), (1e-2, 0.9, 0.99, 1e-8, 0.0)
    alone = [
        fused.adam(p, g, m, v, step, *settings)[0]
        for p, g, m, v in zip((columns, dense), grads, first, second, strict=True)
    ]
    fused.adams_([columns, dense], grads, first, second, [step, step], *settings)
    assert torch.equal(columns, alone[0]) and torch.equal(dense, alone[1]) and torch.equal(wide[:, 1::2], kept)
