"""KeepGathered: one gather of a parameter serves forward and backward, and nothing else changes."""

from __future__ import annotations

import pytest
from toys import history, lines, measured, options, random_step, run, step

from graphzero.errors import ConfigError
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.passes import Bucket, KeepGathered, Pipeline, Zero, default_passes
from graphzero.passes.memory.keep_gathered import gathered_again
from graphzero.plan import plan_of
from graphzero.testing import assert_graph

LOWERED = """
graph step(dp=4) lowered
  x  = batch()                            : f32[8, 16]    S(0)
  w  = param()                            : f32[16, 16]   S(0)
  v  = param()                            : f32[16, 16]   B
forward:
  wf = all_gather(w, 0, 'dp')             : f32[16, 16]   B  ; param(w)
  wt = t(wf)                              : f32[16, 16]   B
  wh = _to_copy(wt, dtype=torch.bfloat16) : bf16[16, 16]  B
  vt = t(v)                               : f32[16, 16]   B
  y  = mm(x, wt)                          : f32[8, 16]    S(0)
backward:
  wb = all_gather(w, 0, 'dp')             : f32[16, 16]   B  ; param(w)
  wc = t(wb)                              : f32[16, 16]   B
  wi = _to_copy(wc, dtype=torch.bfloat16) : bf16[16, 16]  B
  wd = _to_copy(wc, dtype=torch.float64)  : f64[16, 16]   B
  vc = t(v)                               : f32[16, 16]   B
  g  = mm(y, wc)                          : f32[8, 16]    S(0)
  h  = mm(g, vc)                          : f32[8, 16]    S(0)
  return y, wh, wi, wd, vt, h
"""

KEPT = """
graph step(dp=4) lowered
  x  = batch()                            : f32[8, 16]    S(0)
  w  = param()                            : f32[16, 16]   S(0)
  v  = param()                            : f32[16, 16]   B
forward:
  wf = all_gather(w, 0, 'dp')             : f32[16, 16]   B  ; param(w)
  wt = t(wf)                              : f32[16, 16]   B
  wh = _to_copy(wt, dtype=torch.bfloat16) : bf16[16, 16]  B
  vt = t(v)                               : f32[16, 16]   B
  y  = mm(x, wt)                          : f32[8, 16]    S(0)
backward:
  wd = _to_copy(wt, dtype=torch.float64)  : f64[16, 16]   B
  vc = t(v)                               : f32[16, 16]   B
  g  = mm(y, wt)                          : f32[8, 16]    S(0)
  h  = mm(g, vc)                          : f32[8, 16]    S(0)
  return y, wh, wh, wd, vt, h
"""

LAYERS = ("linear 8", "relu", "bias", "norm", "linear 8", "scale", "tied", "skip", "linear 4")


def lowered(text: str, keep: KeepGathered | None, stage: int = 3) -> StepGraph:
    """The program that runs, in buckets small enough that there are several."""
    chosen = options(Zero(stage), Bucket(256))
    ahead, behind = default_passes(chosen, until="keep_gathered"), default_passes(chosen, since="keep_gathered")
    return Pipeline([*ahead, *([keep] if keep is not None else []), *behind])(parse(text))


def again(text: str) -> set[str]:
    return set(gathered_again(history(text, Zero(3))["fuse_adam"].after))


def backward_gathers(graph: StepGraph) -> set[str]:
    calls = plan_of(graph).collectives
    return {name for c in calls if (c.phase, c.kind) == ("backward", "all_gather") for name in c.names}


def test_backward_reads_what_forward_gathered_with_its_views_and_smaller_casts() -> None:
    assert_graph(Pipeline([KeepGathered()])(parse(LOWERED)), KEPT)


def test_a_parameter_that_is_not_named_is_gathered_again() -> None:
    assert_graph(Pipeline([KeepGathered(("v",))])(parse(LOWERED)), LOWERED)
    assert_graph(Pipeline([KeepGathered(())])(parse(LOWERED)), LOWERED)


@pytest.mark.parametrize("names", [("w",), ("w*",), ("[vw]",), ("?", "v")])
def test_names_and_patterns_say_which(names: tuple[str, ...]) -> None:
    assert_graph(Pipeline([KeepGathered(names)])(parse(LOWERED)), KEPT)


@pytest.mark.parametrize("name", ["u", "x", "u*", ""])
def test_a_name_that_no_parameter_has_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no such parameter; the step reads w, v"):
        Pipeline([KeepGathered((name,))])(parse(LOWERED))


def test_what_is_kept_is_not_gathered_in_backward_and_the_rest_is() -> None:
    text = step(LAYERS)
    paths = sorted(again(text))
    assert len(paths) > 3
    assert backward_gathers(lowered(text, None)) == set(paths)
    assert backward_gathers(lowered(text, KeepGathered(tuple(paths[:2])))) == set(paths[2:])
    assert not backward_gathers(lowered(text, KeepGathered()))


def test_forward_gathers_the_same_whatever_is_kept() -> None:
    text = step(LAYERS)
    forward = [
        [(c.kind, c.bytes, c.names) for c in plan_of(graph).collectives if c.phase == "forward"]
        for graph in (lowered(text, None), lowered(text, KeepGathered()))
    ]
    assert forward[0] == forward[1]


@pytest.mark.parametrize("seed", range(12))
def test_it_changes_no_bit_and_the_plan_is_what_is_measured(seed: int) -> None:
    text = random_step(seed)
    paths = sorted(again(text))
    wanted = run(lowered(text, None))
    for names in (("*",), tuple(paths[::2])):
        graph = lowered(text, KeepGathered(names))
        for name, held in run(graph).items():
            assert all(map(_equal, held, wanted[name])), name
        found, plan = measured(graph), plan_of(graph)
        assert found.at_peak == {name: n for name, n in plan.memory.at_peak.items() if n}, names


def _equal(a: object, b: object) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else a == b  # type: ignore[attr-defined]


def test_what_stays_gathered_is_no_activation() -> None:
    """Though backward reads, through a view that forward made, what forward made."""
    categories = liveness(Pipeline([KeepGathered()])(parse(LOWERED))).categories
    assert {node.name: category for (node, _), category in categories.items() if node.name in ("wf", "y")} == {
        "wf": "temporaries",
        "y": "activations",
    }


def test_stages_without_split_parameters_have_nothing_to_keep() -> None:
    text = step(LAYERS)
    for stage in (1, 2):
        assert str(lowered(text, KeepGathered(), stage)) == str(lowered(text, None, stage))


def test_gathers_over_several_axes_are_kept_as_a_whole() -> None:
    text = step(LAYERS).replace("dp=4", "dp_a=2, dp_b=2")
    assert lines(lowered(text, None), "all_gather")
    assert not backward_gathers(lowered(text, KeepGathered()))
