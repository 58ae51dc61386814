"""Marks, moves between stages, and the parts that a program is cut into."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from staged import Net, batches, cross_entropy, placement, staged_graph, stages_of
from torch import fx, nn

import graphzero as gz
from graphzero.errors import ConfigError, ScheduleError
from graphzero.ir.pipeline_stages import is_of_params
from graphzero.ir.pipeline_stages import stages_of as stages_of_nodes
from graphzero.ir.text.parser import ParseError
from graphzero.ir.value import Role
from graphzero.ops import MOVE
from graphzero.passes.stages.cut_parts import cut_parts
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.testing import assert_graph, measure_step

STEP = """
graph step(dp=2) local
  x       = batch()                                  : f32[8, 4]   S(0)
  a       = param(model.a)                           : f32[4, 4]   B  @0
  b       = param(model.b)                           : f32[4, 2]   B  @1
forward:
  a_sum   = accumulator([4, 4], torch.float32)       : f32[4, 4]   P
  b_sum   = accumulator([4, 2], torch.float32)       : f32[4, 2]   P
forward x2:
  i       = micro_batch(2)                           : int
  rows    = take(x, 0, i, 2)                         : f32[4, 4]   S(0)
  h       = mm(rows, a)                              : f32[4, 4]   S(0)  @0
  h1      = move(h, 1)                               : f32[4, 4]   S(0)  @1
  y       = mm(h1, b)                                : f32[4, 2]   S(0)  @1
backward x2:
  bt      = t(b)                                     : f32[2, 4]   B  @1
  gh      = mm(y, bt)                                : f32[4, 4]   S(0)  @1
  h1t     = t(h1)                                    : f32[4, 4]   S(1)  @1
  gb      = mm(h1t, y)                               : f32[4, 2]   P  @1
  b_new   = accumulate(b_sum, gb, i, 2, 'sum')       : f32[4, 2]   P  @1
  gh0     = move(gh, 0)                              : f32[4, 4]   S(0)  @0
  rows_t  = t(rows)                                  : f32[4, 4]   S(1)
  ga      = mm(rows_t, gh0)                          : f32[4, 4]   P  @0
  a_new   = accumulate(a_sum, ga, i, 2, 'sum')       : f32[4, 4]   P  @0
update:
  a_all   = all_reduce(a_new, 'dp', 'sum')           : f32[4, 4]   B  @0
  b_all   = all_reduce(b_new, 'dp', 'sum')           : f32[4, 2]   B  @1
  size    = sum(a_all)                               : f32[]       B  @0
  size1   = move(size, 1)                            : f32[]       B  @1
  b1      = mul(b_all, size1)                        : f32[4, 2]   B  @1
  a1      = add(a, a_all)                            : f32[4, 4]   B  @0
  return update(a=a1, b=b1)
"""


def test_parts_are_programs_of_their_own() -> None:
    graph = gz.parse(STEP)
    assert str(gz.parse(str(graph))) == str(graph)
    parts = {str(part.key): part for part in cut_parts(graph, splits_backward=True).parts}
    assert list(parts) == [
        "forward@0", "forward@1", "backward@1", "backward_weight@0", "backward_weight@1", "epilogue@0", "epilogue@1",
        "epilogue1@1",
    ]  # fmt: skip
    assert_graph(
        parts["forward@1"].graph,
        """
            graph 'step.forward@1'(dp=2) local
              h = saved()        : f32[4, 4]  S(0)
              b = param(model.b) : f32[4, 2]  B
            forward:
              y = mm(h, b)       : f32[4, 2]  S(0)
              return y=y
            """,
    )
    assert_graph(
        parts["backward@1"].graph,
        """
            graph 'step.backward@1'(dp=2) local
              y  = saved()        : f32[4, 2]  S(0)
              b  = param(model.b) : f32[4, 2]  B
            backward:
              bt = t(b)           : f32[2, 4]  B
              gh = mm(y, bt)      : f32[4, 4]  S(0)
              return gh=gh
            """,
    )
    assert_graph(
        parts["backward_weight@0"].graph,
        """
        graph 'step.backward_weight@0'(dp=2) local
          x      = batch()                            : f32[8, 4]  S(0)
          i      = scalar()                           : int
          gh     = saved()                            : f32[4, 4]  S(0)
          a_sum  = accumulator()                      : f32[4, 4]  P
        forward:
          rows   = take(x, 0, i, 2)                   : f32[4, 4]  S(0)
        backward:
          rows_t = t(rows)                            : f32[4, 4]  S(1)
          ga     = mm(rows_t, gh)                     : f32[4, 4]  P
          a_new  = accumulate(a_sum, ga, i, 2, 'sum') : f32[4, 4]  P
          return a_new=a_new
        """,
    )
    assert {name: key.stage for name, key in parts["epilogue1@1"].inputs.items()} == {"b_all": 1, "size": 0}
    assert "a" in parts["epilogue@0"].graph.updates and "b" in parts["epilogue1@1"].graph.updates


def test_every_op_of_a_step_is_on_the_stage_of_its_module() -> None:
    graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2), micro_batches=4, stage=2, clip=0.1)
    graph.compile(*batches(1)[0])
    assigned = next(record.after for record in graph.history if record.name == "assign_stages")
    stages = stages_of_nodes(assigned.nodes)
    for node in assigned.nodes:
        module = node.meta.get("module", "")
        if (found := re.match(r"model\.layers\.(\d)", module)) and node.target is not MOVE and stages[node] is not None:
            assert stages[node] == int(found[1]) // 2, node.format_node()
        if node.op == "call_function" and node.target is not MOVE:
            assert len({stages[x] for x in node.all_input_nodes} - {None}) <= 1, node.format_node()
    moved = [node for node in assigned.nodes if node.target is MOVE]
    assert len({(node.args[0], node.args[1]) for node in moved}) == len(moved)


def test_the_text_says_stages_and_a_wrong_one_is_refused() -> None:
    with pytest.raises(ParseError, match="y is on stage 1, which follows from what it reads"):
        gz.parse(STEP.replace("f32[4, 2]   S(0)  @1", "f32[4, 2]   S(0)  @0", 1))
    with pytest.raises(ParseError, match="not the number of a pipeline stage"):
        gz.parse(STEP.replace("@0", "@first", 1))


def test_values_that_run_backward_between_stages_are_refused() -> None:
    later = {"param(model.a)": 2, "h": 2, "ga": 2, "a_new": 2, "a_all": 2, "size": 2, "a1": 2, "gh0": 2}
    lines = STEP.replace("move(gh, 0)", "move(gh, 2)").splitlines()
    moved = [line.replace("@0", "@2") if line.endswith("@0") else line for line in lines]
    assert len(later) == sum(line != old for line, old in zip(moved, lines, strict=True))
    swapped = "\n".join(moved)
    with pytest.raises(ConfigError, match=r"'y' in forward@1 reads what forward@2 computes, which runs later"):
        cut_parts(gz.parse(swapped))


MARKS: dict[str, tuple[dict[Any, int], str]] = {
    "a stage without work": ({"model": 0, "model.norm": 1}, r"stage 1 of 2 has no work: model\.norm"),
    "a path of no module": ({**stages_of(4, 2), "model.layer.0": 0}, "no module of the Graph has such a path"),
    "an order that build does not have": (
        {**stages_of(4, 2), "model.first": 1},
        r"is marked for stage 0 and reads a value of forward of the later stage 1",
    ),
    "more stages than ranks can share": ({**stages_of(4, 3)}, "3 stages are not a multiple of 2"),
    "no stage": ({}, "no module is marked for a stage"),
}


@pytest.mark.parametrize("case", MARKS)
def test_marks_that_make_no_pipeline_are_refused(case: str) -> None:
    marks, message = MARKS[case]
    graph = type(staged_graph(Net(), None, placement(2, 2)))(Net(), cross_entropy, None, placement=placement(2, 2))
    for path, stage in marks.items():
        graph.config.set_stage(path, stage)
    graph.config.set_gradient_accumulation_steps(4)
    with pytest.raises(ConfigError, match=message):
        graph.compile(*batches(1)[0])


def test_a_second_path_of_a_shared_module_is_refused_with_its_first() -> None:
    model = Net()
    model.layers[3] = model.layers[1]
    graph = staged_graph(model, stages_of(4, 2), placement(2, 2))
    with pytest.raises(ConfigError, match=r"model\.layers\.3 is the same module as model\.layers\.1, .* mark that one"):
        graph.compile(*batches(1)[0])


def test_the_mark_of_the_inner_module_counts_and_one_without_wildcards() -> None:
    stages = StageMarks(("model.*@0", "model.layers.*@1", "model.layers.3@2", "model.layers.0.up@3"))
    paths = ("model.first", "model.layers.1.up", "model.layers.3.down", "model.layers.0.up", "other", "")
    assert [stages.stage_of(path) for path in paths] == [0, 1, 2, 3, None, None]
    with pytest.raises(ConfigError, match="the module model.a is marked for the stages 0 and 1"):
        StageMarks(("model.*@0", "*.a@1")).stage_of("model.a")


def test_settings_are_refused_where_they_are_set() -> None:
    graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2))
    module = graph.model.layers[0]
    graph.config.set_stage(module, 0)
    for wrong, message in (
        (lambda: graph.config.set_stage(module, 1), "a module has one stage"),
        (lambda: graph.config.set_stage("model.first", -1), "from 0 on"),
        (lambda: graph.config.set_stage(3, 0), "give a module, or a path"),
        (lambda: graph.config.set_stage("model.first"), "from 0 on"),
        (lambda: graph.config.set_pipeline("1b1f"), "choose one of"),
        (lambda: graph.config.set_input("x", sbp=(gz.sbp.S(0), gz.sbp.S(0))), "write B along pp"),
        (lambda: staged_graph(Net(), None, placement(2, 2)).config.set_stage("model", 0), "has no axis 'pp'"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()
    with pytest.raises(gz.SbpError, match="S\\(0\\) along pp, whose members have different stages"):
        gz.to_global(module.up.weight, placement=graph.placement, sbp=(gz.sbp.S(0), gz.sbp.B))
    graph.config.set_stage(nn.Linear(2, 2), 0)
    with pytest.raises(ConfigError, match="that module is in no attribute of the Graph"):
        graph.compile(*batches(1)[0])


def test_a_schedule_that_does_not_run_is_refused_with_its_cell() -> None:
    for rows, message in (
        ([["0F0", "0B0"], ["1B0", "1F0"]], "row 1, column 0: '1B0'"),
        ([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"]], "is for|has no cell"),
    ):
        graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2), rows, micro_batches=1 if len(rows[0]) == 2 else 2)
        with pytest.raises(ScheduleError, match=message):
            graph.compile(*batches(1)[0])


def test_a_schedule_of_a_file(tmp_path: Any) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2), str(path), micro_batches=2)
    graph(*batches(1)[0])
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0xyz,1F1,1B1\n")
    other = staged_graph(Net(), stages_of(4, 2), placement(2, 2), str(path), micro_batches=2)
    with pytest.raises(ScheduleError, match="row 1, column 2"):
        other.compile(*batches(1)[0])


def test_what_does_not_work_with_stages_says_so_and_what_does() -> None:
    graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2), micro_batches=4)
    graph(*batches(1)[0])
    with pytest.raises(ConfigError, match="measure_step does not measure pipeline stages\n  gz.trace has"):
        measure_step(graph, *batches(1)[0])
    for set_it, instead in [
        (lambda config: config.set_optimizer_in_backward(True), "set_memory_budget"),
        (lambda config: config.set_cuda_graph(True), 'set_executor."inductor"'),
    ]:
        gpus = gz.placement("cuda", [[0, 1], [2, 3]], names=("pp", "dp"), virtual=True)
        refused = staged_graph(Net(), stages_of(4, 2), gpus, micro_batches=4)
        set_it(refused.config)
        with pytest.raises(ConfigError, match=rf"pipeline stages do not work with set_\w+ yet\n  Leave.*{instead}"):
            refused.compile(*batches(1)[0])


def test_a_call_that_fails_in_the_middle_leaves_the_step_as_it_was() -> None:
    torch.manual_seed(0)
    graph = staged_graph(Net(), stages_of(4, 2), placement(2, 2), micro_batches=4, stage=2)
    batch = batches(1)[0]
    graph(*batch)
    before = [p.detach().clone() for p in graph.model.parameters()]
    executor = graph._selection.last._executor  # type: ignore[union-attr]
    plain, calls = executor.executors[2].run_step, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("stopped on purpose")
        return plain(*args)

    executor.executors[2].run_step = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        graph(*batch)
    executor.executors[2].run_step = plain  # type: ignore[method-assign]
    assert all(map(torch.equal, before, graph.model.parameters()))
    expected = staged_graph(Net(), stages_of(4, 2), placement(2, 2), micro_batches=4, stage=2)
    expected.compile(*batch)
    expected.load_state_dict(graph.full_state_dict())
    assert all(map(torch.equal, graph(*batch), expected(*batch)))


def test_an_error_names_the_rank_of_its_stage() -> None:
    for shape, names, rank in (((2, 2), ("pp", "dp"), 3), ((2, 2), ("dp", "pp"), 3)):
        graph = staged_graph(Net(), stages_of(4, 2), placement(*shape, names=names), micro_batches=4)
        x, y = batches(1)[0]
        y[-1] = 77  # of the last data rank
        with pytest.raises(IndexError, match="Target 77 is out of bounds") as raised:
            graph(x, y)
        (note,) = raised.value.__notes__  # type: ignore[attr-defined]
        stage = [2, 3] if names[0] == "pp" else [1, 3]
        assert f'while rank {rank} of placement("cpu", {stage}' in note and "ran graph Train.forward@1" in note


@pytest.mark.parametrize(("kind", "expected"), [("param", True), ("batch", False)])
def test_what_is_computed_of_parameters_alone_is_known_at_any_depth(kind: str, expected: bool) -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["role"] = Role(kind, "x")
    for _ in range(3000):
        node = graph.call_function(torch.add, (node, node))
    assert is_of_params(node) is expected
