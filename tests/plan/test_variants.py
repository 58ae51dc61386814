"""Programs of one step under other options: each is that of a whole run, and what two have in common runs once."""

from __future__ import annotations

from dataclasses import replace

from toys import step

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.passes import Options, Pipeline, Record, default_passes
from graphzero.plan.variants import Variants
from graphzero.sbp.types import B

STEP = step(("linear 16", "relu", "linear 16", "relu", "linear 16"), width=16, batch=64, optimizer="momentum")


def names(history: list[Record]) -> list[str]:
    return [record.name for record in history]


def test_what_two_lists_of_passes_begin_with_runs_once_and_the_program_is_that_of_a_whole_run() -> None:
    runs: list[str] = []

    def count(graph: StepGraph) -> StepGraph:
        runs.append("count")
        return graph

    variants = Variants(parse(STEP), [(count, "localize")])
    ways: tuple[tuple[str, ...], ...] = ((), ("*",), ())
    found = [variants.candidate(Options(stage=3, keep_gathered=kept)) for kept in ways]
    assert runs == ["count"]
    for one, kept in zip(found, ways, strict=True):
        whole = Pipeline(default_passes(Options(stage=3, keep_gathered=kept), [(count, "localize")]))
        assert str(one.graph) == str(whole(parse(STEP)))
        assert names(one.history) == names(whole.history)
    assert str(found[0].graph) != str(found[1].graph)


def test_a_users_pass_is_the_same_only_if_it_is_the_same_object() -> None:
    class Equal:
        def __call__(self, graph: StepGraph) -> StepGraph:
            graph.pin(next(graph.placeholders("batch")), "dp", B)
            return graph

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    variants = Variants(parse(STEP), [(Equal(), "pin")])
    one = str(variants.candidate(Options()).graph)
    variants.own = [(lambda graph: graph, "pin")]
    other = str(variants.candidate(Options()).graph)
    assert one != other == str(Pipeline(default_passes())(parse(STEP)))


def test_a_graph_before_a_pass_is_the_same_whether_the_pass_is_there_or_not() -> None:
    variants = Variants(parse(STEP))
    with_it, without = (
        str(variants.before("delay_gradients", Options(delay_gradients=order))) for order in (True, False)
    )
    assert with_it == without == str(Pipeline(default_passes(until="delay_gradients"))(parse(STEP)))


def test_a_program_is_made_of_the_graph_that_is_handed_over_only_where_it_goes_on_from_there() -> None:
    plain, moved = Options(), Options(delay_gradients=True)
    small = replace(moved, bucket_bytes=64)
    for first, then in ((plain, moved), (moved, plain), (moved, moved), (moved, small)):
        variants = Variants(parse(STEP))
        variants.candidate(first)  # the next list may begin with more of these than stand before "delay_gradients"
        given = variants.before("delay_gradients", then)
        made = variants.candidate(then, given=given)
        assert str(made.graph) == str(Pipeline(default_passes(then))(parse(STEP)))
        assert str(made.history[-1].after) == str(made.graph)


def test_a_graph_that_was_handed_over_long_ago_is_not_taken_for_another() -> None:
    variants = Variants(parse(STEP))
    early = variants.before("localize", Options())
    variants.before("delay_gradients", Options())
    made = variants.candidate(Options(delay_gradients=True), given=early)
    assert str(made.graph) == str(Pipeline(default_passes(Options(delay_gradients=True)))(parse(STEP)))
