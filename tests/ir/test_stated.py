"""What a text says of its values is computed again before anything is done with it."""

from __future__ import annotations

import pytest

from graphzero.errors import GraphZeroError, VerifyError
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Pipeline
from graphzero.plan import plan_of
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld

HEAD = """
graph g(dp=2) {}
  x = batch() : f32[8, 4]  S(0)!
  n = batch() : i64[8]  S(0)!
  w = param() : f32[4, 4]  B!
  h = hyper(optimizer0.group0, lr) : float
  c = hyper(optimizer0.group0, betas.0) : float
forward:
  {}
  return y
"""


def refused(line: str, level: str = "captured") -> str:
    with pytest.raises(VerifyError) as caught:
        verify(parse(HEAD.format(level, line)))
    return str(caught.value)


FALSE = {
    "y = mm(x, w) : f32[8, 5]": "'y' is said to be f32[8, 5], but is f32[8, 4]",
    "y = mm(x, w) : f64[8, 4]": "'y' is said to be f64[8, 4], but is f32[8, 4]",
    "y = mm(x, x) : f32[8, 4]": "'y' calls mm with what it cannot take",
    "y = mm(x) : f32[8, 4]": "'y' calls mm with what it cannot take",
    "y = sum.dim_IntList(x, [2]) : f32[8]": "'y' calls sum.dim_IntList with what it cannot take",
    "s = split(x, 2, 1) : (f32[8, 2], f32[8, 2], f32[8, 2])\n  y = s[0] : f32[8, 2]": "makes 2",
    "s = split(x, 2, 1) : (f32[8, 2], f32[8, 2])\n  y = s[2] : f32[8, 2]": "picks result 2",
    "s = split(x, 2, 1) : (f32[8, 2], f32[8, 2])\n  y = s[-1] : f32[8, 2]": "picks result -1",
    "s = split(x, 2, 1) : (f32[8, 2], _)\n  y = s[1] : f32[8, 2]": "picks result 1",
    "y = x[0] : f32[4]": "picks result 0 of what has no such result",
    "s = split(x, 2, 1) : (f32[8, 2], f32[8, 2])\n  y = relu(s) : f32[8, 2]": "'s', which has several results",
    "y = use(x, w) : f32[8, 4]": "'y' takes 1 arguments",
    "y = use(1) : f32[8, 4]": "'y' reads a value that is not a tensor",
    "y = use(w) : f32[4, 5]": "'y' is said to be f32[4, 5], but is f32[4, 4]",
    "y = box(h) : float": "'y' reads a value that is not a tensor",
    "y = operator.mul(h, c) : int": "'y' is said to be int, but is float",
    "y = operator.mul(x, h) : f32[8, 4]": "'y' computes with a value that is not a number",
    "y = operator.mul('a', 1000000000) : float": "'y' computes with a value that is not a number",
    "y = operator.pow(10, 1000000000) : int": "may grow without bounds",
    "y = operator.lt(h, c) : float": "'y' is said to be float, but is bool",
    "update:\n  a = neg(x) : f32[8, 4]\nforward:\n  y = neg(a) : f32[8, 4]": "of the phase forward and reads 'a' of",
    "y = relu(h) : f32[8, 4]": "'y' calls relu with what it cannot take",
    "y = full([4], h) : f32[5]": "'y' is said to be f32[5], but is f32[4]",
    "y = nonzero(x) : i64[8, 2]": "'y' calls nonzero with what it cannot take",
    "y = empty_strided([2], [100000000000]) : f32[2]": "bytes for 2 numbers",
    "y = as_local(x, ['S(0)', 'B'], [8, 4]) : f32[8, 4]": "'y' does not name an SBP for each axis",
    "e = expand(sum(x) : f32[]) : f32[]": "",
}


@pytest.mark.parametrize("lines", FALSE)
def test_a_value_is_what_its_op_makes(lines: str) -> None:
    if FALSE[lines]:
        assert FALSE[lines] in refused(lines)
        return
    with pytest.raises(GraphZeroError):
        verify(parse(HEAD.format("captured", lines)))


LOWERED = {
    "y = all_gather(x, 0, 'tp') : f32[8, 4]  B": "names the axis 'tp', which is not there",
    "y = all_gather(x, 2, 'dp') : f32[8, 4]  B": "names dim 2 of f32[8, 4]",
    "y = all_gather(x, 0) : f32[8, 4]  B": "takes 3 arguments",
    "y = all_gather(x, 0, 'dp', dtype=torch.float64) : f64[8, 4]  B": "casts f32[8, 4] to torch.float64",
    "y = all_gather(x, 0, 'dp', dtype=torch.int8) : i8[8, 4]  B": "casts f32[8, 4] to torch.int8",
    "y = all_gather(x, 0, 'dp', dtype=torch.bfloat16) : f32[8, 4]  B": "bf16[8, 4]",
    "y = all_gather(x, 0, 'dp', dtype=2) : f32[8, 4]  B": "takes no dtype",
    "y = all_gather(x, 0, 'dp', how=2) : f32[8, 4]  B": "takes no how",
    "y = all_gather(n, 0, 'dp', dtype=torch.bfloat16) : bf16[8]  B": "casts i64[8] to torch.bfloat16",
    "y = reduce_scatter(x, 0, 'dp', dtype=torch.bfloat16) : bf16[8, 4]  S(0)": "takes 3 arguments",
    "y = all_reduce(x, 'dp', 'mean') : f32[8, 4]  B": "reduces by 'mean'",
    "l = launch('os.system', 0, [x], [0], 'dp') : (f32[8, 4]  B)": "launches none of bucket_all_gather",
    "l = launch('bucket_all_gather', -2, [x], [0], 'dp') : (f32[8, 4]  B)": "has no slot -2",
    "l = launch('bucket_all_gather', 10**9, [x], [0], 'dp') : (f32[8, 4]  B)": "",
    "l = launch('bucket_all_gather', 1000000000, [x], [0], 'dp') : (f32[8, 4]  B)": "has no slot",
    "l = launch('bucket_all_gather', 0, [x, n], [0, 0], 'dp') : (f32[8, 4]  B, i64[8]  B)": "of several dtypes",
    "l = launch('bucket_all_gather', 0, [x], [], 'dp') : (f32[8, 4]  B)": "has no dim for each value",
    "l = launch('bucket_all_gather', None, [x, x], [0, 0], 'dp') : (f32[8, 4]  B, f32[8, 4]  B)": "no slot for several",
    "l = wait(x) : (f32[8, 4]  B)": "waits for a value that is not a launch",
    "y = assign(x, x) : f32[8, 4]  S(0)": "writes into 'x', which is not a parameter, buffer or state",
    "y = assign(w, x) : f32[4, 4]  B": "writes f32[8, 4] into f32[4, 4]",
    "y = relu(x, out=1) : f32[8, 4]  S(0)": "has an out= that is not a value",
}


@pytest.mark.parametrize("line", LOWERED)
def test_an_op_of_a_pass_has_the_form_that_the_pass_gives_it(line: str) -> None:
    if LOWERED[line]:
        assert LOWERED[line] in refused(line.replace("l = ", "y = "), "lowered")
        return
    with pytest.raises(GraphZeroError):
        parse(HEAD.format("lowered", line))


def test_only_late_passes_write_and_move() -> None:
    assert "writes at level captured" in refused("y = assign(w, w) : f32[4, 4]  B")
    assert "is told where to write at level boxed" in refused("y = relu(x, out=x) : f32[8, 4]  S(0)", "boxed")
    assert "'y' is a move at level captured; `lower_boxing` chooses the moves: add it after that" in refused(
        "y = all_reduce(x, 'dp', 'sum') : f32[8, 4]"
    )


def test_inputs_have_the_type_of_their_role() -> None:
    for line, problem in {
        "k = seed() : f32[]": "'k' is a seed of type f32[]",
        "k = param() : float": "'k' is a param of type float, which is not a tensor",
        "k = batch() : (f32[2], f32[2])": "'k' is a batch of type (f32[2], f32[2])",
        "k = hyper(optimizer0.group0, lr) : f32[]": "'k' is a hyper of type f32[], which is not a number",
    }.items():
        with pytest.raises(VerifyError) as caught:
            verify(parse(f"graph g(dp=2)\n  {line}\n  return\n"))
        assert problem in str(caught.value)


def test_a_split_of_very_many_pieces_is_not_tried() -> None:
    text = (
        "graph g(dp=2)\n  x = batch() : f32[1000000000000]\nforward:\n  s = split(x, 1) : (f32[1], f32[1])\n  return\n"
    )
    with pytest.raises(VerifyError, match="may have 1000000000000 results"):
        verify(parse(text))


def test_nobody_works_with_a_text_that_was_not_checked() -> None:
    text = HEAD.format("local", "y = relu(x) : f32[8, 5]  S(0)")
    for use in (
        lambda graph: Pipeline([])(graph),
        plan_of,
        lambda graph: Executor(graph, VirtualWorld(graph.placement)),
    ):
        with pytest.raises(VerifyError, match="is said to be"):
            use(parse(text))


def test_a_copy_of_what_was_not_checked_is_not_checked_either() -> None:
    with pytest.raises(VerifyError, match="is said to be"):
        verify(parse(HEAD.format("captured", "y = relu(x) : f32[8, 5]")).clone())
