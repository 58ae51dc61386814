"""Parameters that may be stepped at one time are stepped by one call, as each would be by its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import fx, nn
from toys import history, lower, measured

import graphzero as gz
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import ADAM
from graphzero.passes import Bucket, Zero
from graphzero.plan import plan_of
from graphzero.testing import assert_same_step


def three_layer_graph(stage: int = 0, ranks: int = 1, groups: bool = False, early: bool = False) -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 3))
    weights, biases = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    split = [{"params": weights, "lr": 1e-2}, {"params": biases, "lr": 2e-2}]
    optimizer = torch.optim.AdamW(split if groups else [*model.parameters()], lr=1e-2)
    graph = TrainGraph(model, mean_square, optimizer, placement=ranks, stage=stage)
    graph.config.set_optimizer_in_backward(early)
    return graph


def calls(program: StepGraph) -> list[set[str]]:
    """The placeholders of the parameters that each call steps."""
    return [set(map(origin, node.args[0])) for node in program.nodes if node.target is ADAM]  # type: ignore[arg-type]


def origin(node: fx.Node) -> str:
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node.name


WEIGHTS = {f"model_{i}_weight" for i in (0, 2, 4)}
BIASES = {f"model_{i}_bias" for i in (0, 2, 4)}


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_step_alike_are_one_call(stage: int) -> None:
    program = three_layer_graph(stage, 2 if stage else 1).compile(torch.randn(4, 6)).program
    assert calls(program) == [WEIGHTS | BIASES]


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_of_two_groups_are_two_calls(stage: int) -> None:
    program = three_layer_graph(stage, 2 if stage else 1, groups=True).compile(torch.randn(4, 6)).program
    assert calls(program) == [WEIGHTS, BIASES]


def test_a_bucket_of_new_parameters_waits_for_one_call() -> None:
    graph = three_layer_graph(2, 2)
    graph.config.bucket_bytes = 400
    program = graph.compile(torch.randn(4, 6)).program
    sent = [
        {new.args[0] for new in launch.args[2]}  # type: ignore[union-attr]
        for launch in program.graph.find_nodes(op="call_function", target=ops.launch)
        if launch.args[0] == ops.bucket_all_gather.__name__
    ]
    assert len(sent) > 1 and all(len(made) == 1 for made in sent)


def test_an_update_in_backward_waits_for_no_later_gradient() -> None:
    """Without transfers each gradient is there alone, and is gone before the next is made."""
    program = three_layer_graph(early=True).compile(torch.randn(4, 6)).program
    assert len(calls(program)) == 6
    held = 0
    for node in program.nodes:
        role = value.role_of(node)
        held += role is not None and role.kind == "gradient"
        held -= len(node.args[1]) if node.target is ADAM else 0  # type: ignore[arg-type]
        assert held <= 1, node.name


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_joined_or_not_the_states_are_the_same_to_the_bit(
    stage: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[int, dict[str, Any]]:
        graph, generator = three_layer_graph(stage, 2, groups), torch.Generator().manual_seed(1)
        for _ in range(3):
            graph(torch.randn(4, 6, generator=generator))
        return len(calls(graph.program)), graph.full_state_dict()["modules"]["model"]

    few, joined = trained()
    monkeypatch.setattr("graphzero.plugins.fusion.join_updates.LISTS", {})
    many, alone = trained()
    assert few < many
    for name, wanted in alone.items():
        assert torch.equal(joined[name], wanted), name


def test_what_ranks_hold_between_them_is_stepped_once() -> None:
    """Virtual ranks share what is not split, and have pieces of their own of the rest."""
    graph, twin = three_layer_graph(0, 2), three_layer_graph(0, 1)
    mixed = three_layer_graph(3, 2)
    mixed.config.enable_zero(stage=3, shard_min_size=20)
    for _ in range(2):
        wanted = twin(torch.ones(4, 6))
        torch.testing.assert_close(graph(torch.ones(4, 6)), wanted)
        torch.testing.assert_close(mixed(torch.ones(4, 6)), wanted)
    assert calls(mixed.program) == [WEIGHTS | BIASES]


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
  sw   = adam([wu], [gw], [wm], [wv], [], [n1], 0.1, 0.9, 0.99, 1e-08, 0.0) : (f32[4, 64], f32[4, 64], f32[4, 64])
  w1   = sw[0]             : f32[4, 64]
  wm1  = sw[1]             : f32[4, 64]
  wv1  = sw[2]             : f32[4, 64]
  vu   = use(v)            : f32[64, 4]
{between}
  sv   = adam([vu], [{gv}], [vm], [vv], [], [n1], {lr}, 0.9, 0.99, 1e-08, 0.0) : (f32[64, 4], f32[64, 4], f32[64, 4])
  v1   = sv[0]             : f32[64, 4]
  vm1  = sv[1]             : f32[64, 4]
  vv1  = sv[2]             : f32[64, 4]
  return l{out}; update(w=w1, wm=wm1, wv=wv1, v=v1, vm=vm1, vv=vv1, n=n1)
"""


def step(between: str = "", gv: str = "gv", lr: str = "0.1", out: str = "", ranks: int = 1) -> str:
    return STEP.format(between=between, gv=gv, lr=lr, out=out).replace("dp=2", f"dp={ranks}")


def test_a_call_has_lists_and_its_results_are_picked_after_it() -> None:
    text = " ".join(str(lower(step())).split())
    assert (
        "sw = adam([w, v], [gw_b, gv_b], [wm, vm], [wv, vv], [], [n1, n1], 0.1, 0.9, 0.99, 1e-08, 0.0, "
        "out=[w, v, wm, vm, wv, vv]) : (" + ", ".join(["f32[4, 64] B, f32[64, 4] B"] * 3) + ") "
        "w1 = sw[0] : f32[4, 64] B v1 = sw[1] : f32[64, 4] B "
        "wm1 = sw[2] : f32[4, 64] B vm1 = sw[3] : f32[64, 4] B "
        "wv1 = sw[4] : f32[4, 64] B vv1 = sw[5] : f32[64, 4] B"
    ) in text


TWO, ONE = [{"w"}, {"v"}], [{"w", "v"}]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ONE),
        ({"between": "  seen = sum(w1) : f32[]", "out": ", seen"}, ONE),
        ({"between": "  own = sum(x) : f32[]", "out": ", own"}, ONE),
        ({"between": "  s = operator.mul(2.0, 0.5) : float", "lr": "s"}, TWO),
        ({"lr": "0.2"}, TWO),
        ({"between": "  seen = sum(w1) : f32[]\n  gs = mul(gv, seen) : f32[64, 4]", "gv": "gs"}, TWO),
        ({"between": "  half = mul(gv, 0.5) : f32[64, 4]", "gv": "half"}, ONE),
    ],
    ids=["nothing", "a reader", "an op", "another number", "another rate", "a gradient of the first", "a gradient"],
)
def test_what_follows_from_the_first_update_is_not_joined_with_it(
    given: dict[str, str], wanted: list[set[str]]
) -> None:
    assert calls(lower(step(**given))) == wanted


@pytest.mark.parametrize(("rows", "wanted"), [(4, ONE), (4096, TWO)])
def test_no_gradient_waits_where_the_program_needs_most_memory(rows: int, wanted: list[set[str]]) -> None:
    """The gradient of w would be there beside something large that the gradient of v needs."""
    big = f"  big = full([{rows}, 64], 1.0) : f32[{rows}, 64]\n  sb = sum(big) : f32[]\n"
    program = lower(step(big + "  gs = mul(gv, sb) : f32[64, 4]", "gs"))
    assert calls(program) == wanted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_is_the_memory_that_a_joined_update_takes(stage: int) -> None:
    program = lower(step(ranks=2), Zero(stage) if stage else None)
    assert plan_of(program).memory.peak == measured(program).peak


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_pass_keeps_the_step(stage: int) -> None:
    record = history(step(ranks=2), Zero(stage) if stage else None)["join_updates"]
    assert_same_step(record.before, record.after)
    assert str(gz.parse(str(record.after))) == str(record.after)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_backward_each_bucket_of_gradients_is_stepped_when_it_is_there(stage: int) -> None:
    """One call would hold the first until the last bucket has arrived."""
    assert calls(lower(step(ranks=2), Zero(stage), Bucket(1024), in_backward=True)) == TWO[::-1]
