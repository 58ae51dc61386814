"""Process groups and stores."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

# As these collectives are called from torch 2.13 on, and before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that collectives of a group may take, those of CPU tensors if it has any."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            timeout: timedelta | None = getattr(options, "_timeout", None)
            if timeout is not None:
                return timeout.total_seconds()
    return default_pg_timeout.total_seconds()


def forget_default_group() -> None:
    """Take the default process group out of the default arguments of ``torch.distributed.nn.functional``.

    Dynamo imports that module while a step is traced, and its functions keep the group that is the default one then:
    it would outlive ``destroy_process_group``.  None stands for the default group of each call.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in [] if module is None else list(vars(module).values()):
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(default, dist.ProcessGroup) for default in defaults):
            function.__defaults__ = tuple(None if isinstance(one, dist.ProcessGroup) else one for one in defaults)


def forget_groups(mesh: DeviceMesh) -> None:
    """Take the process groups out of a mesh of a world that has ended; before torch 2.13 it only has their names."""
    getattr(mesh, "_pg_registry", {}).clear()


def job_store(prefix: str) -> Any:
    """The store through which the default process group was made; keys begin with ``prefix``."""
    return prefixed(prefix, dist.distributed_c10d._get_default_store())


def prefixed(prefix: str, store: Any) -> Any:
    """The same store; keys also begin with ``prefix``."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


def own_connection(store: Any) -> Any:
    """A connection of its own to the same store, for another thread: waits of one thread would block others on a shared
    one."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # stores of users need not have it
        return store


def gloo(store: Any, rank: int, ranks: int, seconds: float) -> Any:
    """A gloo connection of some processes that torch.distributed does not list; each of them makes it.

    seconds: how long one of its collectives, and making it, may take.
    """
    return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))


def nccl(store: Any, rank: int, ranks: int, seconds: float) -> Any:
    """The same of NCCL, whose communicator is made when it is first used."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


def nccl_version() -> tuple[int, ...]:
    """Version of the NCCL that this process has loaded, of which there may be a newer one than torch was built with
    (``LD_PRELOAD``); () without one."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is a part of torch's own libraries, or there is none
        return tuple(torch.cuda.nccl.version()[:3]) if dist.is_nccl_available() else ()
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def break_gloo(group: Any) -> None:
    """Close all connections of ``gloo``: who waits for this process, now or later, gets a RuntimeError.

    gloo does that when a receive that nothing has a send for runs out of time.
    """
    for other in range(group.size()):
        if other != group.rank():
            try:
                receive = group.recv([torch.empty(1)], other, _NO_TAG)
            except RuntimeError:  # that connection is closed already
                continue
            with suppress(RuntimeError):
                receive.wait(timedelta(milliseconds=1))
            return


def lost_by_gloo(group: Any) -> list[int]:
    """Processes whose connections gloo has closed, by their numbers in the group."""
    lost = []
    for other in range(group.size()):
        if other != group.rank():
            try:
                group.send([torch.empty(1)], other, _NO_TAG)  # is only announced, and never taken
            except RuntimeError:
                lost.append(other)
    return lost


def mesh_of_other_ranks(device_type: str, ranks: Any, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of ranks of which this one is none: it has no process groups, and a DTensor on it no values here."""
    return DeviceMesh(device_type, torch.tensor(ranks.tolist()), mesh_dim_names=names, _init_backend=False)


_NO_TAG = 2**31 - 1  # of messages that nobody waits for


def fake_store() -> Any:
    """The store of a process group that exists in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def dump_nccl_trace() -> bytes | None:
    """Return the entries of NCCL's flight recorder, pickled; None where torch has no NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump())
