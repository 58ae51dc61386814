"""How ranks connect over TCP: here each is a thread, and what they gather lies in a list."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.runtime.transport import dialing
from graphzero.runtime.transport.dialing import INTERFACE, Door

RANKS = [3, 5, 9]


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "store_host", lambda: "")


class Table:
    """Where threads lay what they gather."""

    def __init__(self, ranks: int):
        self.ranks, self.rounds = ranks, [[None] * ranks for _ in range(2)]
        self.barrier = threading.Barrier(ranks)

    def gather(self, own: int) -> Any:
        rounds: Iterator[list[Any]] = iter(self.rounds)

        def one(mine: Any) -> list[Any]:
            laid = next(rounds)
            laid[own] = mine
            self.barrier.wait(30.0)
            return laid

        return one


def dial(ranks: int, limit: float = 20.0) -> list[Any]:
    table, found = Table(ranks), [None] * ranks

    def run(own: int) -> None:
        try:
            found[own] = dialing.dial(table.gather(own), RANKS[:ranks], own, limit)  # type: ignore[call-overload]
        except GraphZeroError as error:
            found[own] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(own,)) for own in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60.0)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_two_ranks_are_connected(ranks: int) -> None:
    found = dial(ranks)
    for a in range(ranks):
        assert sorted(found[a]) == [q for q in range(ranks) if q != a]
        for b in range(a):
            found[a][b].sendall(bytes([a, b]))
            assert found[b][a].recv(2) == bytes([a, b])


def test_an_address_where_nobody_answers_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "addresses", lambda: ["203.0.113.1", "127.0.0.1"])
    monkeypatch.setattr(dialing, "_TRY", 0.3)
    assert sorted(dial(2)[1]) == [0]


def test_another_program_at_the_same_port_is_not_taken_for_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        door = Door(("127.0.0.1",), stranger.getsockname()[1], b"w" * 16, b"r" * 16)

        def answer() -> None:
            one, _ = stranger.accept()
            one.sendall(one.recv(64)[:16])  # says what it hears

        threading.Thread(target=answer).start()
        with pytest.raises(OSError, match="somebody else answers there"):
            dialing._knock("127.0.0.1", door, 1, time.monotonic() + 5.0)


def test_a_stranger_at_the_door_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_TRY", 0.3)
    with dialing._open(2) as listener:
        port = listener.getsockname()[1]
        door, end = Door(("127.0.0.1",), port, b"w" * 16, b"r" * 16), time.monotonic() + 10.0
        quiet, wrong = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        wrong.sendall(dialing._HELLO.pack(b"x" * 16, 1))
        threading.Thread(target=lambda: dialing._knock("127.0.0.1", door, 1, end)).start()
        found, why = dialing._connect(listener, 0, {1}, RANKS[:2], [door, door], end)
        assert list(found) == [1] and not why
        assert wrong.recv(1) == quiet.recv(1) == b""


def test_ranks_that_cannot_connect_all_say_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "addresses", lambda: ["203.0.113.1"])
    monkeypatch.setattr(dialing, "_TRY", 0.2)
    for error in dial(2, limit=1.0):
        assert isinstance(error, GraphZeroError)
        assert "rank 5 can't connect to rank 3 at port" in str(error) and "of 203.0.113.1 (" in str(error)
        assert INTERFACE in str(error) and "firewalls" in str(error)


def test_addresses_begin_with_the_named_interface_and_the_way_to_the_jobs_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    assert dialing.addresses()[0] == "127.0.0.1"
    monkeypatch.delenv(INTERFACE)
    monkeypatch.setattr(_compat, "store_host", lambda: "127.0.0.5")
    assert dialing.addresses()[0] == "127.0.0.1"
    monkeypatch.setattr(_compat, "store_host", lambda: "no such host, surely")
    found = dialing.addresses()
    assert found and len(found) == len(set(found)) and "127.0.0.1" in found
    assert dialing._address_of("no such interface") == dialing._address_towards("no such host, surely") == ""
