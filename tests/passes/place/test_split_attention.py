"""SplitAttention: where it exchanges pieces of a sequence for heads, and where it leaves attention as it is."""

from __future__ import annotations

from collections import Counter

import pytest

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.transfer import transfer_of
from graphzero.passes import InsertBoxing, LowerBoxing, Pipeline, Propagate, SplitAttention
from graphzero.testing import assert_graph, assert_same_step


def pinned(sbps: str) -> str:
    """``S(0) S(2)``, each of them pinned."""
    words = sbps.split()
    return f"{words[0]}!" if len(words) == 1 else f"({', '.join(f'{word}!' for word in words)})"


def attention(
    axes: str = "cp=2", q: str = "S(2)", k: str = "S(2)", heads: int = 4, causal: bool = True, keys: int = 6
) -> str:
    x, kv, rows = f"f64[1, {heads}, 6, 3]", f"f64[1, {heads}, {keys}, 3]", f"f64[1, {heads}, 6]"
    return f"""graph layer({axes}) captured
  q = batch() : {x}  {pinned(q)}
  k = batch() : {kv}  {pinned(k)}
  v = batch() : {kv}  {pinned(k)}
  g = batch() : {x}  {pinned(q)}
forward:
  pair = attention(q, k, v, None, {causal}, 0.5) : ({x}, {rows})
  y = pair[0] : {x}
  sums = pair[1] : {rows}
backward:
  grads = attention_backward(g, q, k, v, y, sums, None, {causal}, 0.5) : ({x}, {kv}, {kv})
  dq = grads[0] : {x}
  dk = grads[1] : {kv}
  dv = grads[2] : {kv}
  return y, dq, dk, dv
"""


def split(text: str, way: str = "auto") -> gz.StepGraph:
    return Pipeline([SplitAttention(way), Propagate()])(gz.parse(text))


def is_left(text: str) -> bool:
    graph = gz.parse(text)
    return str(SplitAttention()(graph.clone())) == str(graph)


def test_backward_reads_the_heads_that_forward_has_made_and_gives_pieces_of_the_sequence() -> None:
    assert_graph(
        Pipeline([SplitAttention()])(gz.parse(attention())),
        """
            graph layer(cp=2) captured
              q      = batch()                                                  : f64[1, 4, 6, 3]   S(2)!
              k      = batch()                                                  : f64[1, 4, 6, 3]   S(2)!
              v      = batch()                                                  : f64[1, 4, 6, 3]   S(2)!
              g      = batch()                                                  : f64[1, 4, 6, 3]   S(2)!
            forward:
              q_pin  = pin(q, -1)                                               : f64[1, 4, 6, 3]   S(1)!
              k_pin  = pin(k, -1)                                               : f64[1, 4, 6, 3]   S(1)!
              v_pin  = pin(v, -1)                                               : f64[1, 4, 6, 3]   S(1)!
              pair   = attention(q_pin, k_pin, v_pin, None, True, 0.5)          : (f64[1, 4, 6, 3], f64[1, 4, 6])
              y      = pair[0]                                                  : f64[1, 4, 6, 3]
              y_pin  = pin(y, -1)                                               : f64[1, 4, 6, 3]   S(2)!
              sums   = pair[1]                                                  : f64[1, 4, 6]
            backward:
              g_pin  = pin(g, -1)                                               : f64[1, 4, 6, 3]   S(1)!
              grads  = attention_backward(g_pin, q_pin, k_pin, v_pin, y, sums, None, True, 0.5) : (f64[1, 4, 6, 3], f64[1, 4, 6, 3], f64[1, 4, 6, 3])
              dq     = grads[0]                                                 : f64[1, 4, 6, 3]
              dq_pin = pin(dq, -1)                                              : f64[1, 4, 6, 3]   S(2)!
              dk     = grads[1]                                                 : f64[1, 4, 6, 3]
              dk_pin = pin(dk, -1)                                              : f64[1, 4, 6, 3]   S(2)!
              dv     = grads[2]                                                 : f64[1, 4, 6, 3]
              dv_pin = pin(dv, -1)                                              : f64[1, 4, 6, 3]   S(2)!
              return y_pin, dq_pin, dk_pin, dv_pin
            """,  # noqa: E501
    )


def sbps(graph: gz.StepGraph, name: str) -> str:
    return str(value.sbp_of(graph.node(name)))


LAYOUTS = [
    attention(),
    attention(heads=7, axes="cp=4"),
    attention(heads=2, axes="cp=3"),
    attention(causal=False),
    attention(q="B"),
    attention(axes="dp=2, cp=2", q="S(0) S(2)", k="S(0) S(2)"),
    attention(axes="cp=2, tp=2", q="S(2) S(1)", k="S(2) S(1)"),
    attention(axes="tp=2, cp=2", q="S(1) S(2)", k="S(1) S(2)"),
    attention(axes="cp=2, cq=2", q="S(2) S(2)", k="S(2) S(2)"),
    attention(axes="cp=3, cq=2", q="S(2) S(2)", k="S(2) S(2)"),
    attention(q="S(2,3)", k="S(2,3)"),
    attention(axes="cp=3, cq=2", q="S(2,2) S(2)", k="S(2,2) S(2)"),
    attention(axes="cp=3", keys=3),
    attention(axes="cp=3", keys=10),
]


@pytest.mark.parametrize("way", ["exchange", "gather", "gather exchange@cq", "exchange gather@cq"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_step_stays_the_same(text: str, way: str) -> None:
    assert_same_step(gz.parse(text), split(text, way))


@pytest.mark.parametrize("text", [attention(), attention(heads=2, axes="cp=3")])
def test_a_gather_leaves_queries_split(text: str) -> None:
    graph = split(text, "gather")
    assert [sbps(graph, name) for name in ("y", "dq", "dk_pin", "dv_pin")] == ["(S(2),)"] * 4
    assert [sbps(graph, name) for name in ("k_pin", "dk")] == ["(B,)", "(P,)"]


@pytest.mark.parametrize(("ranks", "keys", "way"), [(2, 6, "S(1)"), (2, 4, "S(2)"), (3, 4, "S(1)"), (3, 1, "S(2)")])
def test_the_way_of_fewest_bytes_is_taken_where_work_is_equal(ranks: int, keys: int, way: str) -> None:
    """An exchange sends 4 / n of queries and keys where a gather sends 4 of keys; of equal bytes it is the exchange."""
    graph = split(attention(f"cp={ranks}", causal=False, heads=6, keys=keys))
    assert sbps(graph, "y") == f"({way},)"


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        gz.ConfigError, match="SplitAttention\\(split_attention='helix'\\): the ways are auto, exchange"
    ):
        SplitAttention("helix")


@pytest.mark.parametrize(
    ("way", "counts"),
    [
        ("gather exchange@cq", {"all_to_all": 8, "all_gather": 2, "reduce_scatter": 2}),
        ("exchange", {"all_to_all": 16}),
        ("gather", {"all_gather": 4, "reduce_scatter": 4}),
    ],
)
def test_what_moves_along_two_axes_moves_once_along_each(way: str, counts: dict[str, int]) -> None:
    """Four values in forward and four in backward change places on an axis that exchanges, keys and values else."""
    passes = [SplitAttention(way), Propagate(), InsertBoxing(), LowerBoxing()]
    graph = Pipeline(passes)(gz.parse(attention(axes="cp=2, cq=3", q="S(2) S(2)", k="S(2) S(2)", heads=6)))
    moves = (transfer_of(node) for node in graph.nodes if value.phase_of(node) != "update")
    assert Counter(one.kind for one in moves if one is not None) == counts


def test_heads_that_an_inner_axis_has_split_are_cut_within_its_pieces() -> None:
    graph = split(attention(axes="cp=2, tp=2", q="S(2) S(1)", k="S(2) S(1)"))
    assert sbps(graph, "q_pin") == sbps(graph, "y") == "(S(1, 2), S(1))"
    graph = split(attention(axes="tp=2, cp=2", q="S(1) S(2)", k="S(1) S(2)"))
    assert sbps(graph, "q_pin") == sbps(graph, "y") == "(S(1), S(1))"


@pytest.mark.parametrize(
    "text",
    [
        attention(q="B", k="B"),
        attention(q="S(1)", k="S(1)"),
        attention(q="S(0)", k="S(0)"),
        attention(q="S(2)", k="B"),  # each rank has all that its queries read
        attention(axes="cp=4", heads=3),  # a rank would have no head, and no query
    ],
)
def test_attention_that_has_whole_keys_or_too_few_heads_is_left(text: str) -> None:
    assert is_left(text)
