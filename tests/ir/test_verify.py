"""Each law of the IR accepts what keeps it, and shows the line that does not."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import fx
from toys import STAGES, history, step

from graphzero.errors import VerifyError
from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.value import TensorType
from graphzero.ir.verifier.verify import verify
from graphzero.passes import InPlace, Pipeline, default_passes
from graphzero.sbp.types import B, P, S

RELU_OF_SUM = """
graph step(dp=2) boxed
  a  = batch()     : f32[8, 16]   S(1)!
  w1 = param()     : f32[16, 32]  S(0)!
  w2 = param()     : f32[32, 4]   B!
forward:
  h  = mm(a, w1)   : f32[8, 32]   P
  r  = relu(h)     : f32[8, 32]   P
  y  = mm(r, w2)   : f32[8, 4]    P
  return y
"""


def refused(graph: StepGraph | str, problem: str, after: str = "") -> str:
    with pytest.raises(VerifyError, match=problem) as caught:
        verify(parse(graph) if isinstance(graph, str) else graph, after)
    return str(caught.value)


def test_every_graph_of_every_pass_keeps_the_laws() -> None:
    for zero in STAGES:
        for record in history(step(("linear 7", "bias", "norm", "relu", "linear 3")), zero).values():
            after = record.after
            assert verify(after) is after


def test_a_partial_sum_read_by_relu_is_shown_with_what_relu_allows() -> None:
    graph = parse(RELU_OF_SUM)
    graph.node("r").meta["source"] = "examples/mlp.py:31 in build"
    assert refused(graph, "not linear", after="Zero(stage=2)") == (
        "after pass Zero(stage=2): 'r' reads the partial sum 'h', but relu is not linear\n"
        "\n"
        "    h = mm(a, w1) : f32[8, 32]  P\n"
        "  > r = relu(h) : f32[8, 32]  P    examples/mlp.py:31 in build\n"
        "    y = mm(r, w2) : f32[8, 4]  P\n"
        "\n"
        "  relu allows  B -> B,  S(0) -> S(0),  S(1) -> S(1),  P(max) -> P(max),  P(min) -> P(min)\n"
        "  Run `propagate` and `insert_boxing` after passes that move pins, or pin it yourself: "
        'graph.pin("h", "dp", B)'
    )


def test_linear_ops_may_read_a_partial_sum() -> None:
    linear = RELU_OF_SUM.replace("relu(h)", "neg(h)").replace("return y", "z = box(y) : f32[8, 4]  B\n  return z")
    verify(parse(linear))


def test_a_linear_op_on_mixed_terms_is_not_called_nonlinear() -> None:
    mixed = RELU_OF_SUM.replace("relu(h)", "add(h, v)")
    mixed = mixed.replace("w2 = param", "v  = param() : f32[8, 32] B\n  w2 = param")
    message = refused(mixed, "'r' runs add as P, B -> P, which would not compute the same")
    assert "not linear" not in message


def test_messages_stay_short_on_a_long_graph() -> None:
    lines = [f"  r{i} = relu(r{i - 1}) : f32[8]  {'P' if i == 1000 else 'B'}" for i in range(1, 2001)]
    long = "graph long(dp=2) boxed\n  r0 = batch() : f32[8]  B\nforward:\n" + "\n".join(lines) + "\n  return r2000\n"
    message = refused(long, "'r1000' runs relu as B -> P")
    assert "r999 = relu" in message
    assert len(message.splitlines()) < 40
    wide = ", ".join(f"r{i}" for i in range(2000))
    long = long.replace("return", f"c = cat([{wide}], 0) : f32[16000]  P\n  return")
    message = refused(long.replace("f32[8]  P", "f32[8]  B"), "'c' runs cat")
    assert len(message.splitlines()) < 40
    assert max(map(len, message.splitlines())) < 600


# ---- every level


def parsed_update(new: str = "add(w, x)", type_: str = "f32[4]", name: str = "w") -> str:
    return (
        f"graph g(dp=2)\n  x = batch() : f32[4]\n  w = param() : f32[4]\nforward:\n  n = {new} : {type_}\n"
        f"  return n; update({name}=n)\n"
    )


def test_an_update_has_the_type_of_what_it_replaces() -> None:
    verify(parse(parsed_update()))
    refused(parsed_update(type_="f32[5]"), r"'n' : f32\[5\] is to replace 'w' : f32\[4\]")
    refused(parsed_update(type_="f64[4]"), r"'n' : f64\[4\] is to replace 'w' : f32\[4\]")


def test_a_step_updates_parameters_buffers_and_states_alone() -> None:
    refused(parsed_update(name="x"), "updates 'x', which is not a parameter, buffer or state.*\n.*It may update: x, w")
    refused(parsed_update(name="q"), "updates 'q'")


def edited(edit: Callable[[StepGraph], object]) -> StepGraph:
    graph = parse(parsed_update())
    edit(graph)
    return graph


def test_operands_stand_above_their_readers() -> None:
    def swap(graph: StepGraph) -> None:
        with graph.graph.inserting_before(graph.output):
            late = graph.call(torch.ops.aten.relu.default, (graph.node("w"),), TensorType(torch.float32, (4,)))
        graph.node("n").args = (graph.node("w"), late)

    refused(edited(swap), "'n' reads 'relu.*', which is not made above it\n.*inserting_before")


def test_a_graph_ends_in_its_output() -> None:
    def below(graph: StepGraph) -> None:
        graph.call(torch.ops.aten.relu.default, (graph.node("w"),), TensorType(torch.float32, (4,)))

    refused(edited(below), "graph g does not end in its output but in 'relu.*'\n.*inserting_before")


def test_every_value_has_a_type() -> None:
    def untyped(graph: StepGraph) -> None:
        with graph.graph.inserting_before(graph.output):
            graph.graph.call_function(torch.ops.aten.relu.default, (graph.node("n"),))

    refused(edited(untyped), r"'relu_default' = relu\(...\) has no type\n.*graph.call")


def test_a_graph_holds_no_attributes_and_no_modules() -> None:
    def attribute(graph: StepGraph) -> None:
        with graph.graph.inserting_before(graph.output):
            node: fx.Node = graph.graph.create_node("get_attr", "weight")
            node.meta["type"] = TensorType(torch.float32, (4,))

    refused(edited(attribute), "'weight' is a get_attr node")


# ---- propagated


def propagated(line: str, level: str = "propagated") -> str:
    return (
        f"graph g(dp=2) {level}\n  x = batch() : f32[8, 4]  S(0)!\n  w = param() : f32[4, 4]  B!\n"
        f"forward:\n  {line}\n  return y\n"
    )


def test_from_propagated_on_every_tensor_has_an_sbp() -> None:
    verify(parse(propagated("y = relu(x) : f32[8, 4]  S(0)")))
    refused(propagated("y = relu(x) : f32[8, 4]"), "'y' has no SBP on each of the axes dp")
    verify(parse(propagated("y = relu(x) : f32[8, 4]", level="captured")))


def test_a_split_is_along_a_dim_that_is_there() -> None:
    refused(propagated("y = sum(x) : f32[]  S(0)"), r"'y' is S\(0\) on axis dp, but it has 0 dims")


def test_an_op_makes_what_its_rule_says() -> None:
    verify(parse(propagated("y = mm(x, w) : f32[8, 4]  S(1)")))
    refused(propagated("y = relu(x) : f32[8, 4]  P"), r"'y' cannot be P on axis dp\n(.|\n)*relu allows  B -> B")


def test_a_pick_is_in_the_sbp_of_its_result() -> None:
    split = "s = split(x, 2, 1) : (f32[8, 2]  S(0), f32[8, 2]  S(0))\n  y = s[1] : f32[8, 2]  "
    verify(parse(propagated(split + "S(0)")))
    refused(propagated(split + "B"), r"'y' is not in the SBP of the result that it picks\n(.|\n)*'s' makes \(?S\(0\)")


# ---- boxed


def test_from_boxed_on_operands_are_what_the_rule_says() -> None:
    verify(parse(propagated("y = mm(x, w) : f32[8, 4]  S(0)", level="boxed")))
    problem = r"'y' runs mm as S\(0\), B -> S\(1\), which would not compute the same"
    refused(propagated("y = mm(x, w) : f32[8, 4]  S(1)", level="boxed"), problem)


def test_a_pin_and_a_use_read_what_they_name() -> None:
    use = "u = use(w) : f32[4, 4]  {}\n  y = mm(x, u) : f32[8, 4]  S(0)"
    verify(parse(propagated(use.format("B"), level="boxed")))
    text = propagated("u = use(w) : f32[4, 4]  S(0)\n  y = relu(x) : f32[8, 4]  S(0)", level="boxed")
    refused(text, r"'u' takes B to S\(0\), which use does not\n(.|\n)*insert_boxing")


def test_a_state_leaves_the_step_in_the_sbp_it_entered_with() -> None:
    text = "graph g(dp=2) boxed\n  m = state(w) : f32[4]  S(0)!\nupdate:\n  n = mul(m, 0.9) : f32[4]  S(0)\n"
    verify(parse(text + "  return update(m=n)\n"))
    text += "  b = box(n) : f32[4]  B\n  return update(m=b)\n"
    refused(text, r"'m' enters the step as S\(0\) and would leave it as B")


def test_build_returns_no_partial_sum() -> None:
    text = propagated("y = sum.dim_IntList(x, [0]) : f32[4]  P", level="boxed")
    refused(text, "build would return the partial sum 'y'")
    verify(parse(text.replace("  return y", "  z = box(y) : f32[4]  B\n  return z")))


# ---- lowered


MOVES = {  # text of a move -> its operand's SBP and its own
    "all_gather(x, 0, 'dp')": ("S(0)", "B"),
    "reduce_scatter(x, 1, 'dp')": ("P", "S(1)"),
    "all_reduce(x, 'dp', 'sum')": ("P", "B"),
    "all_reduce(x, 'dp', 'max')": ("P(max)", "B"),
    "all_to_all(x, 0, 1, 'dp')": ("S(0)", "S(1)"),
    "slice_shard(x, 1, 'dp')": ("B", "S(1)"),
    "keep_first(x, 'dp')": ("B", "P"),
    "place_shard(x, 1, 'dp')": ("S(1)", "P"),
    "relabel(x)": ("B", "P(max)"),
    "launch('bucket_all_gather', 0, [x], [0], 'dp')": ("S(0)", "B"),
    "bucket_reduce_scatter([x], [1], 'dp')": ("P", "S(1)"),
    "bucket_all_reduce([x], 'dp', 'sum')": ("P", "B"),
}
SBPS = ("B", "S(0)", "S(1)", "P", "P(max)")


def moved(move: str, src: str, dst: str) -> str:
    many = "bucket" in move
    type_ = f"(f32[8, 4]  {dst})" if many else f"f32[8, 4]  {dst}"
    body = f"  m = {move} : {type_}\n"
    if "launch" in move:
        body += f"  v = wait(m) : {type_}\n"
    return f"graph g(dp=2) local\n  x = state(w) : f32[8, 4]  {src}\nupdate:\n{body}  return\n"


@pytest.mark.parametrize("move", MOVES)
def test_a_collective_makes_what_its_name_says_and_nothing_else(move: str) -> None:
    right = MOVES[move]
    verify(parse(moved(move, *right)))
    for src in SBPS:
        for dst in SBPS:
            allowed = (src, dst) == right
            if move == "relabel(x)":
                allowed = src == dst or allowed
            if "reduce_scatter" in move:
                allowed = dst == right[1] and src.startswith("P")
            if not allowed:
                refused(moved(move, src, dst), f"'m' takes .* to .*, which {move.split('(')[0][:6]}|which .* does not")


@pytest.mark.parametrize("move", MOVES)
def test_a_graph_that_was_right_is_refused_again_and_again_once_an_operand_has_changed(move: str) -> None:
    graph = parse(moved(move, *MOVES[move]))
    verify(graph)
    graph.node("x").meta["sbp"] = (S(0) if MOVES[move][0] == "S(1)" else S(1),)
    for _ in range(2):
        refused(graph, "'m' takes S\\(.\\) to .*, which")


def test_a_collective_leaves_other_axes_alone() -> None:
    text = (
        "graph g(dp=2, tp=2) local\n  x = state(w) : f32[8, 4]  (S(0), S(1))\n"
        "update:\n  m = all_gather(x, 0, 'dp') : f32[8, 4]  (B, {})\n  return\n"
    )
    verify(parse(text.format("S(1)")))
    refused(text.format("B"), "which all_gather does not")


def test_no_box_is_left_when_boxes_are_lowered() -> None:
    text = "graph g(dp=2) {}\n  m = state(w) : f32[4]  S(0)!\nupdate:\n  b = box(m) : f32[4]  B\n  return b\n"
    verify(parse(text.format("boxed")))
    refused(text.format("lowered"), "'b' is still a box\n(.|\n)*lower_boxing")
    graph = verify(parse(text.format("boxed")))
    graph.level = "lowered"
    refused(graph, "'b' is still a box")


# ---- storage and slots


WRITE = """
graph g(dp=2) local
  m = state(w)      : f32[4]  B
update:
  v = view(m, [4])  : f32[4]  B
  n = mul(m, 0.9)   : f32[4]  B
  {}
  return {}; update(m=a)
"""


def test_a_placeholder_is_not_read_after_it_is_written() -> None:
    verify(parse(WRITE.format("k = neg(v) : f32[4]  B\n  a = assign(m, n) : f32[4]  B", "k")))
    late = "a = assign(m, n) : f32[4]  B\n  k = neg({}) : f32[4]  B"
    refused(WRITE.format(late.format("m"), "k"), "'k' reads 'm' after 'a' wrote over it")
    refused(WRITE.format(late.format("v"), "k"), "'k' reads 'v' after 'a' wrote over it")
    verify(parse(WRITE.format(late.format("a"), "k")))


def test_what_is_assigned_to_a_state_is_its_new_value_on_every_rank() -> None:
    text = WRITE.format("a = assign(m, n) : f32[4]  B", "n")
    verify(parse(text))
    refused(text.replace("m=a", "m=n"), "'a' writes over 'm', whose new value is 'n'")
    refused(text.replace("; update(m=a)", ""), "'a' writes over 'm', which the step does not change")
    again = text.replace("  return", "  b = assign(m, n) : f32[4]  B\n  return").replace("m=a", "m=b")
    refused(again, "'a' writes over 'm', whose new value is 'b'")
    partial = text.replace("  n = mul", "  o = place_shard(s, 0, 'dp') : f32[4]  P\n  n = mul").replace(
        "(m, n)", "(m, o)"
    )
    partial = partial.replace("update:\n", "  s = state(v) : f32[4]  S(0)\nupdate:\n")
    refused(partial, "'a' takes P to B, which assign does not")


SLOTS = """
graph g(dp=2) local
  m = state(w) : f32[4]  S(0)
  n = state(v) : f32[4]  S(0)
update:
  h = launch('bucket_all_gather', 0, [m], [0], 'dp') : (f32[4]  B)
  {}
  return
"""
SECOND = "k = launch('bucket_all_gather', {}, [n], [0], 'dp') : (f32[4]  B)"
WAITS = ("a = wait(h) : (f32[4]  B)", "b = wait(k) : (f32[4]  B)")


def test_a_slot_holds_one_collective_at_a_time() -> None:
    verify(parse(SLOTS.format("\n  ".join((WAITS[0], SECOND.format(0), WAITS[1])))))
    verify(parse(SLOTS.format("\n  ".join((SECOND.format(1), *WAITS)))))
    text = SLOTS.format("\n  ".join((SECOND.format(0), *WAITS)))
    refused(text, "'k' takes slot 0, in which 'h' is still under way")


def test_what_is_launched_is_awaited() -> None:
    refused(SLOTS.format(""), "no op waits for 'h'")
    refused(SLOTS.format(WAITS[0].replace("B", "S(0)")), r"'a' takes B to S\(0\), which wait does not")


@pytest.mark.parametrize(("sbp", "hows"), [("P", ("sum", "mean")), ("P(max)", ("max",)), ("P(min)", ("min",))])
def test_micro_batches_accumulate_a_partial_value_as_its_ranks_combine(sbp: str, hows: tuple[str, ...]) -> None:
    for how in ("sum", "mean", "max", "min"):
        text = (
            f"graph g(dp=2) local\n  x = state(a) : f32[4]  B\nforward:\n  p = relabel(x) : f32[4]  {sbp}\n"
            f"  m = accumulator([4], torch.float32) : f32[4]  {sbp}\n"
            f"  r = accumulate(m, p, 0, 2, '{how}') : f32[4]  {sbp}\n  return\n"
        ).replace("relabel(x) : f32[4]  P\n", "keep_first(x, 'dp') : f32[4]  P\n")
        if how in hows:
            verify(parse(text))
        else:
            refused(text, f"'r' accumulates 'p', which is {re.escape(sbp)}, by '{how}'")


def test_a_reader_of_something_else_does_not_hide_a_bad_write() -> None:
    graph = Pipeline(one for one in default_passes() if not isinstance(one, InPlace))(parse(step(optimizer="momentum")))
    assign = next(node for node in graph.nodes if node.target is ops.assign)
    first = next(node for node in graph.nodes if node.op == "call_function")
    old = assign.args[0]
    reader = next(user for user in old.users if user is not assign)  # type: ignore[union-attr]
    assert reader.target is not operator.getitem
    with graph.graph.inserting_before(first):
        early = graph.call(ops.assign, (old, old), old.meta["type"], sbp=old.meta["sbp"])  # type: ignore[union-attr]
    refused(graph, f"reads '{old.name}' after '{early.name}' wrote over it")  # type: ignore[union-attr]


# ---- pins


def test_pinning_says_what_cannot_be() -> None:
    graph = parse(propagated("y = mm(x, w) : f32[8, 4]", level="captured"))
    with pytest.raises(ValueError, match=r"cannot pin 'y' : f32\[8, 4\] to S\(2\) on axis dp: it has 2 dims"):
        graph.pin("y", "dp", S(2))
    with pytest.raises(ValueError, match="no axis is called 'tp'"):
        graph.pin("y", "tp", B)
    with pytest.raises(VerifyError, match="has no value named 'z'"):
        graph.pin("z", "dp", B)


def test_an_op_is_pinned_after_and_an_input_in_place() -> None:
    graph = parse(propagated("h = mm(x, w) : f32[8, 4]\n  y = relu(h) : f32[8, 4]", level="captured"))
    assert graph.pin("x", "dp", B).name == "x"
    pinned = graph.pin("h", "dp", P)
    assert (pinned.name, pinned.args[0]) == ("h_pin", graph.node("h"))
    assert graph.node("y").args == (pinned,)
    assert graph.pin(pinned, "dp", B) is pinned


def test_a_split_of_a_scalar_cannot_be_pinned() -> None:
    graph = parse("graph g(dp=2)\n  lr = hyper(optimizer0.group0, lr) : float\n  s = batch() : f32[]\n  return\n")
    with pytest.raises(ValueError, match="it is float, not a tensor"):
        graph.pin("lr", "dp", B)
    with pytest.raises(ValueError, match="cannot pin 's'"):
        graph.pin("s", "dp", S(0))
    assert graph.pin("s", "dp", B).name == "s"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("y = mul.Tensor(x, x, out=x)       : f32[8, 4]  P", "runs mul as S.0., S.0. -> P"),
        ("y = sum.dim_IntList(x, [0], out=z) : f32[4]     B", "runs sum.dim_IntList as S.0. -> B"),
        ("y = view(x, [8, 2/dp, 2])         : f32[8, 2, 2]  S(1)", "runs view as S.0. -> S.1."),
        ("y = embedding_from(t, i, start=8@dp, total=8) : f32[5, 4]  B", "runs embedding_from as S.0., B -> B"),
        (
            "y = adam([x, z], [x, z], [x, z], [x, z], [], [k, k], 0.1, 0.9, 0.99, 1e-8, 0.0) : (f32[8, 4]  S(0), "
            "f32[4]  B, f32[8, 4]  B, f32[4]  B, f32[8, 4]  S(0), f32[4]  B)",
            "runs adam as",
        ),
        ("y = full([8, 4], 1.0) : f32[8, 4]  S(0)", r"'y' is not what a rank calls .*That is full\(\[8/dp, 4\], 1.0\)"),
        ("y = full([8/dp, 4], 1.0) : f32[8, 4]  B", r"That is full\(\[8, 4\], 1.0\)"),
        ("y = embedding(t, i) : f32[5, 4]  P", r"That is embedding_from\(t, i, start=8@dp, total=8\)"),
        ("y = embedding_from(t, i, start=0, total=8) : f32[5, 4]  P", "start=8@dp"),
        (
            "y = uniform_like(x, j, 3, [0, 0], [8, 4]) : f32[8, 4]  S(0)",
            r"uniform_like\(x, j, 3, \[8@dp, 0\], \[8, 4\]\)",
        ),
    ],
)
def test_rules_hold_where_results_have_a_place_and_sizes_are_those_of_a_rank(line: str, problem: str) -> None:
    text = (
        "graph g(dp=2) local\n  x = state(a) : f32[8, 4]  S(0)\n  z = state(b) : f32[4]  B\n"
        "  t = param(w) : f32[8, 4]  S(0)\n"
        f"  i = batch() : i64[5]  B\n  j = batch() : i64[]  B\n"
        f"  k = state(c) : f32[]  B\nforward:\n  {line}\n  return\n"
    )
    with pytest.raises(VerifyError, match=f"(?s){problem}"):
        verify(parse(text))
