"""The table of collectives: whoever has a part in one has a part in each, and costs and lines are of one whole."""

from __future__ import annotations

import pytest

from graphzero.ir import ops
from graphzero.runtime.execute.packing import Exchange
from graphzero.runtime.transport.p2p_collectives import PeerCollectives
from graphzero.runtime.world import process, virtual
from graphzero.sbp.collectives import COLLECTIVES

KINDS = sorted(COLLECTIVES)


def test_every_world_and_the_ir_know_every_collective_and_no_other() -> None:
    known = set(COLLECTIVES)
    assert {op.__name__ for op in ops.COLLECTIVES} == known
    assert set(virtual.COLLECTIVE_FUNCTIONS) == known and set(process.COLLECTIVE_FUNCTIONS) == known
    buckets = {f"bucket_{kind}" for kind, one in COLLECTIVES.items() if one.joins}
    assert {op.__name__ for op in ops.BUCKETS} == buckets


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_packed_and_paired(kind: str) -> None:
    assert callable(getattr(Exchange, f"_{kind}")) and callable(getattr(PeerCollectives, f"_{kind}"))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_a_dim_for_each_split_end_the_axis_and_what_reduces(kind: str) -> None:
    one = COLLECTIVES[kind]
    assert one.arguments.count("dim") == [one.src, one.dst].count("S") and one.arguments.count("axis") == 1
    assert set(one.arguments) <= {"dim", "axis", "reduction"} and (one.reduces or "reduction" not in one.arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_rank_sends_no_more_than_what_others_need_of_its_lines(kind: str, n: int) -> None:
    """In lines: bytes on the wire are those of the ring, of which a rank sends all of its lines but its own."""
    one = COLLECTIVES[kind]
    first, after = one.sent(n - 1, n)
    sent, received = after - first, one.received(n)[1] - one.received(n)[0]
    wire = one.wire(n) * one.whole(n)
    if kind == "shift":  # each rank sends one line to one other
        assert (wire, sent, received, one.messages(n)) == (1, 1, 1, 1)
        return
    if one.is_in_place:
        assert wire == pytest.approx(2 * (n - 1) / n) and sent == received == 1
    else:
        assert wire == pytest.approx(n - 1) and sent * received in (n, n * n)
    assert one.messages(n) >= n - 1
