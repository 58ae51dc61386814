"""How the ranks of one axis find out that they share a host, and connect to read each other's memory."""

from __future__ import annotations

import os
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphzero.runtime.transport import peer_memory
from graphzero.runtime.transport.shared_memory import SharedMemoryTransport

_HELLO = struct.Struct("<qq")  # (number along the axis, process)
_CREDENTIALS = struct.Struct("3i")  # process, user, group, as the kernel vouches for them
_CONNECT = 60.0  # seconds


Gather = Callable[[Any], list[Any]]


def meet(gather: Gather, ranks: Sequence[int], limit: float) -> SharedMemoryTransport | None:
    """Connect the ranks of one axis, if all are on one host and may read each other; every one of them calls it.

    gather: every one's object, in the axis' order.  ranks: global ranks in that order.  limit: seconds that one may
    wait for another.  None where any of them can't.
    """
    here = peer_memory.host()
    own, name = list(ranks).index(dist.get_rank()), f"\0graphzero-{uuid.uuid4().hex}"
    probe = torch.tensor([own, uuid.uuid4().int >> 66], dtype=torch.int64)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        if here is not None:
            peer_memory.allow_reading()
            door.bind(name)
            door.listen(len(ranks))
        offers = gather((here, name, os.getpid(), probe.data_ptr(), probe.tolist()))
        together = here is not None and all(offer[0] == here for offer in offers)
        found = _connect(door, own, offers) if together else None
    if not all(gather(found is not None)):
        for one in (found or {}).values():
            one.close()
        return None
    assert found is not None
    return SharedMemoryTransport(ranks, own, [offer[2] for offer in offers], found, limit)


def _connect(door: socket.socket, own: int, offers: Sequence[Any]) -> dict[int, socket.socket] | None:
    """A socket to every other rank, having read a probe of its memory; None where anything fails."""
    found: dict[int, socket.socket] = {}
    try:
        for q, (_, name, *_) in enumerate(offers[:own]):
            one = found[q] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.settimeout(_CONNECT)
            one.connect(name)
            one.sendall(_HELLO.pack(own, os.getpid()))
        door.settimeout(_CONNECT)
        while len(found) < len(offers) - 1:
            one, _ = door.accept()
            one.settimeout(_CONNECT)
            q, process = _HELLO.unpack(one.recv(_HELLO.size, socket.MSG_WAITALL))
            vouched, *_ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if not own < q < len(offers) or q in found or process != vouched or process != offers[q][2]:
                one.close()  # somebody else who found the door
                continue
            found[q] = one
        for q, (_, _, process, address, expected) in enumerate(offers):
            if q != own:
                probe = torch.zeros(2, dtype=torch.int64)
                peer_memory.read(process, address, probe)
                if probe.tolist() != expected:
                    raise OSError(f"process {process} reads otherwise than it says")
    except (OSError, struct.error):
        for one in found.values():
            one.close()
        return None
    return found
