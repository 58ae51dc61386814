"""Exchanges by reading each other's memory: here the ranks are in one process, which may read itself."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import start
from torch import Tensor

from graphzero.errors import ConfigError, GraphZeroError
from graphzero.runtime.transport import peer_memory, shared_memory, shared_memory_connect
from graphzero.runtime.transport.p2p_collectives import PeerCollectives
from graphzero.runtime.transport.shared_memory import SharedMemoryTransport
from graphzero.runtime.transport.shared_memory_connect import SWITCH

pytestmark = pytest.mark.skipif(bool(peer_memory.obstacle()), reason="this system has no process_vm_readv")

NOTHING = torch.empty(0)


def pair(limit: float = 10.0) -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    a, b = socket.socketpair()
    processes = [os.getpid()] * 2
    return SharedMemoryTransport([4, 7], 0, processes, {1: a}, limit), SharedMemoryTransport(
        [4, 7], 1, processes, {0: b}, limit
    )


def numbers(start: int, size: int = 6) -> Tensor:
    return torch.arange(start, start + size, dtype=torch.float32)


def test_a_piece_arrives_whoever_begins_first() -> None:
    links = pair()
    for first in (0, 1):
        received = [torch.zeros(6), torch.zeros(6)]
        handles = {}
        for rank in (first, 1 - first):
            sends = [numbers(10 * rank)] * 2
            into = [NOTHING, NOTHING]
            into[1 - rank] = received[rank]
            handles[rank] = links[rank].exchange(2 + first, sends, into)
        for rank in (first, 1 - first):
            links[rank]._poll_notes(0)  # the other one comes by
        for handle in handles.values():
            handle.wait()
        assert received[0].equal(numbers(10)) and received[1].equal(numbers(0))


def test_nobody_goes_on_before_what_it_sent_was_read() -> None:
    a, b = pair(limit=0.05)
    sent = a.exchange(1, [numbers(0), numbers(1)], [NOTHING, NOTHING])
    with pytest.raises(GraphZeroError, match="rank 4 has waited 0 s for rank 7, which is still there"):
        sent.wait()
    into = torch.zeros(6)
    b.exchange(1, [NOTHING, NOTHING], [into, NOTHING]).wait()
    sent.wait()
    assert into.equal(numbers(1))


def test_exchanges_may_be_awaited_in_another_order_than_they_began() -> None:
    links = pair()
    pairs = [PeerCollectives(link, rank) for rank, link in enumerate(links)]
    sums = [[numbers(rank + i, 40000) for i in range(3)] for rank in (0, 1)]
    wanted = [x + y for x, y in zip(*[[x.clone() for x in one] for one in sums], strict=True)]
    handles = [[pairs[rank].begin("all_reduce", x, x, "sum") for x in sums[rank]] for rank in (0, 1)]
    for _ in range(4):  # both come by in turns, as two processes do
        for link in links:
            link._poll_notes(0)
    for handle in (handles[0][2], handles[1][0], handles[1][2], handles[0][0], handles[1][1], handles[0][1]):
        handle.wait()
    assert all(x.equal(y) for one in sums for x, y in zip(one, wanted, strict=True))
    assert not any(link._exchanges or link._offers for link in links)


def test_a_large_piece_of_any_dtype_is_read_whole() -> None:
    a, b = pair()
    for number, dtype in enumerate((torch.bool, torch.bfloat16, torch.complex128, torch.int16)):
        x = (torch.arange(300_000) % 7 > 2).to(dtype)
        into = torch.zeros_like(x)
        sent = a.exchange(number, [x, x], [NOTHING, NOTHING])
        b.exchange(number, [NOTHING] * 2, [into, NOTHING]).wait()
        sent.wait()
        assert into.equal(x)


def test_notes_that_come_in_parts_are_put_together() -> None:
    a, b = socket.socketpair()
    link = SharedMemoryTransport([0, 1], 0, [os.getpid()] * 2, {1: a}, 10.0)
    x, into = numbers(3), torch.zeros(6)
    handle = link.exchange(8, [NOTHING] * 2, [NOTHING, into])
    note = shared_memory._NOTE.pack(8, x.data_ptr(), 24)
    b.send(note[:5])
    link._poll_notes(0)
    assert handle.to_read.keys() == {1}
    b.send(note[5:])
    handle.wait()
    assert into.equal(x)


def test_a_rank_that_has_ended_is_an_error_at_once_for_who_needs_it() -> None:
    a, b = pair(limit=600.0)
    b.close()
    handle = a.exchange(1, [numbers(0)] * 2, [NOTHING, torch.zeros(6)])
    with pytest.raises(GraphZeroError, match="rank 4 waits for rank 7, which has ended or stopped its call"):
        handle.wait()


def test_memory_that_is_not_there_is_an_error_that_says_how_to_do_without() -> None:
    a, b = socket.socketpair()
    link = SharedMemoryTransport([0, 1], 0, [os.getpid()] * 2, {1: a}, 10.0)
    handle = link.exchange(1, [NOTHING] * 2, [NOTHING, torch.zeros(6)])
    b.send(shared_memory._NOTE.pack(1, 8, 24))
    with pytest.raises(GraphZeroError, match="could not read the memory of rank 1: .*\n?.*GRAPHZERO_TRANSPORT=gloo"):
        handle.wait()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)])
def test_pieces_of_other_sizes_are_an_error_that_says_both(first: int, sizes: tuple[int, int]) -> None:
    links, (sent, expected) = pair(), sizes

    def begin(rank: int) -> None:
        if rank == 0:
            links[0].exchange(3, [numbers(0, sent)] * 2, [NOTHING, NOTHING])
        else:
            links[1].exchange(3, [NOTHING] * 2, [torch.zeros(expected), NOTHING])
            links[1]._poll_notes(0)

    with pytest.raises(GraphZeroError, match=f"rank 4 sends {4 * sent} bytes where rank 7 expects {4 * expected}"):
        for rank in (first, 1 - first):
            begin(rank)
        links[1].exchange(5, [NOTHING] * 2, [torch.zeros(1), NOTHING]).wait()


def test_many_exchanges_may_begin_before_the_other_rank_listens() -> None:
    a, b = pair()
    pieces = [numbers(i) for i in range(100)]
    sent = [a.exchange(i, [x, x], [NOTHING, NOTHING]) for i, x in enumerate(pieces)]
    into = [torch.zeros(6) for _ in pieces]
    for i, x in enumerate(into):
        b.exchange(i, [NOTHING] * 2, [x, NOTHING]).wait()
    for handle in sent:
        handle.wait()
    assert all(x.equal(y) for x, y in zip(into, pieces, strict=True))


def _connect(rank: int, folder: str, wishes: tuple[str, str], refused: bool) -> None:
    """Leave what connecting gives; refused: rank 1 may not read the memory of other processes."""
    os.environ[SWITCH] = wishes[rank]
    if refused and rank == 1:

        def refuse(process: int, address: int, into: Tensor) -> None:
            raise PermissionError(errno.EPERM, "ptrace is forbidden")

        peer_memory.read_memory = refuse
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def gather(mine: Any) -> list[Any]:
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, mine)
        return everyone

    try:
        transport = shared_memory_connect.connect_shared_memory(gather, [0, 1], 60.0)
        text = transport if isinstance(transport, str) else type(transport).__name__
    except ConfigError as error:
        text = f"ConfigError: {error}"
    Path(f"{folder}/{rank}").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wishes", "refused", "says"),
    [
        (("auto", "memory"), False, "SharedMemoryTransport"),
        (("auto", "gloo"), False, "rank 1: GRAPHZERO_TRANSPORT=gloo"),
        (("auto", "auto"), True, "rank 1: [Errno 1] ptrace is forbidden"),
        (
            ("auto", "memory"),
            True,
            "ConfigError: GRAPHZERO_TRANSPORT=memory, but ranks 0, 1 cannot read each other's memory: rank 1: "
            "[Errno 1] ptrace is forbidden. With GRAPHZERO_TRANSPORT=auto they send through gloo",
        ),
        (
            ("gloo", "memory"),
            False,
            "ConfigError: GRAPHZERO_TRANSPORT=memory, but ranks 0, 1 cannot read each other's memory: rank 0: "
            "GRAPHZERO_TRANSPORT=gloo. With GRAPHZERO_TRANSPORT=auto they send through gloo",
        ),
    ],
)
def test_one_rank_that_may_not_read_lets_all_send_or_is_an_error_on_all(
    tmp_path: Path, wishes: tuple[str, str], refused: bool, says: str
) -> None:
    start(_connect, (str(tmp_path), wishes, refused), 2)
    assert [(tmp_path / f"{rank}").read_text() for rank in (0, 1)] == [says, says]


def test_a_stranger_at_the_door_is_sent_away() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind("\0graphzero-test-" + os.urandom(8).hex())
        door.listen(4)
        probe = torch.tensor([0, 5])
        pid = os.getpid()
        name = door.getsockname()
        offers = [shared_memory_connect._Offer("auto", "", "here", name, pid, probe.data_ptr(), [0, 5])] * 2
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger, socket.socket(socket.AF_UNIX) as friend:
            stranger.connect(door.getsockname())
            stranger.sendall(shared_memory_connect._HELLO.pack(1, pid + 1))
            friend.connect(door.getsockname())
            friend.sendall(shared_memory_connect._HELLO.pack(1, pid))
            found = shared_memory_connect._connect(door, 0, offers)
            assert not isinstance(found, str) and list(found) == [1]
            assert stranger.recv(1) == b""
            found[1].close()
