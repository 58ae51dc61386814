"""Exchanges over connections: here the ranks are threads of one process, or even one thread."""

from __future__ import annotations

import gc
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphzero.errors import GraphZeroError, RankError
from graphzero.runtime.transport import wires
from graphzero.runtime.transport.p2p_collectives import SHORT, PeerCollectives
from graphzero.runtime.transport.reactor import Reactor
from graphzero.runtime.transport.wires import SEGMENT, Wires

NOTHING = torch.empty(0)
GLOBAL = [4, 7, 2]  # numbers of the ranks in the world


def connected(ranks: int, limit: float = 10.0, buffers: int = 0) -> list[Wires]:
    """Links of so many ranks; buffers: bytes that the kernel holds on a connection, by default what it likes."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for a in range(ranks):
        for b in range(a):
            sockets[a][b], sockets[b][a] = socket.socketpair()
            for one in (sockets[a][b], sockets[b][a]) if buffers else ():
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
    return [Wires(GLOBAL[:ranks], rank, sockets[rank], limit) for rank in range(ranks)]


def numbers(start: int, size: int = 6) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.float32)


def together(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each rank's thread returns, or raises."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60.0)
    assert not any(one.is_alive() for one in threads)
    return found


def swap(link: Wires, number: int, sent: Tensor, into: Tensor) -> Any:
    """Between two ranks."""
    (q,) = link.others
    sends, receives = [NOTHING] * 2, [NOTHING] * 2
    sends[q], receives[q] = sent, into
    return link.exchange(number, sends, receives)


@pytest.mark.parametrize("first", [0, 1])
def test_a_piece_arrives_whoever_begins_first(first: int) -> None:
    links, into = connected(2), [torch.zeros(6), torch.zeros(6)]
    handles = [swap(links[rank], 2, numbers(10 * rank), into[rank]) for rank in (first, 1 - first)]
    for handle in handles:
        handle.wait()
    assert into[0].equal(numbers(10)) and into[1].equal(numbers(0))
    assert not any(link.under_way for link in links)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.int16, torch.float64])
def test_a_large_piece_of_any_dtype_arrives_whole(dtype: torch.dtype) -> None:
    links, x = connected(2), (torch.arange(1_500_000) % 7 > 2).to(dtype)
    into = torch.zeros_like(x)
    parts = [(x, NOTHING), (NOTHING, into)]
    assert together(lambda rank: swap(links[rank], 2, *parts[rank]).wait(), 2) == [None, None]
    assert into.equal(x)


def test_what_the_kernel_does_not_take_at_once_is_sent_while_others_are_waited_for() -> None:
    links, x = connected(2, buffers=8192), numbers(0, 400_000)
    into = [torch.zeros_like(x) for _ in range(2)]
    handles = [swap(links[rank], 2, x + rank, into[rank]) for rank in range(2)]
    assert all(handle.unsent for handle in handles)
    assert together(lambda rank: handles[rank].wait(), 2) == [None, None]
    assert into[0].equal(x + 1) and into[1].equal(x)


def test_a_piece_of_what_has_not_begun_here_waits_and_those_behind_it() -> None:
    a, b = connected(2)
    early = [swap(a, number, numbers(number), NOTHING) for number in (2, 4)]
    into = [torch.zeros(6), torch.zeros(6)]
    b.reactor.turn(0)
    first = swap(b, 2, NOTHING, into[0])
    assert not first.to_read and not into[1].any()
    swap(b, 4, NOTHING, into[1]).wait()
    assert into[0].equal(numbers(2)) and into[1].equal(numbers(4))
    assert not any(handle.unsent for handle in early)


def test_a_header_that_comes_in_parts_is_put_together() -> None:
    mine, other = socket.socketpair()
    link, into = Wires([0, 1], 0, {1: mine}, 10.0), torch.zeros(6)
    handle = swap(link, 8, NOTHING, into)
    told = wires._HEADER.pack(8, 24) + numbers(3).numpy().tobytes()
    for part in (told[:5], told[5:20], told[20:]):
        assert handle.to_read == {1}
        other.sendall(part)
        link.reactor.turn(0)
    handle.wait()
    assert into.equal(numbers(3))


def test_a_turn_that_ends_behind_a_header_goes_on_with_the_piece() -> None:
    """Of two exchanges under way the first brings, with both headers, what one connection may bring in a turn."""
    size = (wires._TURN - wires._HEADER.size) // 4 - 2  # and some bytes, of which the second header takes the last
    links = connected(2)
    large, small = [(numbers(rank, size), numbers(rank)) for rank in range(2)], [torch.zeros(size), torch.zeros(size)]
    into = [torch.zeros(6), torch.zeros(6)]

    def work(rank: int) -> None:
        handles = [swap(links[rank], 2, large[rank][0], small[rank]), swap(links[rank], 4, large[rank][1], into[rank])]
        for handle in handles:
            handle.wait()

    assert together(work, 2) == [None, None]
    assert all(into[rank].equal(large[1 - rank][1]) and small[rank].equal(large[1 - rank][0]) for rank in range(2))


def test_a_connection_keeps_no_memory_of_what_has_travelled_on_it() -> None:
    links = connected(2)
    arrays = [np.zeros(100_000, dtype=np.float32) for _ in range(4)]
    parts = [tuple(map(torch.from_numpy, arrays[:2])), tuple(map(torch.from_numpy, arrays[2:]))]
    assert together(lambda rank: swap(links[rank], 2, *parts[rank]).wait(), 2) == [None, None]
    held = [weakref.ref(array) for array in arrays]
    parts.clear()
    arrays.clear()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
SIZES = (0, 1, 5, SHORT // 4 + 3, 2 * SEGMENT // 4 + 13)


def program(seed: int) -> list[tuple[str, int, torch.dtype, int]]:
    """Collectives with their numbers of elements, dtypes and the place where each is awaited."""
    draw = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    steps = [(draw.choice(COLLECTIVES), draw.choice(SIZES), draw.choice(dtypes)) for _ in range(12)]
    return [(*one, draw.randrange(i, len(steps))) for i, one in enumerate(steps)]


def given(kind: str, size: int, dtype: torch.dtype, rank: int, ranks: int, i: int) -> Tensor:
    count = size * (1 if kind == "all_gather" else ranks) - (kind == "all_reduce" and size > 1)
    made = torch.randn(count, generator=torch.Generator().manual_seed(100 * i + rank))
    return (made * 100).to(dtype)


def wanted(kind: str, xs: Sequence[Tensor], rank: int) -> Tensor:
    """Computed without any link; sums run in the order of ranks."""
    if kind == "all_gather":
        return torch.cat(list(xs))
    if kind == "all_to_all":
        return torch.cat([x.chunk(len(xs))[rank] if x.numel() else x for x in xs])
    total = xs[0].clone()
    for x in xs[1:]:
        total = total + x
    return total if kind == "all_reduce" or not total.numel() else total.chunk(len(xs))[rank]


def run_program(link: Wires, rank: int, ranks: int, seed: int) -> list[Tensor]:
    """Begins all in order, awaits them where the program says, dawdles now and then."""
    pairs, draw, steps, results = PeerCollectives(link, rank), random.Random(seed * 7 + rank), program(seed), []
    handles: list[Any] = []
    for i, (kind, size, dtype, _) in enumerate(steps):
        x = given(kind, size, dtype, rank, ranks, i)
        out = x
        if kind != "all_reduce":
            count = {"all_gather": size * ranks, "reduce_scatter": size, "all_to_all": size * ranks}[kind]
            out = torch.empty(count, dtype=dtype)
        handles.append(pairs.begin(kind, out, x, "sum"))
        results.append(out)
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.01)
        for j, (*_, end) in enumerate(steps[: i + 1]):
            if end == i:
                handles[j].wait()
    return results


@pytest.mark.parametrize("seed", range(24))
def test_any_program_of_collectives_gives_what_ranks_in_order_give(seed: int) -> None:
    ranks = 2 + seed % 2
    links = connected(ranks, buffers=(0, 16384)[seed // 2 % 2])
    found = together(lambda rank: run_program(links[rank], rank, ranks, seed), ranks)
    for i, (kind, size, dtype, _) in enumerate(program(seed)):
        xs = [given(kind, size, dtype, rank, ranks, i) for rank in range(ranks)]
        for rank in range(ranks):
            assert isinstance(found[rank], list), found[rank]
            assert found[rank][i].equal(wanted(kind, xs, rank)), (i, kind, size, dtype, rank)
    assert not any(link.under_way for link in links)


def test_who_waits_for_one_axis_serves_the_others() -> None:
    """Two links with one reactor: what leaves on the first is sent while the second is waited for."""
    (a, b), (c, d) = [socket.socketpair() for _ in range(2)]
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    shared, x, into = Reactor(), numbers(0, 200_000), torch.zeros(200_000)
    across, along = (Wires([0, 1], 0, {1: one}, 10.0, reactor=shared) for one in (a, c))
    sending = swap(across, 2, x, NOTHING)

    def other(rank: int) -> None:
        if rank:
            swap(Wires([0, 1], 1, {0: b}, 10.0), 2, NOTHING, into).wait()
            swap(Wires([0, 1], 1, {0: d}, 10.0), 2, numbers(1), NOTHING).wait()
        else:
            swap(along, 2, NOTHING, torch.zeros(6)).wait()

    assert together(other, 2) == [None, None]
    assert not sending.unsent and into.equal(x)


# ---- what goes wrong


def test_a_rank_that_has_ended_is_an_error_for_who_needs_it_and_what_it_sent_before_arrives() -> None:
    a, b = connected(2, limit=600.0)
    swap(b, 2, numbers(3), NOTHING)
    b.close()
    into = torch.zeros(6)
    swap(a, 2, NOTHING, into).wait()
    assert into.equal(numbers(3))
    with pytest.raises(RankError, match="rank 4 waits for rank 7, whose connection is closed") as caught:
        swap(a, 4, numbers(0), into).wait()
    assert list(caught.value.ranks) == [7] and not caught.value.is_silent


def test_nobody_spins_on_a_closed_connection_that_it_does_not_need() -> None:
    a, b, c = connected(3, limit=0.3)
    c.close()
    handle = a.exchange(2, [NOTHING] * 3, [NOTHING, torch.zeros(6), NOTHING])
    began = time.process_time()
    with pytest.raises(RankError, match="rank 4 has waited 0 s for rank 7, which is silent") as caught:
        handle.wait()
    assert caught.value.is_silent and time.process_time() - began < 0.2
    assert b is not None


def test_a_wait_is_given_up_from_another_thread() -> None:
    a, b = connected(2, limit=600.0)
    threading.Timer(0.2, a.give_up).start()
    with pytest.raises(RankError, match="connection is closed"):
        swap(a, 2, NOTHING, torch.zeros(6)).wait()
    assert b is not None


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("sent", "expected"), [(6, 4), (4, 6), (6, 0)])
def test_pieces_of_other_sizes_are_an_error_that_says_both(first: int, sent: int, expected: int) -> None:
    links = connected(2)

    def begin(rank: int) -> None:
        if rank == 0:
            swap(links[0], 2, numbers(0, sent), NOTHING)
        else:
            swap(links[1], 2, NOTHING, torch.zeros(expected))
            links[1].reactor.turn(0)

    with pytest.raises(GraphZeroError, match=f"rank 4 sends {4 * sent} bytes where rank 7 expects {4 * expected}"):
        for rank in (first, 1 - first):
            begin(rank)
        swap(links[1], 4, NOTHING, torch.zeros(1)).wait()
