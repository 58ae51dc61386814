"""Connects the ranks of one axis to read each other's memory, or reports why they cannot."""

from __future__ import annotations

import os
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphzero.errors import ConfigError
from graphzero.runtime.transport import peer_memory
from graphzero.runtime.transport.shared_memory import SharedMemoryTransport

SWITCH = "GRAPHZERO_TRANSPORT"  # environment variable: how ranks on CPUs exchange tensors
AUTO, MEMORY, GLOO = "auto", "memory", "gloo"
_HELLO = struct.Struct("<qq")  # (number along the axis, process)
_CREDENTIALS = struct.Struct("3i")  # process, user, group, as the kernel vouches for them
_CONNECT = 60.0  # seconds

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class _Offer:
    """The process and addresses by which one rank can be read.

    wish: of ``SWITCH``.  obstacle: why it cannot take part, or "".  host: of ``peer_memory.namespace``.
    name: of the Unix socket where it listens.  address, values: of a tensor that others read as a test.
    """

    wish: str
    obstacle: str
    host: str | None
    name: str
    process: int
    address: int
    values: list[int]


def requested_transport() -> str:
    """The transport that the environment asks for.  Raises ConfigError for another word than auto, memory or gloo."""
    word = os.environ.get(SWITCH, AUTO)
    if word not in (AUTO, MEMORY, GLOO):
        raise ConfigError(
            f"the environment has {SWITCH}={word!r}; it must be {AUTO} (ranks of one host read each other's memory, "
            f"others send through gloo), {MEMORY} (all must read each other's memory) or {GLOO} (all send through gloo)"
        )
    return word


def connect_shared_memory(gather: Gather, ranks: Sequence[int], limit: float) -> SharedMemoryTransport | str:
    """Connect the ranks of one axis, or return why they cannot read each other's memory.  All of them call it.

    gather: every rank's object, in the axis's order.  ranks: global ranks in that order.  limit: seconds that one may
    wait for another.  Raises ConfigError on all of them where one of them requires it and they cannot.
    """
    wish, own = requested_transport(), list(ranks).index(dist.get_rank())
    obstacle = f"{SWITCH}={GLOO}" if wish == GLOO else peer_memory.obstacle()
    name = f"\0graphzero-{uuid.uuid4().hex}"
    probe = torch.tensor([own, uuid.uuid4().int >> 66], dtype=torch.int64)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        if not obstacle:
            peer_memory.allow_reading()
            listener.bind(name)
            listener.listen(len(ranks))
        place = peer_memory.namespace(), name, os.getpid(), probe.data_ptr(), probe.tolist()
        offers: list[_Offer] = gather(_Offer(wish, obstacle, *place))
        reason = _first_reason(ranks, [offer.obstacle for offer in offers])
        if not reason and len({offer.host for offer in offers}) > 1:
            reason = "they are on different hosts or in different containers"
        sockets = _connect(listener, own, offers) if not reason else {}
    if not reason:
        reason = _first_reason(ranks, gather(sockets if isinstance(sockets, str) else ""))
    if not reason and not isinstance(sockets, str):
        return SharedMemoryTransport(ranks, own, [offer.process for offer in offers], sockets, limit)
    for one in sockets.values() if not isinstance(sockets, str) else ():
        one.close()
    if any(offer.wish == MEMORY for offer in offers):
        raise ConfigError(
            f"{SWITCH}={MEMORY}, but ranks {', '.join(map(str, ranks))} cannot read each other's memory: {reason}. "
            f"With {SWITCH}={AUTO} they send through gloo"
        )
    return reason


def _first_reason(ranks: Sequence[int], reasons: Sequence[str]) -> str:
    return next((f"rank {rank}: {text}" for rank, text in zip(ranks, reasons, strict=True) if text), "")


def _connect(listener: socket.socket, own: int, offers: Sequence[_Offer]) -> dict[int, socket.socket] | str:
    """Connect to every other rank and read a probe of its memory; where anything fails, return why."""
    sockets: dict[int, socket.socket] = {}
    try:
        for q, offer in enumerate(offers[:own]):
            one = sockets[q] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.settimeout(_CONNECT)
            one.connect(offer.name)
            one.sendall(_HELLO.pack(own, os.getpid()))
        listener.settimeout(_CONNECT)
        while len(sockets) < len(offers) - 1:
            one, _ = listener.accept()
            one.settimeout(_CONNECT)
            q, process = _HELLO.unpack(one.recv(_HELLO.size, socket.MSG_WAITALL))
            vouched, *_ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if not own < q < len(offers) or q in sockets or process != vouched or process != offers[q].process:
                one.close()  # another process that has found the name
                continue
            sockets[q] = one
        for q, offer in enumerate(offers):
            if q != own:
                _read_probe(offer)
    except (OSError, struct.error) as error:
        for one in sockets.values():
            one.close()
        return str(error) or type(error).__name__
    return sockets


def _read_probe(offer: _Offer) -> None:
    probe = torch.zeros(2, dtype=torch.int64)
    peer_memory.read_memory(offer.process, offer.address, probe)
    if probe.tolist() != offer.values:
        raise OSError(f"process {offer.process} has other values in its memory than it says")
