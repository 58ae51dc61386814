"""A pass changes a clone and returns it; the pipeline checks, times and remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from toys import lower, step

from graphzero.config.plugin_settings import plugin_settings
from graphzero.errors import VerifyError
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes import (
    NAMES,
    Bucket,
    Fuse,
    Options,
    Pass,
    Pin,
    Pipeline,
    Propagate,
    Record,
    Schedule,
    Zero,
    base,
    default_passes,
    pass_name,
)
from graphzero.passes.pass_list import pass_entries
from graphzero.sbp.link_costs import Link
from graphzero.sbp.types import P, S
from graphzero.testing import assert_same_step

RELU = """
graph step(dp=2)
  x = batch()    : f32[8, 4]
  m = state(w)   : f32[4]
forward:
  y = relu(x)    : f32[8, 4]
update:
  n = mul(m, 2)  : f32[4]
  return y; update(m=n)
"""


PARTS = ("count_targets", "micro_batches", "tile_rows", "fuse_accumulate")  # which only parts of a batch need
MOVED = ("delay_gradients", "optimizer_in_backward", "offload_states", "offload_activations")
FUSE = tuple(map(pass_name, Fuse().passes))


def refused(pass_: Pass, problem: str, graph: str = RELU) -> None:
    with pytest.raises(VerifyError, match=problem):
        Pipeline([pass_])(parse(graph))


def test_the_graph_that_is_given_stays_as_it_is() -> None:
    graph = parse(step())
    before = str(graph)
    first = Pipeline(default_passes(Options(stage=3)))(graph)
    assert str(graph) == before
    assert str(lower(graph, Zero(3))) == str(first)


def test_history_holds_each_pass_with_the_graphs_before_and_after() -> None:
    pipeline = Pipeline(default_passes(Options(stage=3, keep_gathered=())))
    graph = parse(step())
    last = pipeline(graph)
    records = pipeline.history
    assert tuple(record.name for record in records) == tuple(
        name
        for name in NAMES
        if name
        not in (*PARTS, "assign_stages", "cast_before_gather", "gather_casts", "recompute", "ring_attention", *MOVED)
    )
    assert (str(records[0].before), str(records[-1].after)) == (str(graph), str(last))
    assert all(str(a.after) == str(b.before) for a, b in zip(records[:-1], records[1:], strict=True))
    assert all(record.seconds >= 0 for record in records)


def nothing(graph: StepGraph) -> StepGraph:
    return graph


def run(monkeypatch: pytest.MonkeyPatch, *passes: Pass) -> tuple[list[str], list[Record]]:
    """After which passes the graph was verified, and the history."""
    seen: list[str] = []
    monkeypatch.setattr(base, "verify", lambda graph, after="", is_final=True, known=None: seen.append(after))
    graph = verify(parse(RELU))
    pipeline = Pipeline(passes)
    pipeline(graph)
    return seen, pipeline.history


def test_what_passes_leave_as_it_was_is_verified_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, history = run(monkeypatch, nothing, nothing, nothing)
    assert seen == ["nothing"] and [record.name for record in history] == ["nothing"] * 3
    assert history[0].packed[1] is history[2].packed[0] is history[2].packed[1]


CHANGES: dict[str, Callable[[StepGraph, Node], object]] = {
    "arguments": lambda graph, node: setattr(node, "args", (node.args[0], 3)),
    "keywords": lambda graph, node: setattr(node, "kwargs", {"out": node.args[0]}),
    "op": lambda graph, node: setattr(node, "target", torch.ops.aten.div.Tensor),
    "name": lambda graph, node: setattr(node, "name", "other"),
    "delay_gradients": lambda graph, node: node.append(graph.node("y")),
    "ops": lambda graph, node: graph.graph.erase_node(graph.call(node.target, node.args, node.meta["type"])),
    "an op more": lambda graph, node: graph.pin("y", "dp", S(0)),
    "level": lambda graph, node: setattr(graph, "level", "propagated"),
    "graph": lambda graph, node: setattr(graph, "graph", graph.clone().graph),
    **{key: lambda graph, node, key=key: node.meta.update({key: object()}) for key in
       ("type", "sbp", "pins", "role", "phase", "source", "module", "repeat")},
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_pass_changes_is_verified_and_kept_whatever_it_is(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(graph: StepGraph) -> StepGraph:
        with graph.graph.inserting_before(graph.output):
            CHANGES[what](graph, graph.node("n"))
        return graph

    seen, history = run(monkeypatch, nothing, change, nothing)
    kept = history[1].packed
    is_back = what == "ops"  # added and taken out again: names of what is gone are free, and nothing else has changed
    assert seen == (["nothing"] if is_back else ["nothing", "change"]) and (kept[0] is kept[1]) == is_back
    assert history[2].packed == (kept[1], kept[1])


def test_a_diff_shows_the_lines_that_a_pass_changed() -> None:
    pipeline = Pipeline([Pin(), Zero(1)])
    pipeline(parse(RELU))
    assert pipeline.history[1].diff().splitlines() == [
        "--- before zero", "+++ after zero", "@@ -2,3 +2,3 @@", "   x = batch() : f32[8, 4]  S(0)!",
        "-  m = state(w) : f32[4]  B!", "+  m = state(w) : f32[4]  S(0)!", " forward:",
    ]  # fmt: skip
    pipeline = Pipeline([Pin(), Pin()])
    pipeline(parse(RELU))
    assert pipeline.history[1].diff() == ""


def test_a_function_is_a_pass_and_carries_its_name() -> None:
    def double_relu(graph: StepGraph) -> StepGraph:
        node = graph.node("y")
        with graph.graph.inserting_after(node):
            again = graph.call(node.target, (node,), node.meta["type"], like=node, name="again")
        graph.set_output([again], {}, graph.updates)
        return graph

    pipeline = Pipeline([double_relu])
    after = pipeline(parse(RELU))
    assert [record.name for record in pipeline.history] == ["double_relu"]
    assert "+  again = relu(y) : f32[8, 4]" in pipeline.history[0].diff()
    assert_same_step(parse(RELU), after)


def test_names_are_snake_case_of_name_function_or_class() -> None:
    class FuseNorms:
        def __call__(self, graph: StepGraph) -> StepGraph:
            return graph

    class Named(FuseNorms):
        name = "something"

    assert pass_name(FuseNorms()) == "fuse_norms"
    assert pass_name(Named()) == "something"
    assert pass_name(Zero(1)) == "zero"


def test_what_a_pass_returns_is_a_graph() -> None:
    refused(lambda graph: None, "pass <lambda> returned NoneType, not a StepGraph")  # type: ignore[arg-type,return-value]
    refused(lambda graph: graph.fx, "returned .*, not a StepGraph")  # type: ignore[arg-type,return-value]


def test_a_pass_may_not_drop_an_update() -> None:
    def forget(graph: StepGraph) -> StepGraph:
        graph.set_output(graph.outputs, graph.aux, {})
        return graph

    refused(forget, "pass forget dropped the update of m")


def test_a_pass_may_not_change_the_number_of_outputs() -> None:
    def more(graph: StepGraph) -> StepGraph:
        graph.set_output([*graph.outputs, graph.node("y")], graph.aux, graph.updates)
        return graph

    refused(more, "pass more returned a graph with 2 outputs.* build returns 1")


def test_a_pass_may_not_drop_an_input() -> None:
    def drop(graph: StepGraph) -> StepGraph:
        graph.graph.erase_node(graph.node("x"))
        return graph

    unused = RELU.replace("relu(x)", "ones([8, 4])")
    refused(drop, "pass drop dropped the input x", unused)


def test_a_pass_may_not_go_back_to_an_earlier_level() -> None:
    def back(graph: StepGraph) -> StepGraph:
        graph.level = "captured"
        return graph

    with pytest.raises(VerifyError, match="pass back took the graph from level 'propagated' back to 'captured'"):
        Pipeline([Pin(), Propagate(), back])(parse(RELU))


def test_a_broken_law_names_the_pass_that_broke_it() -> None:
    def spoil(graph: StepGraph) -> StepGraph:
        graph.node("y").meta["sbp"] = (P,)
        return graph

    with pytest.raises(VerifyError, match="after pass spoil: 'y' cannot be P on axis dp"):
        Pipeline([Pin(), Propagate(), spoil])(parse(RELU))


# ---- the list of built-in passes


def ahead(graph: StepGraph) -> StepGraph:
    return graph


def behind(graph: StepGraph) -> StepGraph:
    return graph


def names(passes: list[Pass]) -> list[str]:
    return [pass_name(one) for one in passes]


def test_every_field_of_a_pass_is_an_option_or_setting_and_has_one_type_wherever_it_is_taken() -> None:
    known = {one.name: one.type for one in dataclasses.fields(Options)}
    for entry in pass_entries():
        for one in dataclasses.fields(entry.kind):  # type: ignore[arg-type]
            wider = {str(one.type), f"{one.type} | None"}
            setting = one.metadata.get("setting", one.name)
            assert setting in plugin_settings() or known[one.name] in wider, f"{entry.name}.{one.name}"


def test_options_reach_every_pass_that_takes_them() -> None:
    set_by_plugins = {"row_tiles": 3, "split_attention": "ring", "split_experts": "tokens", "expert_capacity": 3.0}
    options = Options(
        stage=1, optimizer_in_backward=True, bucket_bytes=100, links=(Link(0, 1e9),), plugins=set_by_plugins
    )
    values = vars(options) | set_by_plugins
    told = [(one, field) for one in default_passes(options) for field in dataclasses.fields(one)]  # type: ignore[arg-type]
    assert all(getattr(one, field.name) == values[field.metadata.get("setting", field.name)] for one, field in told)
    assert {field.name for _, field in told} >= {"stage", "optimizer_in_backward", "bucket_bytes", "links", "tiles"}


def test_a_group_is_its_passes_under_one_name() -> None:
    fused, ordered = Fuse().passes, Schedule(100, optimizer_in_backward=True).passes
    assert [pass_name(one) for one in fused] == ["fuse_cross_entropy", "fuse_pieces", "fuse_adam"]
    passes = default_passes(Options(bucket_bytes=100, optimizer_in_backward=True), [(ahead, "schedule")])
    at = passes.index(ahead)
    assert passes[at - len(ordered) : at] == list(ordered)
    graph = parse(step())
    apart = Pipeline(default_passes(Options()))(graph)
    before = default_passes(Options(), until="fuse"), default_passes(Options(), since="dead_code")
    together = Pipeline([*before[0], Fuse(), Bucket(), Schedule(), *before[1]])
    assert str(together(graph)) == str(apart)
    assert "slots" in [record.name for record in together.history]


def test_a_pass_is_there_under_its_condition() -> None:
    everything = Options(
        stage=3, masters=True, recompute=("*",), keep_gathered=(), delay_gradients=True, optimizer_in_backward=True,
        micro_batches=2, pipeline_stages=("model@0",), offload_states=True,
        offload_activations=("*",), plugins={"row_tiles": 2, "split_attention": "ring"},
    )  # fmt: skip
    assert names(default_passes(everything)) == list(NAMES)
    for options, missing in (
        (Options(keep_gathered=()), {"zero", "keep_gathered"}),
        (Options(stage=1, masters=True, keep_gathered=()), set()),
        (Options(stage=2, keep_gathered=()), {"keep_gathered"}),
        (Options(stage=3), {"keep_gathered"}),
        (
            Options(stage=3, optimise=False),
            {"keep_gathered", *FUSE, "in_place", "join_updates"},
        ),
    ):
        missing |= {"assign_stages", "recompute", "ring_attention", *MOVED, *PARTS}
        missing |= set() if options.masters and options.optimise else {"gather_casts"}
        missing |= set() if options.masters else {"cast_before_gather"}
        assert names(default_passes(options)) == [name for name in NAMES if name not in missing]


def test_a_part_of_the_list_is_cut_where_a_pass_would_stand() -> None:
    """Whether that pass is there or not, with the user's passes that stand in the part."""
    for options in (Options(), Options(delay_gradients=True)):
        parts = (
            default_passes(options, [(ahead, "localize"), (behind, "delay_gradients")], until="delay_gradients"),
            default_passes(options, [(ahead, "localize"), (behind, "delay_gradients")], since="delay_gradients"),
        )
        assert [*parts[0], *parts[1]] == default_passes(options, [(ahead, "localize"), (behind, "delay_gradients")])
        assert ahead in parts[0] and behind in parts[1]


def test_a_users_pass_follows_the_one_it_names_or_the_place_where_that_would_be() -> None:
    def third(graph: StepGraph) -> StepGraph:
        return graph

    own = [(ahead, "zero"), (behind, "ahead"), (third, "zero"), (third, "third")]
    for stage in (0, 2):
        found = names(default_passes(Options(stage=stage), own))
        assert found[: found.index("stack_updates")][-4:] == ["ahead", "behind", "third", "third"]


def test_a_pass_stands_in_a_room_in_a_file_of_its_name() -> None:
    for entry in pass_entries():
        above, _, file = entry.kind.__module__.rpartition(".")
        home = "graphzero.plugins." if entry.after else "graphzero.passes."
        assert above.startswith(home) and entry.name.startswith(file)


def test_every_level_has_passes_that_take_a_graph_on_from_it() -> None:
    graph = parse(step())
    for entry in pass_entries():
        if entry.when(Options(stage=2)):
            assert entry.level == graph.level
            graph = Pipeline([entry.create_pass(Options(stage=2))])(graph)
    assert graph.level == LEVELS[-1]
