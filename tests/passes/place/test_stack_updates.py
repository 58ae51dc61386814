"""Equal chains of an update that need whole values are computed in stacks; what differs, or stands alone, is not."""

from __future__ import annotations

import pytest
import torch
from toys import lines

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.passes import Options, Pipeline, StackUpdates, default_passes
from graphzero.testing import assert_same_step

CHAIN = """
  {0}n = sum.dim_IntList({0}, [0, 1])        : f32[]
  {0}d = div({0}, {0}n)                      : f32[6, 4]
  {0}t = t({0}d)                             : f32[4, 6]
  {0}p = mm({0}d, {0}t)                      : f32[6, 6]
  {0}q = addmm({0}d, {0}p, {0}d, beta={1})   : f32[6, 4]
"""
END = "  {0}w = add({0}v, {0}q, alpha=-0.1) : f32[6, 4]"


def program(chains: str, names: str = "abc", ranks: int = 2) -> StepGraph:
    """Gradients ``a``, ``b`` ... and parameters ``av``, ``bv`` ..., each in pieces, and an update."""
    head = [f"graph step(dp={ranks}) captured"]
    for name in names:
        head += [f"  {name} = batch({name}) : f32[6, 4]  S(0)!", f"  {name}v = param({name}) : f32[6, 4]  S(0)!"]
    return parse("\n".join([*head, "update:", chains, f"  return; update({', '.join(f'{n}v={n}w' for n in names)})"]))


def chains(names: str = "abc", chain: str = CHAIN, beta: str = "3.5") -> str:
    return "\n".join(chain.format(name, beta) + END.format(name) for name in names) + "\n"


def stacked(graph: StepGraph, **options: int) -> StepGraph:
    return Pipeline([StackUpdates(**options)])(graph)  # type: ignore[arg-type]


def stacks(graph: StepGraph) -> list[int]:
    """How many values each stack holds."""
    return [node.meta["type"].shape[0] for node in graph.nodes if node.target is torch.ops.aten.stack.default]


def lowered(graph: StepGraph, stack: bool = True) -> StepGraph:
    passes = default_passes(Options(), since="stack_updates" if stack else "expand")
    return Pipeline(passes)(graph)


def test_whole_matrices_are_exchanged_and_come_back_in_pieces() -> None:
    graph = lowered(program(chains()))
    assert [line.split(" : ")[0] for line in lines(graph, "all_to_all")] == [
        "stack_s = all_to_all(stack, 1, 0, 'dp')", "baddbmm_s = all_to_all(baddbmm, 0, 1, 'dp')",
    ]  # fmt: skip
    assert not lines(graph, "all_gather") and not lines(graph, "all_reduce")
    assert_same_step(lowered(program(chains()), stack=False), graph)


def test_what_all_chains_read_may_be_made_in_the_update_too() -> None:
    """Here it stands between the chains, after all that is stacked."""
    shared = "  s = sum.dim_IntList(av, [0, 1]) : f32[]\n  r = exp(s) : f32[]\n"
    turned = CHAIN.replace("{0}d = div({0}, {0}n)", "{0}d = div({0}, r)")
    graph = program(shared + chains(chain=turned))
    assert stacks(stacked(graph)) == [4]
    assert_same_step(lowered(graph, stack=False), lowered(graph))


def test_the_last_value_fills_up_a_stack_that_does_not_divide_by_the_ranks() -> None:
    graph = stacked(program(chains(), ranks=2))
    assert lines(graph, "stack(")[0].startswith("stack = stack([a, b, c, c], 0) : f32[4, 6, 4]")
    assert stacks(stacked(program(chains("ab"), "ab", ranks=4))) == [4]


def test_what_is_read_in_pieces_goes_in_where_it_has_fewest_bytes() -> None:
    """After a cast to 16 bit, and not as both values of which it is made."""
    chain = "  {0}m = mul({0}, {0}v) : f32[6, 4]\n  {0}h = _to_copy({0}m, dtype=torch.bfloat16) : bf16[6, 4]\n" + (
        "  {0}t = t({0}h) : bf16[4, 6]\n  {0}p = mm({0}h, {0}t) : bf16[6, 6]\n  {0}q = mm({0}p, {0}h) : bf16[6, 4]\n"
    )
    graph = program(chains(chain=chain))
    assert lines(stacked(graph), "stack(")[0].startswith("stack = stack([ah, bh, ch, ch], 0) : bf16[4, 6, 4]")
    assert_same_step(lowered(graph, stack=False), lowered(graph), rtol=1e-2)


def test_a_bucket_bounds_what_a_rank_gets_at_a_time_but_for_one() -> None:
    names = "abcde"
    matrix = 6 * 4 * 4
    for nbytes, wanted in ((1, [2, 2, 2]), (4 * matrix, [4, 2]), (2**20, [6])):
        graph = program(chains(names), names)
        assert stacks(stacked(graph, bucket_bytes=nbytes)) == wanted
        parts = Pipeline(default_passes(Options(bucket_bytes=nbytes), since="stack_updates"))(graph)
        assert_same_step(lowered(graph, stack=False), parts)


@pytest.mark.parametrize(
    "update",
    [
        chains("ab", beta="3.5") + chains("c", beta="3.0"),
        chains("ab") + "  cq = mul(c, 2) : f32[6, 4]\n" + END.format("c"),
    ],
)
def test_a_chain_that_does_something_else_stays_by_itself(update: str) -> None:
    graph = program(update)
    assert lines(stacked(graph), "stack(")[0].startswith("stack = stack([a, b], 0)")
    assert_same_step(lowered(graph, stack=False), lowered(graph))


def test_a_chain_alone_and_elementwise_updates_are_left_as_they_are() -> None:
    alone = program(chains("a"), "a")
    assert str(stacked(alone)) == str(alone)
    each = "  {0}n = sum.dim_IntList({0}, [0, 1]) : f32[]\n  {0}q = div({0}, {0}n) : f32[6, 4]\n"
    norms = program(chains(chain=each))
    assert str(stacked(norms)) == str(norms)


def test_what_no_rank_holds_in_pieces_is_left_as_it_is() -> None:
    whole = parse(str(program(chains())).replace("S(0)!", "B!"))
    assert str(stacked(whole)) == str(whole)


def test_a_chain_that_follows_from_another_is_not_stacked_with_it() -> None:
    update = chains("ab").replace("bd = div(b, bn)", "bd = div(aw, bn)")
    graph = program(update, "ab")
    assert not stacks(stacked(graph))


def test_an_op_that_no_stack_goes_through_leaves_its_chain_as_it_is() -> None:
    chain = CHAIN.replace("div({0}, {0}n)                      :", "gather({0}, 1, {0}i) :")
    chain = chain.replace("{0}n = sum.dim_IntList({0}, [0, 1])        : f32[]", "{0}i = argsort({0}) : i64[6, 4]")
    between = chain.replace("mm({0}d, {0}t)", "mm({0}, {0}u)").replace("argsort({0})", "argsort({0}r)")
    between = (
        "  {0}u = t({0}) : f32[4, 6]\n  {0}o = mm({0}, {0}u) : f32[6, 6]\n  {0}r = mm({0}o, {0}) : f32[6, 4]" + between
    )
    graph = program(chains(chain=between))
    assert not stacks(stacked(graph))
    before = program(chains(chain=chain))
    assert lines(stacked(before), "stack(")[0].startswith("stack = stack([ad, bd, cd, cd], 0)")
    assert_same_step(lowered(before, stack=False), lowered(before))


FORMS = """
  {0}t = t({0}) : f32[4, 6]
  {0}y = mm({0}, {0}t) : f32[6, 6]
  {0}z = mm({0}y, {0}) : f32[6, 4]
  {0}1 = mm({0}t, {0}z) : f32[4, 4]
  {0}2 = amax({0}1, [-1], True) : f32[4, 1]
  {0}3 = sub({0}1, {0}2) : f32[4, 4]
  {0}4 = _softmax({0}3, 1, False) : f32[4, 4]
  {0}5 = permute({0}4, [-1, 0]) : f32[4, 4]
  {0}6 = transpose.int({0}5, 0, 1) : f32[4, 4]
  {0}7 = view({0}6, [2, 8]) : f32[2, 8]
  {0}8 = select.int({0}7, 0, 1) : f32[8]
  {0}9 = expand({0}8, [3, 8]) : f32[3, 8]
  {0}10 = slice.Tensor({0}9, 1, 0, 4) : f32[3, 4]
  {0}11 = unsqueeze({0}10, -1) : f32[3, 4, 1]
  {0}12 = squeeze.dim({0}11, 2) : f32[3, 4]
  {0}13 = stack([{0}12, {0}12], 1) : f32[3, 2, 4]
  {0}14 = view({0}13, [6, 4]) : f32[6, 4]
  {0}15 = cat([{0}1, {0}14], 0) : f32[10, 4]
  {0}16 = flip({0}15, [0]) : f32[10, 4]
  {0}17 = slice.Tensor({0}16, 0, 2, 8) : f32[6, 4]
  {0}18 = diagonal({0}1) : f32[4]
  {0}19 = mul({0}17, {0}18) : f32[6, 4]
  {0}20 = triu({0}1) : f32[4, 4]
  {0}21 = cumsum({0}20, 0) : f32[4, 4]
  {0}22 = mean.dim({0}21, [0]) : f32[4]
  {0}23 = addmm({0}22, {0}19, {0}21) : f32[6, 4]
  {0}24 = linalg_vector_norm({0}23) : f32[]
  {0}25 = div({0}23, {0}24) : f32[6, 4]
  {0}26 = mm({0}25, {0}1) : f32[6, 4]
  {0}q = where.self({0}c, {0}26, {0}24) : f32[6, 4]
"""


def test_ops_of_every_form_compute_of_each_in_a_stack_what_they_compute_of_one() -> None:
    chain = FORMS.replace("  {0}q", "  {0}c = gt.Scalar({0}26, 0.0) : bool[6, 4]\n  {0}q")
    graph = program(chains(chain=chain))
    assert stacks(stacked(graph))[0] == 4
    assert_same_step(lowered(graph, stack=False), lowered(graph))
