"""Ranks that share a GPU: NCCL lets them from 2.30 on, where the environment asks for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.logs import event
from graphzero.runtime.transport.communicator import communicator
from graphzero.runtime.transport.failure_diagnosis import rank_list
from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.sbp.placement import Placement

SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
_SWITCH = next(iter(SETTINGS))
_SINCE = (2, 30)


def may_share_gpus() -> bool:
    """Return whether NCCL takes several ranks on one GPU."""
    return os.environ.get(_SWITCH, "") not in ("", "0") and _compat.nccl_version() >= _SINCE


def device_type_of(ranks: int) -> str:
    """Return "cuda" if every rank of the job has a GPU of its own, or may share one, else "cpu"; all ranks call it.

    A rank whose process sees fewer GPUs than its machine has ranks may see its own alone, as launchers of clusters set
    it, or one that others use too: the names of GPUs decide.
    """
    if not any(accelerator.is_built for accelerator in ACCELERATORS.values()):
        return "cpu"
    connections = communicator(range(ranks))
    if connections.device_type is None:
        gpus = connections.all_gather(_own_gpu(ranks), "all ranks to say which GPU they use")
        kinds, names = {kind for kind, _ in gpus}, [name for _, name in gpus]
        is_own = len({*names}) == ranks or may_share_gpus()
        connections.device_type = kinds.pop() if len(kinds) == 1 and is_own else "cpu"
        if connections.device_type == "cpu" and any(names) and connections.rank == 0:
            text = (
                f"{ranks} ranks run on the CPU: not every rank has its own GPU ({sum(map(bool, names))} ranks see "
                f"one, {len({*names} - {''})} of them another than the ranks before). Start as many processes as there "
                'are GPUs, or choose: gz.placement("cpu", ranks) is without this warning'
            )
            event("device", text, logging.WARNING, ranks=ranks)
    return connections.device_type


def _own_gpu(ranks: int) -> tuple[str, str]:
    """The type of this rank's device, and its name where it is a GPU."""
    for kind, accelerator in ACCELERATORS.items():
        if accelerator.is_available and accelerator.count:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            if accelerator.count >= here:  # whoever made the process group may not have chosen one of them yet
                return kind, f"one of {accelerator.count}, for rank {dist.get_rank()}"
            return kind, accelerator.name_of(accelerator.module.current_device())
    return "cpu", ""


def check_own_gpus(place: Placement, device: torch.device, backends: Iterable[str]) -> None:
    """``check_shared_gpus`` of the ranks of a placement, all of which call it before they send through ``backends``."""
    accelerator, connections = ACCELERATORS.get(device.type), communicator(place.ranks.ravel().tolist())
    if accelerator is None or connections.has_own_gpus or all(backend == "gloo" for backend in backends):
        return
    gpus = connections.all_gather(accelerator.name_of(device), "all ranks to say which GPU they use")
    check_shared_gpus(device.type, dict(zip(connections.ids, gpus, strict=True)))
    connections.has_own_gpus = True


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves ``device`` in ``group``."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def check_shared_gpus(device_type: str, gpus: Mapping[int, str]) -> None:
    """Raise PlacementError where ranks share a GPU and NCCL does not let them.  gpus: rank -> a unique name."""
    by_gpu: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        by_gpu.setdefault(gpu, []).append(rank)
    sharing = next((ranks for ranks in by_gpu.values() if len(ranks) > 1), None)
    if sharing is None or may_share_gpus():
        return
    version, settings = _compat.nccl_version(), " ".join(f"{name}={text}" for name, text in SETTINGS.items())
    given = f"this is {'.'.join(map(str, version))}" if version else "this torch has none"
    raise PlacementError(
        f"{rank_list(sharing)} are on one GPU, and NCCL needs one for each\n  Start fewer processes per machine; or, "
        "with your own process group, call torch.cuda.set_device with another number in each; or run all ranks on "
        f'one GPU in one process: gz.placement("{device_type}", ranks, virtual=True). NCCL 2.30 and newer lets ranks '
        f"share a GPU, slowly, with {settings} in the environment of all; {given}"
    )
