"""How the ranks of one axis connect over TCP, and which addresses a host may be reached at.

Each opens a door and tells the others, through connections that they have already, at which addresses it may be, and
two words that nobody else knows: who knocks says the first, with its own number, and hears the second.  So neither a
stranger who finds the door, nor another program at a port of the same number, is taken for a rank.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.runtime.transport.shared_memory_connect import Gather

INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: the network interfaces to be reached at, as gloo reads it
_WORD = 16  # bytes
_HELLO = struct.Struct(f"<{_WORD}sq")  # the door's word, and the number along the axis of who knocks
_CONNECT = 60.0  # seconds for all
_TRY = 5.0  # seconds for one address, and for a stranger to say a word
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Door:
    """Where a rank lets others in.  word, reply: what is said there."""

    addresses: tuple[str, ...]
    port: int
    word: bytes
    reply: bytes


def dial(
    gather: Gather, ranks: Sequence[int], own: int, limit: float, others: Collection[int] | None = None
) -> dict[int, socket.socket]:
    """A connection with every other rank of an axis, by its number along it.  All ranks dial, or ``stand_by``.

    gather: every one's object, in the axis' order.  ranks: global ranks in that order; own: this one's number.
    limit: seconds that one may wait for another.  others: the numbers of those alone, who want this one too.  Raises
    GraphZeroError on all of the axis where any two can't connect.
    """
    wanted = set(range(len(ranks)) if others is None else others) - {own}
    with _open(len(ranks)) as listener:
        port = listener.getsockname()[1]
        doors = gather(Door(tuple(addresses()), port, secrets.token_bytes(_WORD), secrets.token_bytes(_WORD)))
        found, why = _connect(listener, own, wanted, ranks, doors, time.monotonic() + min(limit, _CONNECT))
    reasons = [*filter(None, gather(why))]
    if reasons:
        for one in found.values():
            one.close()
        raise GraphZeroError(
            f"{min(reasons)[1]}. Ranks connect at ports that the system chooses: let firewalls pass those between "
            f"hosts of the job, or name the network interface in {INTERFACE} on all of them"
        )
    return found


def stand_by(gather: Gather) -> None:
    """While others dial: what is gathered is gathered from all."""
    for _ in range(2):
        gather(None)


def _open(ranks: int) -> socket.socket:
    """A door at a port of the system's choice, on all of this host's addresses."""
    with suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=ranks, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=ranks)


def _connect(
    listener: socket.socket, own: int, wanted: set[int], ranks: Sequence[int], doors: Sequence[Door], end: float
) -> tuple[dict[int, socket.socket], tuple[int, str] | None]:
    """Knock at the doors of those before this one, and let in those behind it; or why that failed, the smallest first.

    Who knocks in vain knows more than who waits in vain.
    """
    found: dict[int, socket.socket] = {}
    for q in sorted(q for q in wanted if q < own):
        door, tried = doors[q], []
        for address in door.addresses:
            try:
                found[q] = _knock(address, door, own, end)
                break
            except OSError as error:
                tried.append(f"{address} ({error})")
        else:
            where = f"port {door.port} of {', '.join(tried)}"
            return found, (0, f"rank {ranks[own]} can't connect to rank {ranks[q]} at {where}")
    while wanted - set(found):
        try:
            one, q = _let_in(listener, doors[own], end)
        except OSError:
            missing = ", ".join(str(ranks[q]) for q in sorted(wanted - set(found)))
            return found, (1, f"nobody has connected to rank {ranks[own]} from rank {missing}")
        if q > own and q in wanted - set(found):
            found[q] = one
        else:
            one.close()
    return found, None


def _knock(address: str, door: Door, own: int, end: float) -> socket.socket:
    one = socket.create_connection((address, door.port), min(_TRY, _left(end)))
    try:
        one.sendall(_HELLO.pack(door.word, own))
        one.settimeout(_left(end))  # it may have others to knock at first
        if _read(one, _WORD) != door.reply:
            raise OSError("somebody else answers there")
    except OSError:
        one.close()
        raise
    return one


def _let_in(listener: socket.socket, door: Door, end: float) -> tuple[socket.socket, int]:
    """The next one who knows the word, and its number.  Raises OSError when the time is over."""
    while True:
        listener.settimeout(_left(end))
        one, _ = listener.accept()
        with suppress(OSError):
            one.settimeout(min(_TRY, _left(end)))
            word, q = _HELLO.unpack(_read(one, _HELLO.size))
            if secrets.compare_digest(word, door.word):
                one.sendall(door.reply)
                return one, q
        one.close()


def _read(one: socket.socket, nbytes: int) -> bytes:
    read = b""
    while len(read) < nbytes:
        part = one.recv(nbytes - len(read))
        if not part:
            raise OSError("the connection was closed")
        read += part
    return read


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time to connect is over")
    return left


def addresses() -> list[str]:
    """At which this host may be reached, the likeliest first."""
    named = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    found = [_address_of(name) for name in named]
    host = _compat.store_host()
    if host:
        found.append(_address_towards(host))
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    with suppress(OSError):
        found += [_address_of(name) for _, name in socket.if_nameindex()]
    return [*dict.fromkeys(filter(None, [*found, "127.0.0.1"]))]


def _address_towards(host: str) -> str:
    """Of this host, where it sends to ``host``; "" where nothing leads there."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.connect(address)  # sends nothing
            return str(one.getsockname()[0])
    return ""


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface; "" where it has none."""
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(one, _ADDRESS_OF, asked)[20:24])
    return ""
