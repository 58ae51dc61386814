"""The default placement of a Graph, and the default process group where the user has not made one.

Only what is made here is torn down, at interpreter exit.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphzero.errors import PlacementError
from graphzero.logs import event
from graphzero.runtime.transport.process_monitor import LONG_WAIT, check_own_process
from graphzero.runtime.transport.teardown import before_tear_down, tear_down_at_exit
from graphzero.runtime.world import rendezvous
from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.runtime.world.shared_gpus import check_shared_gpus, device_type_of
from graphzero.sbp import meshes
from graphzero.sbp.placement import Placement, as_placement, placement

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec", "SLURM_STEP_NUM_TASKS": "srun"}
_NOT_CONNECTED = ("Unable to find address for", "connectFullMesh failed")
_LOST = (dist.DistStoreError, dist.DistNetworkError)  # the store has no answer, or its host has ended
_failures: list[str] = []  # why this process could not connect


def has_launcher() -> bool:
    """Return whether the environment says how to reach the other processes, as torchrun's does."""
    return all(name in os.environ for name in _LAUNCHER)


def is_alone() -> bool:
    """Return whether this process has no process group, nor an environment that says how to make one.

    Warns where a launcher that sets other variables has started several.  Raises PlacementError where some of
    torchrun's variables are missing: ranks would train by themselves.
    """
    if has_world() or has_launcher():
        return False
    missing = [name for name in _LAUNCHER if name not in os.environ]
    unset = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise PlacementError(
            f"WORLD_SIZE={size}, but {unset}, by which ranks reach each other; start them with torchrun, which sets "
            "all four, or set the rest"
        )
    for name, launcher in _OTHER_LAUNCHERS.items():
        if os.environ.get(name, "1") != "1":
            warnings.warn(
                f"{launcher} counts {os.environ[name]} processes ({name}), but {unset}, so each trains by itself; "
                "where they are ranks of one job, start them with torchrun, or set these variables",
                stacklevel=2,
            )
    return True


def has_world() -> bool:
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """The number of this process among those of the job; 0 without a launcher and a process group."""
    return dist.get_rank() if has_world() else int(os.environ.get("RANK", "0"))


def has_fake_world() -> bool:
    """Return whether the process group is one of torch's fake ones: collectives give shapes, not values."""
    return has_world() and str(dist.get_backend()) == "fake"


def resolve(wanted: Placement | DeviceMesh | None) -> Placement:
    """The placement a Graph runs on, its process group made if need be.

    None is all ranks of the world.  One process without launcher and group is a world of one, which is a
    virtual placement of one rank: it needs no group and computes the same.
    Raises PlacementError where the ranks do not exist.
    """
    check_own_process()
    if wanted is None:
        if is_alone():
            return placement(_device_type(), range(1), virtual=True)
        ensure_world(None)
        size = dist.get_world_size()
        return placement("cpu" if has_fake_world() else device_type_of(size), range(size))
    return located(wanted)


def located(wanted: Placement | DeviceMesh) -> Placement:
    """``wanted``, its process group made if need be; one rank without launcher and group becomes a virtual one.

    Raises PlacementError where the ranks do not exist, or this process is not one of them.
    """
    place = as_placement(wanted)
    if place.virtual:
        return place
    check_own_process()
    if is_alone():
        if place.size == 1:
            return placement(place.device_type, place.ranks, place.names, virtual=True)
        raise PlacementError(
            f"{place!r} names {place.size} ranks, but this is one process without launcher; start it with `torchrun "
            f"--nproc-per-node={place.size} SCRIPT`, or run all ranks in this process: virtual=True"
        )
    ensure_world(place.device_type)
    size, rank = dist.get_world_size(), dist.get_rank()
    if int(place.ranks.max()) >= size:
        raise PlacementError(
            f"{place!r} names rank {int(place.ranks.max())}, but the world has ranks 0 to {size - 1}; start more "
            "processes or place on fewer ranks"
        )
    if rank not in place.ranks:
        raise PlacementError(f"rank {rank} is not in {place!r}; make Graphs and global tensors on its ranks only")
    return place


def ensure_world(device_type: str | None) -> None:
    """Initialise the default process group from torchrun's environment, unless it is initialised already.

    Raises PlacementError where ranks cannot connect, or share a GPU and may not, and where an earlier try of this
    process has failed.
    """
    if has_world():
        return
    if _failures:
        raise PlacementError(
            f"this process has no process group: its first try to connect with the other ranks failed: {_failures[0]}\n"
            "  Others may still wait for that attempt, so there is no second one: restart all processes"
        )
    kind = device_type or _device_type()
    accelerator = ACCELERATORS.get(kind)
    if accelerator is not None:
        if not accelerator.count:
            raise PlacementError(f"rank {own_rank()} is placed on GPUs, but torch {torch.__version__} finds none here")
        accelerator.take_own()
    backend = "gloo" if accelerator is None else f"cpu:gloo,{kind}:{accelerator.backend}"
    log_wait = threading.Timer(LONG_WAIT, _log_wait)
    log_wait.daemon = True
    log_wait.start()
    try:
        if rendezvous.is_kept_over_restarts():
            store, rank, size = rendezvous.join_job()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        else:
            dist.init_process_group(backend)
    except RuntimeError as error:
        _failures.append(_reason(error))
        if isinstance(error, _LOST) or any(text in str(error) for text in _NOT_CONNECTED):
            raise PlacementError(
                f"gloo cannot connect this rank, on host {socket.gethostname()}, with the others: {_failures[-1]}\n"
                f"  {_interfaces()}"
            ) from error
        raise
    finally:
        log_wait.cancel()
    tear_down_at_exit(dist.group.WORLD)
    if accelerator is not None and device_type is not None:
        gpus: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(gpus, accelerator.name_of(accelerator.module.current_device()))
        check_shared_gpus(kind, dict(enumerate(gpus)))


def _reason(error: RuntimeError) -> str:
    """The first line of an error of torch's, without the place in its sources."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:200]


def _interfaces() -> str:
    """The setting of gloo's interface, and those of this host."""
    wanted, names = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    return (
        "GLOO_SOCKET_IFNAME names the interface by which the hosts of the job reach each other; it is "
        f"{wanted or 'not set'}, and this host has {', '.join(names)}"
    )


def _log_wait() -> None:
    """Log that the process group of this rank is not there yet."""
    rank, size = own_rank(), os.environ.get("WORLD_SIZE", "all")
    text = (
        f"rank {rank} has waited {LONG_WAIT:.0f} s for {size} ranks to start and to connect, on host "
        f"{socket.gethostname()}. Look whether another rank has raised an error. {_interfaces()}"
    )
    event("waits", text, logging.WARNING, rank=rank)


before_tear_down(meshes.forget)


def _device_type() -> str:
    """Return "cuda" if this process sees a GPU, else "cpu"."""
    return next((kind for kind, its in ACCELERATORS.items() if its.is_available and its.count), "cpu")
