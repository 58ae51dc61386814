"""Which ops of a program are compiled together, and that the program with them joined computes the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from graphs import TrainGraph

import graphzero as gz
from graphzero import _compat
from graphzero.ir import aliases
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import kernel_forms
from graphzero.ir.text.parser import parse
from graphzero.plugins.inductor import compiled, regions
from graphzero.plugins.inductor.region_ops import InductorRegion, join
from graphzero.plugins.inductor.regions import Region, form
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld

HEAD = """
graph step(dp=2) local
  x = batch() : f32[8, 4]  S(0)!
  y = batch() : f32[8, 4]  S(0)!
  p = param() : f32[4, 4]  B!
forward:
"""


def graph_of(body: str) -> StepGraph:
    graph = parse(HEAD + body)
    graph.is_read = False  # it stands for a captured one; what is read from a text runs op by op
    return graph


def order(graph: StepGraph) -> list[str | list[str]]:
    """Names of ops in the order in which they are to run, those of a region in a list."""
    items = form(graph)
    return [[node.name for node in item.nodes] if isinstance(item, Region) else item.name for item in items]


def region_in(graph: StepGraph) -> Region:
    (found,) = (item for item in form(graph) if isinstance(item, Region))
    return found


REDUCED = graph_of("""
  a = mul(x, 2.0)    : f32[8, 4]  S(0)
  g = sum.dim_IntList(a, [0]) : f32[4]  P
  h = launch('bucket_all_reduce', 0, [g], 'dp', 'sum') : (f32[4]  B)
  b = add(a, y)      : f32[8, 4]  S(0)
  c = relu(b)        : f32[8, 4]  S(0)
  w = wait(h)        : (f32[4]  B)
  r = w[0]           : f32[4]  B
  d = mul(c, r)      : f32[8, 4]  S(0)
  e = relu(d)        : f32[8, 4]  S(0)
  return e
""")


def test_a_region_goes_on_past_a_launch_and_ends_where_something_reads_what_arrived():
    assert order(REDUCED) == [["a", "g", "b", "c"], "h", "w", "r", ["d", "e"]]


def test_a_region_ends_when_a_launch_has_waited_for_long_enough(monkeypatch):
    monkeypatch.setattr(regions, "LEAST", 0.0)
    monkeypatch.setattr(regions, "FEWEST", 1)
    assert order(REDUCED) == [["a", "g", "b"], "h", ["c"], "w", "r", ["d", "e"]]


def test_inputs_and_results_are_what_crosses_the_edge():
    first = next(item for item in form(REDUCED) if isinstance(item, Region))
    assert [node.name for node in first.inputs] == ["x", "y"]
    assert [node.name for node in first.results] == ["g", "c"]


def test_one_op_is_no_region_and_keeps_the_room_it_was_given():
    graph = graph_of("""
  a = mul(x, 2.0) : f32[8, 4]  S(0)
  k = tanh(a)     : f32[8, 4]  S(0)
  b = add(k, y, out=k) : f32[8, 4]  S(0)
  return b
""")
    assert order(graph) == ["a", "k", "b"]
    joined = join(graph)
    assert next(node for node in joined.nodes if node.name == "b").kwargs


def test_what_a_compiler_has_nothing_for_stays_a_line_of_its_own():
    graph = graph_of("""
  a = mul(x, 2.0)    : f32[8, 4]  S(0)
  b = add(a, y)      : f32[8, 4]  S(0)
  s = sort.default(b) : (f32[8, 4]  S(0), i64[8, 4]  S(0))
  t = s[0]           : f32[8, 4]  S(0)
  c = mul(t, 2.0)    : f32[8, 4]  S(0)
  d = add(c, t)      : f32[8, 4]  S(0)
  n = tanh(d)        : f32[8, 4]  S(0)
  return n
""")
    assert order(graph) == [["a", "b"], "s", "t", ["c", "d"], "n"]


def test_a_view_of_an_operand_that_leaves_is_no_result_of_a_region():
    graph = graph_of("""
  v = view(x, [32/dp]) : f32[32]  S(0)
  i = view(y, [32/dp]) : f32[32]  S(0)
  a = mul(v, i)        : f32[32]  S(0)
  b = relu(a)          : f32[32]  S(0)
  u = view(b, [8/dp, 4]) : f32[8, 4]  S(0)
  return u, v
""")
    assert order(graph) == ["v", ["i", "a", "b", "u"]]
    assert [node.name for node in region_in(graph).results] == ["u"]


def test_several_views_of_one_operand_leave_together():
    graph = graph_of("""
  s = split.Tensor(x, 2, 1) : (f32[8, 2]  S(0), f32[8, 2]  S(0))
  l = s[0]           : f32[8, 2]  S(0)
  r = s[1]           : f32[8, 2]  S(0)
  a = mul(l, r)      : f32[8, 2]  S(0)
  b = relu(a)        : f32[8, 2]  S(0)
  return b, l
""")
    assert order(graph) == ["s", "l", "r", ["a", "b"]]


WRITTEN = graph_of("""
  a = mm(x, p)          : f32[8, 4]  S(0)
  b = relu(a, out=a)    : f32[8, 4]  S(0)
  c = add(b, y, out=b)  : f32[8, 4]  S(0)
  z = mul(p, 0.5, out=p) : f32[4, 4]  B
  d = mul(c, 2.0)       : f32[8, 4]  S(0)
  return d; update(p=z)
""")


def test_nothing_that_writes_a_state_is_compiled_and_it_runs_after_the_readers_of_the_old():
    assert order(WRITTEN) == [["a", "b", "c", "d"], "z"]


def test_the_update_is_not_drawn_before_a_region():
    text = """
  a = mul(x, 2.0)     : f32[8, 4]  S(0)
  b = relu(a)         : f32[8, 4]  S(0)
update:
  q = mul(p, 0.5)     : f32[4, 4]  B
  return b; update(p=q)
"""
    assert order(graph_of(text)) == [["a", "b"], "q"]


def test_numbers_of_the_host_are_no_part_of_a_region():
    graph = parse("""
graph step(dp=1) local
  x = batch()   : f32[8]  B!
  s = scalar(s) : float
forward:
  a = mul(x, s) : f32[8]  B
  b = mul(a, a) : f32[8]  B
  c = add(b, a) : f32[8]  B
  return c
""")
    assert order(graph) == ["a", ["b", "c"]]


def test_regions_of_equal_blocks_share_one_function():
    body = "".join(
        f"  a{i} = mul({'x' if i == 0 else f't{i - 1}'}, y) : f32[8, 4]  S(0)\n"
        f"  b{i} = add(a{i}, y) : f32[8, 4]  S(0)\n  t{i} = tanh(b{i}) : f32[8, 4]  S(0)\n"
        for i in range(3)
    )
    joined = join(graph_of(f"{body}  return t2\n"))
    calls = compiled.CompiledRegions(VirtualWorld(joined.placement))
    found = [
        calls.region_function(n.target, local)
        for n in joined.nodes
        if isinstance(n.target, InductorRegion)
        for local in (0, 1)
    ]
    assert len(found) == 6 and len(set(found)) == 1


# ---- joined programs, with regions that run op by op


@pytest.fixture
def op_by_op(monkeypatch):
    monkeypatch.setattr(_compat, "inductor_compile", lambda module, operands, settings: compiled.op_by_op(module))
    monkeypatch.setattr(compiled, "_functions", {})


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(6), torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.nn.functional.dropout(self.up(self.norm(x)).relu(), 0.2))


def loss_and_output(model, x, y):
    out = model(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    return loss, out


def blocks_graph(kind: str, stage: int, ranks: int, **names) -> TrainGraph:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    place = gz.placement(
        "cpu", torch.arange(ranks).reshape(names.pop("shape", (ranks,))).tolist(), virtual=True, **names
    )
    graph = TrainGraph(model, loss_and_output, optimizer, placement=place, clip=1.0, stage=stage)
    graph.config.set_executor(kind)
    graph.config.bucket_bytes = 256
    return graph


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)


def trained(graph: gz.Graph, stages: tuple[int, ...]) -> list[torch.Tensor]:
    """Three steps at each stage, of a Graph that is captured once, and the parameters after them."""
    graph.load_state_dict({**graph.state_dict(), "random": {"seed": 5, "step": 0}})
    found: list[torch.Tensor] = []
    for stage in stages:
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        found += [x for step in range(3) for x in graph(*batch(step))]
        found += graph.full_state_dict()["modules"]["model"].values()
    return found


@pytest.mark.same_kernels
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_joined_program_computes_the_same_to_the_bit_at_every_stage(op_by_op, ranks: int) -> None:
    wanted, found = (trained(blocks_graph(kind, 0, ranks), (0, 1, 2, 3)) for kind in ("eager", "inductor"))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.same_kernels
def test_so_it_does_on_two_axes(op_by_op) -> None:
    axes = {"shape": (2, 2), "names": ("dp_replicate", "dp_shard")}
    wanted, found = (trained(blocks_graph(kind, 2, 4, **axes), (2, 3)) for kind in ("eager", "inductor"))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_a_joined_program_is_measured_and_timed_line_by_line(op_by_op) -> None:
    graph = blocks_graph("inductor", 2, 2)
    graph(*batch(0))
    times = gz.testing.profile_step(graph, *batch(1))
    assert {what for what, _ in times.seconds} == {"compute", "copies", "communication", "overhead"}
    assert any(op == "region" for _, op in times.ops)


def test_an_error_in_a_region_names_its_first_line(op_by_op, monkeypatch) -> None:
    def broken(self: compiled.CompiledRegion, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("out of luck")

    graph = graph_of("""
  a = mul(x, 2.0) : f32[8, 4]  S(0)
  b = add(a, y)   : f32[8, 4]  S(0)
  return b
""")
    executor = Executor(graph, VirtualWorld(graph.placement), kind="inductor")
    executor.bind({"p": [torch.zeros(4, 4)] * 2})
    monkeypatch.setattr(compiled.CompiledRegion, "_first", broken)
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        executor.run_step({"x": [torch.zeros(4, 4)] * 2, "y": [torch.zeros(4, 4)] * 2})
    assert "region of 2 lines from 'a' (mul, add)" in caught.value.__notes__[0]
    assert "x = batch() : f32[8, 4]  S(0)!" in caught.value.__notes__[0]


def test_what_is_asked_of_a_region_does_not_keep_its_program() -> None:
    op = InductorRegion(
        region_in(
            graph_of("""
  a = mul(x, 2.0) : f32[8, 4]  S(0)
  b = relu(a)     : f32[8, 4]  S(0)
  return b
""")
        )
    )
    asked = (aliases.alias_kind, kernel_forms.name_of, kernel_forms.out_form, kernel_forms.in_place_form)
    assert [bool(ask(op)) for ask in asked] == [False] * 4
    left = weakref.ref(op)
    del op
    gc.collect()
    assert left() is None
