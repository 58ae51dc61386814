"""Few large collectives, early starts, late waits, writes in place: the order changes, values do not."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from toys import STAGES, history, lines, lower, on_ranks, options, random_step, run, step

from graphzero.errors import ConfigError, VerifyError
from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.ir.transfer import transfer_of
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Bucket, DeadCode, InPlace, Pipeline, Zero, default_passes
from graphzero.testing import assert_graph, assert_same_step

DEEP = step(("linear 8", "bias", "relu", "linear 8", "bias", "relu", "linear 8", "bias", "linear 4"))


def buckets(graph: StepGraph) -> list[tuple[str, int, int]]:
    """(kind, number of values, bytes of whole values) of each launched collective."""
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=ops.launch):
        moves = transfer_of(node)
        assert moves is not None
        found.append((moves.kind, len(moves.members), sum(m.meta["type"].nbytes for m in moves.members)))
    return found


@pytest.mark.parametrize("zero", STAGES)
def test_results_are_equal_to_the_bit_for_any_bucket_size(zero: Zero | None) -> None:
    results = [run(lower(DEEP, zero, Bucket(nbytes))) for nbytes in (1, 300, 1000, 2**22)]
    for other in results[1:]:
        for name, ranks in results[0].items():
            assert all(torch.equal(a, b) for a, b in zip(ranks, other[name], strict=True)), name


def test_stages_agree_to_the_bit_for_an_elementwise_optimizer() -> None:
    """Where pieces are whole vectors; a kernel may round the tail of an odd-sized piece differently."""
    text = step(("linear 32", "bias", "relu", "linear 32", "relu", "linear 64"), width=64)
    results = [run(lower(text, zero)) for zero in STAGES]
    for name in ("w0", "w1", "w2", "w3"):
        shape = results[0][name][0].shape
        wholes = [r[name][0] if r[name][0].shape == shape else torch.cat(r[name]) for r in results]
        assert all(torch.equal(wholes[0], other) for other in wholes[1:]), name


def test_a_bucket_holds_at_most_its_bytes_and_a_larger_value_alone() -> None:
    for nbytes in (1, 100, 300, 1000):
        for zero in STAGES:
            for _, members, size in buckets(lower(DEEP, zero, Bucket(nbytes))):
                assert size <= nbytes or members == 1


def test_larger_buckets_make_fewer_collectives() -> None:
    counts = [len(buckets(lower(DEEP, Zero(2), Bucket(nbytes)))) for nbytes in (1, 300, 2**22)]
    assert counts[0] > counts[1] > counts[2]


def test_a_bucket_has_a_size() -> None:
    with pytest.raises(ConfigError, match="positive number of bytes"):
        Bucket(0)


JOINED = """
graph g(dp=2) local
  a  = state(w, a)                 : f32[4]  S(0)
  b  = state(w, b)                 : f32[6]  S(0)
  d  = state(w, d)                 : f64[6]  S(0)
forward:
  ag = all_gather(a, 0, 'dp')      : f32[4]  B
  r  = relu(ag)                    : f32[4]  B
  bg = all_gather(b, 0, 'dp')      : f32[6]  B
  dg = all_gather(d, 0, 'dp')      : f64[6]  B
  return r, bg, dg
"""


def test_gathers_of_inputs_of_one_dtype_join_at_the_first() -> None:
    assert_graph(
        Pipeline([Bucket()])(parse(JOINED)),
        """
        graph g(dp=2) local
          a                   = state(w, a)                             : f32[4]            S(0)
          b                   = state(w, b)                             : f32[6]            S(0)
          d                   = state(w, d)                             : f64[6]            S(0)
        forward:
          bucket_all_gather   = bucket_all_gather([a, b], [0, 0], 'dp') : (f32[4]  B, f32[6]  B)
          ag                  = bucket_all_gather[0]                    : f32[4]            B
          bg                  = bucket_all_gather[1]                    : f32[6]            B
          r                   = relu(ag)                                : f32[4]            B
          bucket_all_gather_1 = bucket_all_gather([d], [0], 'dp')       : (f64[6]  B)
          dg                  = bucket_all_gather_1[0]                  : f64[6]            B
          return r, bg, dg
        """,
    )


CHAINED = """
graph g(dp=2)
  x = batch() : f32[8, 4]
forward:
  a = sum.dim_IntList(x, [0]) : f32[4]
  b = relu(a) : f32[4]
  c = mul(x, b) : f32[8, 4]
  d = sum.dim_IntList(c, [0]) : f32[4]
  q = exp(x) : f32[8, 4]
  h = sum.dim_IntList(q, [0]) : f32[4]
  e = relu(d) : f32[4]
  return e, h
"""


def test_collectives_that_depend_on_each_other_never_join() -> None:
    program = lower(CHAINED)
    assert buckets(program) == [("all_reduce", 1, 16), ("all_reduce", 2, 32)]
    assert_same_step(lower(on_ranks(CHAINED, 1)), program)


def test_partial_sums_and_maxima_never_join() -> None:
    text = (
        "graph g(dp=2)\n  x = batch() : f32[8, 4]\nforward:\n  a = amax(x, [0]) : f32[4]\n  b = amin(x, [0]) : f32[4]\n"
    )
    text += "  c = sum.dim_IntList(x, [0]) : f32[4]\n  return a, b, c\n"
    assert [members for _, members, _ in buckets(lower(text))] == [1, 1, 1]
    assert_same_step(lower(on_ranks(text, 1)), lower(text))


def test_split_maxima_in_reduce_scatters_never_join_sums() -> None:
    text = (
        "graph g(dp=2) local\n  a = state(w, a) : f32[4]  P\n  b = state(w, b) : f32[4]  P(max)\nupdate:\n"
        "  c = reduce_scatter(a, 0, 'dp') : f32[4]  S(0)\n  d = reduce_scatter(b, 0, 'dp') : f32[4]  S(0)\n  return\n"
    )
    after = Pipeline([Bucket()])(parse(text))
    assert len(lines(after, "= bucket_reduce_scatter(")) == 2


def test_phases_never_join() -> None:
    program = lower(step(("linear 4", "relu", "linear 4")), Zero(3))
    for node in program.nodes:
        if node.target is ops.launch and node.args[0] == "bucket_all_gather":
            readers = [u for wait in node.users for pick in wait.users for u in pick.users]
            assert {u.meta["phase"] for u in readers} == {node.meta["phase"]}


# ---- schedule


def positions(graph: StepGraph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


PROGRAMS = [(text, zero, nbytes) for text in (DEEP, random_step(3), random_step(5), random_step(8)) for zero in STAGES
            for nbytes in (1, 200)]  # fmt: skip


@pytest.mark.parametrize(("text", "zero", "nbytes"), PROGRAMS)
def test_what_is_launched_is_awaited_before_it_is_read_and_slots_are_apart(
    text: str, zero: Zero | None, nbytes: int
) -> None:
    program = lower(text, zero, Bucket(nbytes))
    at = positions(program)
    under_way: dict[object, fx.Node] = {}
    most = 0
    for node in program.nodes:
        if node.target is ops.launch:
            slot = node if node.args[1] is None else node.args[1]
            assert slot not in under_way
            under_way[slot] = node
            most = max(most, sum(n.args[0] == node.args[0] for n in under_way.values()))
            (wait,) = node.users
            assert wait.target is ops.wait
            assert all(at[pick] > at[wait] for pick in wait.users)
        elif node.target is ops.wait:
            del under_way[next(slot for slot, n in under_way.items() if n is node.args[0])]
    assert not under_way
    assert most <= 3


ALONE = """
graph alone(dp=4)
  x  = batch()      : f32[8, 16]
  w  = param()      : f32[{rows}, 16]
forward:
  wf = use(w)       : f32[{rows}, 16]
  wt = t(wf)        : f32[16, {rows}]
  y  = mm(x, wt)    : f32[8, {rows}]
backward:
  yt = t(y)         : f32[{rows}, 8]
  g  = mm(yt, x)    : f32[{rows}, 16]  ; gradient(w)
update:
  wu = use(w)       : f32[{rows}, 16]
  w1 = sub(wu, g)   : f32[{rows}, 16]
  return update(w=w1)
"""


@pytest.mark.parametrize("rows", [8, 99])
@pytest.mark.parametrize("zero", [None, Zero(1), Zero(2), Zero(3)])
def test_a_bucket_of_one_needs_a_slot_only_where_its_pieces_are_padded_to_send(rows: int, zero: Zero | None) -> None:
    graph = parse(ALONE.format(rows=rows))
    program = lower(graph, zero)
    slots = {str(n.args[0]): n.args[1] for n in program.nodes if n.target is ops.launch}
    uneven = {name for name, slot in slots.items() if slot is not None}
    assert uneven == ({"bucket_reduce_scatter"} if rows == 99 and zero is not None else set())
    assert_same_step(graph, program)


def test_a_reduction_without_a_slot_owns_its_operand() -> None:
    text = str(lower(ALONE.format(rows=8), Zero(2)))
    assert "launch('bucket_reduce_scatter', None, [g]" in text
    late = text.replace("update:\n", "update:\n  late = neg(g) : f32[8, 16]  P\n", 1)
    with pytest.raises(VerifyError, match="'late' reads 'g', in whose storage"):
        verify(parse(late))


def test_a_gradient_that_is_read_again_is_reduced_in_a_slot() -> None:
    text = (
        ALONE.format(rows=8)
        .replace("update:\n", "  g2 = mul(g, 2.0) : f32[8, 16]\nupdate:\n")
        .replace("return update", "return g2; update")
    )
    graph = parse(text)
    assert_same_step(graph, lower(graph, Zero(2)))


def test_the_next_gather_of_a_phase_is_under_way_while_one_is_used() -> None:
    program = lower(DEEP, Zero(3), Bucket(100))
    at = positions(program)
    gathers = [n for n in program.nodes if n.target is ops.launch and n.meta["phase"] == "forward"
               and n.args[0] == "bucket_all_gather"]  # fmt: skip
    waits = [next(iter(launch.users)) for launch in gathers]
    assert len(gathers) > 2
    for before, launch, after in zip(waits[:-1], gathers[1:], waits[1:], strict=True):
        first_reader = min(at[user] for pick in before.users for user in pick.users)
        assert at[before] < at[launch] < first_reader
        assert at[launch] < at[after]


@pytest.mark.parametrize(("text", "zero", "nbytes"), PROGRAMS[::3])
def test_a_state_is_written_once_after_its_last_reader(text: str, zero: Zero | None, nbytes: int) -> None:
    passes = default_passes(options(zero, Bucket(nbytes)))
    program = Pipeline(one for one in passes if not isinstance(one, InPlace))(parse(text))
    at, roots = positions(program), liveness(program).roots
    assigns = {node.args[0]: node for node in program.nodes if node.target is ops.assign}
    assert {node.name for node in assigns} == set(program.updates)  # type: ignore[union-attr]
    assert set(program.updates.values()) == set(assigns.values())
    for node in program.nodes:
        for operand in node.all_input_nodes:
            for root in roots[operand]:
                if root is not None and root[0] in assigns and node.op != "output":
                    assert at[node] <= at[assigns[root[0]]]


STATES = """
graph g(dp=2)
  w = param()      : f32[4, 4]
  a = state(w, a)  : f32[4, 4]
  b = state(w, b)  : f32[4, 4]
  c = state(w, c)  : f32[4, 4]
forward:
  f = use(w)       : f32[4, 4]
  v = t(f)         : f32[4, 4]
update:
  u = use(w)       : f32[4, 4]
  n = sub(u, a)    : f32[4, 4]
  s = t(a)         : f32[4, 4]
  {}
"""
ENDS = {
    "swapped states": "return n; update(a=b, b=a)",
    "states moved round": "return n; update(a=b, b=c, c=a)",
    "a state kept": "return n; update(a=a)",
    "a view of itself": "return n; update(a=s)",
    "one value in two states": "return n; update(a=n, b=n, w=n)",
    "the old parameter in a state": "return n; update(a=u, w=n)",
    "old values returned": "return f, w, a, v; update(w=n, a=s)",
    "one old value returned twice": "return f, f; update(w=n)",
    "nothing but updates": "return; update(w=n, b=a)",
    "nothing": "return",
}


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("end", ENDS)
def test_states_become_what_the_step_says_whatever_the_order_of_writes(end: str, zero: Zero | None) -> None:
    text = STATES.format(ENDS[end])
    program = lower(text, zero)
    assert str(parse(str(program))) == str(program)
    assert_same_step(lower(on_ranks(text, 1)), program, rtol=0, atol=0)
    # The one-rank program against the meaning of the text.
    w, a, b, c = (run(lower(on_ranks(STATES.format("return w, a, b, c"), 1)))[f"output {i}"][0] for i in range(4))
    named = {"w": w, "f": w, "u": w, "v": w.t(), "a": a, "b": b, "c": c, "s": a.t(), "n": w - a}
    found = run(lower(on_ranks(text, 1)))
    graph = parse(text)
    for i, out in enumerate(graph.outputs):
        assert torch.equal(found[f"output {i}"][0], named[out.name]), (end, out.name)
    for state, new in graph.updates.items():
        assert torch.equal(found[state][0], named[new.name]), (end, state)


# ---- dead code


def test_what_nobody_reads_is_dropped_and_inputs_stay() -> None:
    text = """
    graph g(dp=2) local
      x = batch() : f32[8, 4]  S(0)
      k = batch() : f32[8, 4]  S(0)
      m = state(w) : f32[4]  B
    forward:
      a = relu(x) : f32[8, 4]  S(0)
      b = exp(a)  : f32[8, 4]  S(0)
      c = neg(x)  : f32[8, 4]  S(0)
    update:
      n = mul(m, 2) : f32[4]  B
      w = assign(m, n) : f32[4]  B
      return c; update(m=w)
    """
    assert_graph(
        Pipeline([DeadCode()])(parse(text)),
        """
        graph g(dp=2) local
          x = batch()      : f32[8, 4]  S(0)
          k = batch()      : f32[8, 4]  S(0)
          m = state(w)     : f32[4]     B
        forward:
          c = neg(x)       : f32[8, 4]  S(0)
        update:
          n = mul(m, 2)    : f32[4]     B
          w = assign(m, n) : f32[4]     B
          return c; update(m=w)
        """,
    )


def test_collectives_whose_results_nobody_reads_are_dropped_with_their_waits() -> None:
    text = (
        "graph g(dp=2)\n  x = batch() : f32[8, 4]\nforward:\n  a = sum(x) : f32[]\n  b = relu(a) : f32[]\n  return x\n"
    )
    assert not buckets(lower(text))
    assert buckets(history(text)["slots"].after)
