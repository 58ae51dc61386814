"""Ops that need a dim whole become their definitions where it is split, which give what the ops give."""

from __future__ import annotations

import pytest
import torch
from toys import history, lines, lower, run

from graphzero.ir.text.parser import parse
from graphzero.passes import Expand, Pin, Pipeline, Propagate
from graphzero.passes.place.expand import TABLE
from graphzero.passes.place.forward_sweep import AxisPropagation
from graphzero.testing import assert_same_step

ROWS = """
graph g(tp={ranks})
  x = batch() : {type}[6, 7]  S(1)!
  g = batch() : {type}[6, 7]  S(1)!
  r = batch() : {type}[6, 1]
forward:
  some  = gt.Scalar(x, 0.6)                    : bool[6, 7]
  every = gt.Scalar(r, {every})                : bool[6, 1]
  some1 = masked_fill.Scalar(x, some, -inf)    : {type}[6, 7]
  some2 = masked_fill.Scalar(some1, every, -inf) : {type}[6, 7]
  {op}
  return y
"""
OPS = {
    "softmax": "y = _softmax({x}, 1, False) : {type}[6, 7]",
    "log_softmax": "y = _log_softmax({x}, -1, False) : {type}[6, 7]",
    "safe_softmax": "y = _safe_softmax({x}, 1) : {type}[6, 7]",
    "logsumexp": "y = logsumexp({x}, [1]) : {type}[6]",
    "logsumexp, dims kept": "y = logsumexp({x}, [-1], True) : {type}[6, 1]",
    "logsumexp of all": "y = logsumexp({x}, [0, 1]) : {type}[]",
    "softmax backward": "y = _softmax_backward_data(g, {x}, 1, {dtype}) : {type}[6, 7]",
    "log_softmax backward": "y = _log_softmax_backward_data(g, {x}, -1, {dtype}) : {type}[6, 7]",
}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def rows(op: str, type_: str = "f64", ranks: int = 2, x: str = "x", every: float = 2.0) -> str:
    line = OPS[op].format(x=x, type=type_, dtype=DTYPES[type_])
    return ROWS.format(op=line, type=type_, ranks=ranks, every=every)


def whole(text: str) -> str:
    return text.replace("S(1)!", "").replace("tp=2", "tp=1").replace("tp=3", "tp=1")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_definition_gives_what_its_op_gives(op: str, ranks: int) -> None:
    for x in ("x", "some1") if "backward" not in op else ("x",):
        text = rows(op, ranks=ranks, x=x)
        gathers = lines(history(text)["localize"].after, "all_gather(")
        assert all("all_gather(y," in line for line in gathers)  # what is returned is whole
        assert_same_step(lower(whole(text)), lower(text), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "safe_softmax", "logsumexp"])
@pytest.mark.parametrize("every", [0.5, -1.0])
def test_rows_that_are_masked_as_a_whole_give_what_the_op_gives(op: str, every: float) -> None:
    text = rows(op, x="some2", every=every)
    split, plain = (run(lower(one)) for one in (text, whole(text)))
    found = split["output 0"][0]
    if op == "safe_softmax":
        assert found.isfinite().all() and bool((found.sum(1) == 0).any())
    torch.testing.assert_close(found, plain["output 0"][0], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_definitions_of_16_bit_rows_round_once(op: str, type_: str) -> None:
    """The kernels keep float32 inside; logsumexp's does not, and its definition is nearer to the truth."""
    found, kernel = (run(lower(text))["output 0"][0] for text in (rows(op, type_), whole(rows(op, type_))))
    eps = torch.finfo(DTYPES[type_]).eps
    torch.testing.assert_close(found, kernel, rtol=(4 if "logsumexp" in op else 1) * eps, atol=eps / 4)


def test_ops_stay_one_kernel_where_their_rows_are_whole() -> None:
    for op in OPS:
        text = rows(op).replace("S(1)!", "S(0)!")
        kernel = OPS[op].partition("(")[0].removeprefix("y = ")
        graph = history(text)["localize"].after
        assert lines(graph, f"= {kernel}(") or "of all" in op, op


def test_every_definition_is_tried() -> None:
    assert {op.removeprefix("aten.") for op in map(str, TABLE)} == {
        f"{line.partition('(')[0].removeprefix('y = ')}.default" for line in OPS.values()
    }


# ---- beside propagation


def test_what_is_expanded_is_a_captured_program_that_computes_the_same_whatever_its_pins() -> None:
    given = parse(rows("softmax", x="some1"))
    after = Pipeline([Expand()])(given)
    assert after.level == "captured" and not lines(after, "_softmax(")
    assert str(Pipeline([Expand()])(after)) == str(after)
    one_rank = parse(str(after).replace("tp=2", "tp=1").replace("S(1)!", "B!"))
    assert_same_step(lower(whole(rows("softmax", x="some1"))), lower(one_rank), rtol=1e-12, atol=1e-12)


def test_without_it_rows_are_gathered() -> None:
    given = parse(rows("softmax"))
    propagated = Pipeline([Pin(), Propagate()])(given)
    assert lines(propagated, "_softmax(") == ["y = _softmax(x, 1, False) : f64[6, 7] B"]


@pytest.mark.parametrize("op", ["softmax", "log_softmax backward"])
def test_propagation_goes_on_from_the_last_sweep(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each definition carries the split on, so there is a sweep more for the graph that comes out."""
    swept = 0
    sweep = AxisPropagation.sweep

    def counted(axis: AxisPropagation) -> None:
        nonlocal swept
        swept += 1
        sweep(axis)

    monkeypatch.setattr(AxisPropagation, "sweep", counted)
    for sbp, most in (("S(0)!", 1), ("S(1)!", 2)):
        swept = 0
        Pipeline([Pin(), Expand(), Propagate()])(parse(rows(op).replace("S(1)!", sbp)))
        assert swept == most
