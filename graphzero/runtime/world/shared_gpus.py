"""Ranks that share a GPU: NCCL lets them from 2.30 on, where the environment asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.runtime.transport.failure_diagnosis import rank_list

SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
_SWITCH = next(iter(SETTINGS))
_SINCE = (2, 30)


def may_share_gpus() -> bool:
    """Return whether NCCL takes several ranks on one GPU."""
    return os.environ.get(_SWITCH, "") not in ("", "0") and _compat.nccl_version() >= _SINCE


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
