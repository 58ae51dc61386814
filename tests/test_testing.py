"""The tools for testing passes find what is wrong, and rewrite what is expected."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph, mean_square
from torch import nn
from toys import lower, step

import graphzero as gz
from graphzero.errors import ConfigError, PlacementError, VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.passes import DeadCode, Pipeline, Zero
from graphzero.runtime.transport.primitives import fold
from graphzero.runtime.world import virtual
from graphzero.sbp.types import B
from graphzero.testing import accept, assert_graph, assert_same_step, fake_world

pytest_plugins = "pytester"
aten = torch.ops.aten

TEXT = """
graph g(dp=2) captured
  x = batch()  : f32[8, 4]  S(0)!
  m = state(w) : f32[4]
forward:
  a = exp(x)   : f32[8, 4]
  s = sum.dim_IntList(a, [0]) : f32[4]
update:
  n = add(m, s) : f32[4]
  return a; update(m=n)
"""


# ---- assert_same_step


def test_the_same_step_is_accepted_at_any_level_and_on_any_ranks() -> None:
    graph = parse(TEXT)
    assert_same_step(graph, graph.clone())
    assert_same_step(graph, lower(TEXT, Zero(1)))
    for ranks in (1, 2, 4, 8):
        assert_same_step(graph, graph.clone(), ranks=ranks)


@pytest.mark.parametrize(
    ("name", "replaced", "where"),
    [
        ("a", aten.sinh.default, "the steps differ in output 0: .*S\\(0\\)"),
        ("s", aten.mean.dim, "the steps differ in new m: .*B"),
    ],
)
def test_a_pass_that_changes_the_numbers_is_caught_with_the_value_and_its_sbp(
    name: str, replaced: object, where: str
) -> None:
    def wrong(graph: StepGraph) -> StepGraph:
        graph.node(name).target = replaced  # type: ignore[assignment]
        return graph

    graph = parse(TEXT)
    with pytest.raises(AssertionError, match=where) as caught:
        assert_same_step(graph, Pipeline([wrong])(graph), ranks=2)
    assert "Greatest absolute difference" in str(caught.value)


def test_a_forgotten_reduction_is_caught() -> None:
    program = lower(TEXT)
    for wait in [node for node in program.nodes if str(node.name).startswith("wait")]:
        launch = wait.args[0]
        for pick in list(wait.users):
            pick.replace_all_uses_with(launch.args[2][pick.args[1]])  # type: ignore[union-attr,index]
    with pytest.raises(VerifyError, match="'n' runs add as B, P -> B"):
        Pipeline([DeadCode()])(program)


def test_ranks_that_hold_other_values_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], reduction: str) -> None:
        fold(outs, outs[0], reduction)

    monkeypatch.setitem(virtual.COLLECTIVE_FUNCTIONS, "all_reduce", first_alone)
    with pytest.raises(AssertionError, match="rank 1 holds other values"):
        assert_same_step(parse(TEXT), lower(TEXT))


def test_a_pass_that_drops_the_update_is_caught() -> None:
    before, after = parse(TEXT), parse(TEXT)
    after.set_output(after.outputs, {}, {})
    with pytest.raises((AssertionError, ConfigError, KeyError)):
        assert_same_step(before, after)


def test_other_inputs_and_other_ranks_are_refused() -> None:
    graph = parse(TEXT)
    renamed = parse(TEXT.replace("x = batch()", "z = batch()").replace("exp(x)", "exp(z)"))
    with pytest.raises(ConfigError, match=r"the two graphs have other inputs: \['x', 'z'\]"):
        assert_same_step(graph, renamed)
    with pytest.raises(ConfigError, match="the graph is local for 2 ranks; it cannot run on 4"):
        assert_same_step(lower(TEXT), lower(TEXT), ranks=4)


def test_tolerances_and_seed_are_the_callers() -> None:
    graph, near = parse(TEXT), parse(TEXT.replace("add(m, s)", "add(m, s, alpha=1.001)"))
    with pytest.raises(AssertionError, match="new m"):
        assert_same_step(graph, near)
    assert_same_step(graph, near, rtol=0.01)
    assert_same_step(graph, graph.clone(), seed=7, rtol=0, atol=0)


# ---- assert_graph


def test_a_graph_is_compared_by_its_text_and_a_difference_is_shown() -> None:
    graph = parse(TEXT)
    assert_graph(graph, textwrap.indent(str(graph), "        "))
    with pytest.raises(AssertionError, match="not the expected one.*--accept") as caught:
        assert_graph(graph, str(graph).replace("exp(x)", "log(x)"))
    lines = str(caught.value).splitlines()
    assert any(line.startswith("-") and "log(x)" in line for line in lines)
    assert any(line.startswith("+") and "exp(x)" in line for line in lines)


TEST_FILE = '''
from graphzero.ir.text.parser import parse
from graphzero.testing import assert_graph

TEXT = "graph g(dp=2)\\n  x = batch() : f32[8, 4]\\nforward:\\n  y = relu(x) : f32[8, 4]\\n  return y\\n"
EXPECTED = """
old
"""
KEPT = """
untouched
"""


def test_constant():
    assert_graph(parse(TEXT), EXPECTED)


def test_literal():
    assert_graph(parse(TEXT.replace("relu", "exp")), "old")


class TestInClass:
    def test_in_a_class(self):
        if True:
            assert_graph(
                parse(TEXT.replace("relu", "tanh")),
                """
                one line
                """,
            )


def test_fine():
    assert KEPT == "\\nuntouched\\n"
'''


@pytest.fixture
def sample(pytester: pytest.Pytester) -> Iterator[Callable[..., tuple[pytest.RunResult, str]]]:
    """Runs pytest on a test file; gives the result and the file's text after it."""
    installed = importlib.metadata.entry_points(group="pytest11", name="graphzero")
    plugin = [] if installed else ["-p", "graphzero.pytest_plugin"]
    path = pytester.path / "test_sample.py"

    def run(*arguments: str, text: str = "") -> tuple[pytest.RunResult, str]:
        if text:
            path.write_text(text, encoding="utf-8")
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *plugin, *arguments, str(path))
        accept.enable(False)
        return result, path.read_text(encoding="utf-8")

    yield run
    accept.enable(False)


Sample = Callable[..., tuple[pytest.RunResult, str]]


def test_accept_rewrites_literals_and_module_constants_and_nothing_else(sample: Sample) -> None:
    accepted, text = sample("--accept", text=TEST_FILE)
    assert "accepted:" in accepted.stdout.str()
    assert "old" not in text
    assert "one line" not in text
    assert 'KEPT = """\nuntouched\n"""' in text
    assert "y = relu(x) : f32[8, 4]" in text
    again, _ = sample()
    again.assert_outcomes(passed=4)
    third, unchanged = sample("--accept")
    assert "accepted:" not in third.stdout.str()
    assert unchanged == text


def test_without_accept_nothing_is_written(sample: Sample) -> None:
    result, text = sample(text=TEST_FILE)
    result.assert_outcomes(passed=1, failed=3)
    assert text == TEST_FILE


def test_accept_says_where_there_is_nothing_to_rewrite(sample: Sample) -> None:
    computed = TEST_FILE.split("class")[0].replace('"old")', "str(1 + 1))")
    result, text = sample("--accept", text=computed)
    assert "neither a string literal nor a module constant" in result.stdout.str()
    assert "str(1 + 1)" in text


# ---- fake_world


def adamw_graph(model: nn.Module, stage: int) -> TrainGraph:
    return TrainGraph(model, mean_square, torch.optim.AdamW(model.parameters(), lr=1e-3), placement=None, stage=stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_graph_in_a_fake_world_compiles_and_plans_for_all_its_ranks(stage: int) -> None:
    with fake_world(8):
        graph = adamw_graph(nn.Linear(16, 32), stage)
        graph.compile(torch.randn(4, 16))
        share = 8 if stage == 3 else 1
        assert graph.plan.memory["parameters"] == (16 * 32 + 32) * 4 // share
        assert graph.plan.memory["optimizer_states"] >= (16 * 32 + 32) * 8 // (8 if stage else 1)
        assert "dp=8" in str(graph.program)


def test_a_call_in_a_fake_world_runs_this_ranks_program() -> None:
    with fake_world(4, rank=3):
        assert (dist.get_world_size(), dist.get_rank()) == (4, 3)
        graph = adamw_graph(nn.Linear(7, 3), 3)
        loss = graph(torch.randn(2, 7))
        assert loss.shape == ()
        weight = next(iter(graph.model.parameters()))
        assert tuple(weight.shape) == (3, 7)


def test_a_fake_world_is_gone_when_it_is_left_also_by_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), fake_world(2):
        raise RuntimeError("inside")
    assert not dist.is_initialized()
    with fake_world(3, rank=2):
        assert dist.get_world_size() == 3
    assert not dist.is_initialized()


def test_a_fake_world_has_its_ranks_and_is_alone() -> None:
    for n, rank in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(PlacementError, match="the ranks are 0 to"), fake_world(n, rank):
            pass
    with fake_world(2):
        with pytest.raises(PlacementError, match="a process group already"), fake_world(2):
            pass
        assert dist.get_world_size() == 2


def test_user_passes_are_tested_with_what_the_package_exports() -> None:
    graph = gz.parse(step())
    after = gz.Pipeline([gz.passes.Pin(), gz.passes.Zero(2)])(graph)
    assert after.node("x").meta["sbp"] != (B,)
    gz.testing.assert_same_step(graph, after)
