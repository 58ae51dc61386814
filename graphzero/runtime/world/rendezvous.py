"""The store through which ranks find each other, under a name that only the processes of one start have.

torchrun keeps one store over its restarts.  A rank that is killed while gloo connects leaves its address there, and
ranks of the next start that read it before it is replaced try to reach a process that has ended: "connection refused",
which costs a restart, or a wait without end.  Each torchrun counts restarts for itself, so the count cannot be the
name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from graphzero.errors import PlacementError

_START = "graphzero/start"
_AGAIN = 0.01  # seconds between two looks


def is_kept_over_restarts() -> bool:
    """Return whether the store of this job outlives its processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_job() -> tuple[Store, int, int]:
    """The store of this start, this rank, and how many there are.  All ranks call it.

    Raises PlacementError for ranks that do not come within the timeout that torch's process groups have.
    """
    store, rank, size = next(rendezvous("env://"))
    return PrefixStore(agree_on_prefix(store, rank, size, default_pg_timeout.total_seconds()), store), rank, size


def agree_on_prefix(store: Store, rank: int, size: int, seconds: float) -> str:
    """A name that the processes which call it now have in common, whatever earlier ones have left in ``store``.

    Rank 0 makes one.  Each of the others tells rank 0, under that name, a number of its own, and takes the name only
    when rank 0 has answered with this number: who read an earlier start's name waits in vain, and reads it again.

    Raises PlacementError for ranks that do not come within so many seconds.
    """
    own = uuid.uuid4().hex
    return _welcome(store, own, size, seconds) if rank == 0 else _arrive(store, own, rank, seconds)


def _welcome(store: Store, name: str, size: int, seconds: float) -> str:
    until = time.monotonic() + seconds
    store.set(_START, name)
    for rank in range(1, size):
        came = _came(name, rank)
        try:
            store.wait([came], timedelta(seconds=max(until - time.monotonic(), _AGAIN)))
        except DistStoreError:
            missing = [one for one in range(rank, size) if not store.check([_came(name, one)])]
            raise _nobody(f"ranks {missing} of {size}", seconds) from None
        store.set(_seen(name, rank), store.get(came).decode())
    return name


def _arrive(store: Store, own: str, rank: int, seconds: float) -> str:
    announced, until = None, time.monotonic() + seconds
    while time.monotonic() < until:
        name = store.get(_START).decode() if store.check([_START]) else None
        if name is not None and name != announced:
            store.set(_came(name, rank), own)
            announced = name
        if name is not None and store.check([_seen(name, rank)]) and store.get(_seen(name, rank)).decode() == own:
            return name
        time.sleep(_AGAIN)
    raise _nobody("rank 0", seconds)


def _nobody(who: str, seconds: float) -> PlacementError:
    return PlacementError(
        f"{who} did not start within {seconds:g} s of this one: look at what they print, and "
        "whether they reach MASTER_ADDR"
    )


def _came(name: str, rank: int) -> str:
    return f"graphzero/{name}/{rank}"


def _seen(name: str, rank: int) -> str:
    return f"graphzero/{name}/{rank}/seen"
