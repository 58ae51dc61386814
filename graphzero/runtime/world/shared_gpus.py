"""Ranks that share a GPU: NCCL lets them from 2.30 on, where the environment asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from graphzero import _compat
from graphzero.errors import PlacementError
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
        f"{rank_list(sharing)} are on one GPU, and NCCL wants one for each\n  Start fewer processes per machine; or, "
        "with a process group of your own, call torch.cuda.set_device with another number in each; or run all ranks on "
        f'one GPU in one process: gz.placement("{device_type}", ranks, virtual=True). NCCL 2.30 and newer lets ranks '
        f"share a GPU, slowly, with {settings} in the environment of all; {given}"
    )
