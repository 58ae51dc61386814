"""Exchanges through gloo: here the ranks are threads of one process, each with connections of its own."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import start
from torch import Tensor

from graphzero import _compat
from graphzero.errors import RankError
from graphzero.runtime.transport.gloo_transport import GlooTransport
from graphzero.runtime.transport.p2p_collectives import PeerCollectives
from graphzero.runtime.transport.process_monitor import WaitState, watch_connections
from graphzero.runtime.transport.transport import Transport

NOTHING = torch.empty(0)
GLOBAL = [4, 7, 2]  # numbers of the ranks in the world


def in_threads(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each rank's thread returns, or raises."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60.0)
    assert not any(one.is_alive() for one in threads)
    return results


def groups_of(ranks: int, limit: float = 20.0) -> list[Any]:
    """gloo's process group of each rank."""
    store = dist.HashStore()
    return in_threads(lambda rank: _compat.gloo(store, rank, ranks, limit), ranks)


def connected(ranks: int, limit: float = 20.0) -> list[GlooTransport]:
    groups, members = groups_of(ranks, limit), range(ranks)
    return [GlooTransport(groups[r], members, GLOBAL[:ranks], r, 0, limit, WaitState()) for r in members]


def numbers(start: int, size: int = 6) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.float32)


def swap(transport: GlooTransport, number: int, sent: Tensor, into: Tensor) -> Any:
    """Between two ranks."""
    (q,) = transport.others
    sends, receives = [NOTHING] * 2, [NOTHING] * 2
    sends[q], receives[q] = sent, into
    return transport.exchange(number, sends, receives)


@pytest.mark.parametrize("first", [0, 1])
def test_a_piece_arrives_whoever_begins_first(first: int) -> None:
    transports, into = connected(2), [torch.zeros(6), torch.zeros(6)]
    handles = [swap(transports[rank], 2, numbers(10 * rank), into[rank]) for rank in (first, 1 - first)]
    for handle in handles:
        handle.wait()
    assert into[0].equal(numbers(10)) and into[1].equal(numbers(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.int16, torch.float64])
def test_a_large_piece_of_any_dtype_arrives_whole(dtype: torch.dtype) -> None:
    transports, x = connected(2), (torch.arange(1_500_000) % 7 > 2).to(dtype)
    into = torch.zeros_like(x)
    parts = [(x, NOTHING), (NOTHING, into)]
    assert in_threads(lambda rank: swap(transports[rank], 2, *parts[rank]).wait(), 2) == [None, None]
    assert into.equal(x)


def test_axes_that_share_connections_do_not_cross() -> None:
    groups = groups_of(2)
    axes = [
        [GlooTransport(groups[r], (0, 1), GLOBAL[:2], r, axis, 20.0, WaitState()) for axis in (0, 1)] for r in (0, 1)
    ]
    into = [torch.zeros(6), torch.zeros(6)]
    sent = [swap(axes[0][axis], 2, numbers(10 * axis), NOTHING) for axis in (0, 1)]
    handles = [swap(axes[1][axis], 2, NOTHING, into[axis]) for axis in (1, 0)]
    for handle in (*handles, *sent):
        handle.wait()
    assert into[0].equal(numbers(0)) and into[1].equal(numbers(10))


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
SIZES = (0, 1, 5, int(Transport.one_round_bytes) // 4 + 3, (1 << 19) + 13)


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
    """Computed without any transport; sums run in the order of ranks."""
    if kind == "all_gather":
        return torch.cat(list(xs))
    if kind == "all_to_all":
        return torch.cat([x.chunk(len(xs))[rank] if x.numel() else x for x in xs])
    total = xs[0].clone()
    for x in xs[1:]:
        total = total + x
    return total if kind == "all_reduce" or not total.numel() else total.chunk(len(xs))[rank]


def run_program(transport: GlooTransport, rank: int, ranks: int, seed: int) -> list[Tensor]:
    """Begins all in order, awaits them where the program says, dawdles now and then."""
    collectives, draw = PeerCollectives(transport, rank), random.Random(seed * 7 + rank)
    steps, results, handles = program(seed), [], []
    for i, (kind, size, dtype, _) in enumerate(steps):
        x = given(kind, size, dtype, rank, ranks, i)
        out = x
        if kind != "all_reduce":
            count = {"all_gather": size * ranks, "reduce_scatter": size, "all_to_all": size * ranks}[kind]
            out = torch.empty(count, dtype=dtype)
        handles.append(collectives.begin(kind, out, x, "sum"))
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
    transports = connected(ranks)
    results = in_threads(lambda rank: run_program(transports[rank], rank, ranks, seed), ranks)
    for i, (kind, size, dtype, _) in enumerate(program(seed)):
        xs = [given(kind, size, dtype, rank, ranks, i) for rank in range(ranks)]
        for rank in range(ranks):
            assert isinstance(results[rank], list), results[rank]
            assert results[rank][i].equal(wanted(kind, xs, rank)), (i, kind, size, dtype, rank)


# ---- failures


def test_a_rank_that_closes_its_connections_is_an_error_for_who_needs_it() -> None:
    groups = groups_of(2)
    transport = GlooTransport(groups[0], (0, 1), GLOBAL[:2], 0, 0, 20.0, WaitState())
    threading.Timer(0.3, _compat.break_gloo, (groups[1],)).start()
    with pytest.raises(RankError, match="rank 4 waits for rank 7, which has closed its connection") as caught:
        swap(transport, 2, NOTHING, torch.zeros(6)).wait()
    assert list(caught.value.ranks) == [7] and not caught.value.is_silent


def test_a_wait_is_ended_from_another_thread() -> None:
    groups = groups_of(2)
    transport = GlooTransport(groups[0], (0, 1), GLOBAL[:2], 0, 0, 20.0, WaitState())
    threading.Timer(0.3, _compat.break_gloo, (groups[0],)).start()
    with pytest.raises(RankError, match="rank 4 waits for rank 7"):
        swap(transport, 2, NOTHING, torch.zeros(6)).wait()


def test_a_rank_that_sends_nothing_is_silent_after_the_timeout() -> None:
    transports = connected(2, limit=0.5)
    with pytest.raises(RankError, match="rank 4 waits for rank 7, which is silent") as caught:
        swap(transports[0], 2, NOTHING, torch.zeros(6)).wait()
    assert caught.value.is_silent


def _watch(rank: int, folder: str) -> None:
    """Greet the other ranks over the connections, and leave what has come from each."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)

    def gather(mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, mine)
        return everyone

    def connect() -> Any:
        with socket.create_server(("127.0.0.1", 0)) as stranger:  # other connections are made at the same time
            strangers.append(socket.create_connection(stranger.getsockname()))
            strangers.append(stranger.accept()[0])
        return _compat.gloo(_compat.job_store("watch"), rank, 3, 20.0)

    strangers: list[socket.socket] = []
    connections = watch_connections(connect, gather, [q for q in range(3) if q != rank])
    for one in connections.values():
        one.settimeout(20.0)
        one.sendall(bytes([rank]))
    greetings = {q: one.recv(1)[0] for q, one in connections.items()}
    if rank == 2:
        os._exit(0)
    ended = {q: one.recv(1) == b"" for q, one in connections.items() if q == 2}
    Path(folder, str(rank)).write_text(json.dumps([sorted(greetings.items()), sorted(ended.items())]))
    os._exit(0)


def test_watch_connections_lead_to_the_other_ranks_until_these_end(tmp_path: Path) -> None:
    start(_watch, (str(tmp_path),), 3)
    for rank, other in ((0, 1), (1, 0)):
        greetings, ended = json.loads((tmp_path / str(rank)).read_text())
        assert greetings == [[other, other], [2, 2]] and ended == [[2, True]]
