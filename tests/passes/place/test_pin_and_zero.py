"""Pin writes down what is placed; Zero moves pins, and nothing else."""

from __future__ import annotations

import pytest
from toys import history, step

from graphzero.errors import ConfigError, PlacementError
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.value import Role
from graphzero.passes import Pin, Pipeline, Zero
from graphzero.passes.place.zero import split_dim
from graphzero.sbp.types import B, S
from graphzero.testing import assert_graph

TOY = """
graph step(dp=4)
  x  = batch()      : f32[8, 16]
  w  = param()      : f32[16, 4]
  m  = state(w)     : f32[16, 4]
forward:
  wf = use(w)       : f32[16, 4]
  y  = mm(x, wf)    : f32[8, 4]
backward:
  xt = t(x)         : f32[16, 8]
  g  = mm(xt, y)    : f32[16, 4]  ; gradient(w)
update:
  wu = use(w)       : f32[16, 4]
  m1 = add(m, g)    : f32[16, 4]
  w1 = sub(wu, m1)  : f32[16, 4]
  return y; update(w=w1, m=m1)
"""

PINNED = """
graph step(dp=4) captured
  x     = batch()       : f32[8, 16]  S(0)!
  w     = param()       : f32[16, 4]  B!
  m     = state(w)      : f32[16, 4]  B!
forward:
  wf    = use(w)        : f32[16, 4]  B!
  y     = mm(x, wf)     : f32[8, 4]
backward:
  xt    = t(x)          : f32[16, 8]
  g     = mm(xt, y)     : f32[16, 4]  ; gradient(w)
  g_pin = pin(g, -1)    : f32[16, 4]  B!  ; gradient(w)
update:
  wu    = use(w)        : f32[16, 4]  B!
  m1    = add(m, g_pin) : f32[16, 4]
  w1    = sub(wu, m1)   : f32[16, 4]
  return y; update(w=w1, m=m1)
"""

STAGE_1 = """
graph step(dp=4) captured
  x     = batch()       : f32[8, 16]  S(0)!
  w     = param()       : f32[16, 4]  B!
  m     = state(w)      : f32[16, 4]  S(0)!
forward:
  wf    = use(w)        : f32[16, 4]  B!
  y     = mm(x, wf)     : f32[8, 4]
backward:
  xt    = t(x)          : f32[16, 8]
  g     = mm(xt, y)     : f32[16, 4]  ; gradient(w)
update:
  g_pin = pin(g, -1)    : f32[16, 4]  S(0)!  ; gradient(w)
  wu    = use(w)        : f32[16, 4]  S(0)!
  m1    = add(m, g_pin) : f32[16, 4]
  w1    = sub(wu, m1)   : f32[16, 4]
  return y; update(w=w1, m=m1)
"""

GRADIENT = "  g_pin = pin(g, -1)    : f32[16, 4]  S(0)!  ; gradient(w)\n"
STAGE_2 = STAGE_1.replace(f"update:\n{GRADIENT}", f"{GRADIENT}update:\n")
STAGE_3 = STAGE_2.replace("param()       : f32[16, 4]  B!", "param()       : f32[16, 4]  S(0)!")


def pinned(text: str, *passes: object) -> StepGraph:
    return Pipeline([Pin(), *passes])(parse(text))  # type: ignore[list-item]


def sbps(graph: StepGraph) -> dict[str, str]:
    return {n.name: ", ".join(map(str, n.meta["sbp"])) for n in graph.nodes if n.meta.get("pins")}


def test_pin_writes_plain_data_parallelism() -> None:
    assert_graph(pinned(TOY), PINNED)


@pytest.mark.parametrize(("stage", "expected"), [(1, STAGE_1), (2, STAGE_2), (3, STAGE_3)])
def test_zero_moves_the_pins_of_its_stage(stage: int, expected: str) -> None:
    assert_graph(pinned(TOY, Zero(stage)), expected)


def test_zero_changes_no_line_but_pins_and_their_place() -> None:
    for stage in (1, 2, 3):
        for line in history(step(), Zero(stage))["zero"].diff().splitlines():
            changed = line[0] in "+-" and line[:3] not in ("+++", "---")
            assert not changed or "!" in line or line[1:] in ("update:", "backward:")


def test_what_the_user_placed_or_pinned_stays() -> None:
    placed = Pin({Role("param", "w"): (S(1),), Role("batch", "x"): (B,)})
    assert sbps(Pipeline([placed])(parse(TOY))) == {
        "x": "B", "w": "S(1)", "m": "B", "wf": "B", "g_pin": "S(1)", "wu": "S(1)"
    }  # fmt: skip
    text = TOY.replace("x  = batch()      : f32[8, 16]", "x  = batch()      : f32[8, 16]  S(1)!")
    assert sbps(pinned(text))["x"] == "S(1)"


def test_0d_inputs_are_broadcast() -> None:
    text = "graph g(dp=2)\n  a = batch() : f32[]\n  b = batch() : f32[2]\n  k = seed() : i64[]\n  return a\n"
    assert sbps(pinned(text)) == {"a": "B", "b": "S(0)", "k": "B"}


def test_axes_that_are_no_data_axes_stay_broadcast_for_batch_and_zero() -> None:
    text = TOY.replace("dp=4", "dp=2, tp=2")
    assert sbps(pinned(text, Zero(3))) == {
        "x": "S(0), B", "w": "S(0), B", "m": "S(0), B", "wf": "B, B", "g_pin": "S(0), B", "wu": "S(0), B"
    }  # fmt: skip


def test_zero_keeps_a_tensor_split_and_takes_another_dim() -> None:
    text = TOY.replace("dp=4", "dp=2, tp=2").replace(
        "w  = param()      : f32[16, 4]", "w = param() : f32[16, 4] (B!, S(0)!)"
    )
    found = sbps(pinned(text, Zero(3)))
    assert (found["w"], found["wf"], found["wu"], found["g_pin"]) == (
        "S(1), S(0)",
        "B, S(0)",
        "S(1), S(0)",
        "S(1), S(0)",
    )


def test_zero_shards_over_the_axes_that_it_is_told() -> None:
    text = TOY.replace("dp=4", "dp_replicate=2, dp_shard=2")
    assert sbps(pinned(text, Zero(3)))["w"] == "S(0), S(0)"
    assert sbps(pinned(text, Zero(3, axis=("dp_shard",))))["w"] == "B, S(0)"
    with pytest.raises(PlacementError, match="no axis is called 'dp'"):
        pinned(text, Zero(3, axis=("dp",)))


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((16, 4), 4, 0),
        ((7, 3), 4, 0),  # 1/7 against 1/3
        ((7, 4), 4, 1),
        ((199, 4), 4, 0),  # under 2 %: dim 0 although dim 1 pads nothing
        ((49, 4), 4, 1),
        ((3, 3), 4, 0),
        ((1, 8), 4, 1),
        ((5,), 4, 0),
    ],
)
def test_the_dim_with_little_padding_is_split(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert split_dim(shape, list(range(len(shape))), ranks) == dim


def zeroed(shape: str, zero: Zero, ranks: int = 4) -> str:
    text = f"graph g(dp={ranks})\n  w = param() : f32[{shape}]\n  m = state(w) : f32[{shape}]\n  return w\n"
    return sbps(pinned(text, zero))["m"]


def test_tiny_and_0d_parameters_stay_broadcast() -> None:
    assert zeroed("", Zero(3)) == "B"
    assert zeroed("3", Zero(3)) == "B"
    assert zeroed("4", Zero(3)) == "S(0)"
    assert zeroed("5", Zero(3)) == "S(0)"
    assert zeroed("0, 4", Zero(3)) == "B"
    assert zeroed("4", Zero(3), ranks=1) == "B"


def test_parameters_below_shard_min_size_stay_broadcast() -> None:
    assert zeroed("16, 4", Zero(3, shard_min_size=16)) == "S(0)"
    assert zeroed("16, 4", Zero(3, shard_min_size=17)) == "B"


def test_states_of_other_shapes_are_split_by_their_own_dims() -> None:
    text = (
        "graph g(dp=4)\n  w = param() : f32[7, 8]\n  a = state(w, a) : f32[7, 8]\n  r = state(w, r) : f32[7]\n"
        "  c = state(w, c) : f32[8]\n  n = state(w, n) : f32[]\n  d = state(w, d) : f32[7, 8, 2]\n"
        "  s = state(optimizer0.group0, step) : f32[]\n  return w\n"
    )
    assert sbps(pinned(text, Zero(2))) == {
        "w": "B", "a": "S(1)", "r": "S(0)", "c": "S(0)", "n": "B", "d": "S(1)", "s": "B"
    }  # fmt: skip


def test_frozen_parameters_are_split_at_stage_3_alone() -> None:
    text = step(("linear 8", "relu", "linear 4"), frozen=(0,))
    assert "w0_u" not in text
    for stage, sbp in ((1, "B"), (2, "B"), (3, "S(1)")):  # 6 x 8: dim 1 pads nothing
        assert sbps(pinned(text, Zero(stage)))["w0"] == sbp


def test_there_are_three_stages() -> None:
    for stage in (0, 4, "2", None):
        with pytest.raises(ConfigError, match="the stages are 1"):
            Zero(stage)  # type: ignore[arg-type]
