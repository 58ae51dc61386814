"""Ranks that share a GPU: NCCL lets them from 2.30 on, where the environment asks for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.sbp.placement import Placement

SETTINGS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
_SWITCH = next(iter(SETTINGS))
_SINCE = (2, 30)


def may_share_gpus() -> bool:
    """Return whether NCCL takes several ranks on one GPU."""
    return os.environ.get(_SWITCH, "0") != "0" and _compat.nccl_version() >= _SINCE


def sharing_hint() -> str:
    """Settings with which ranks share a GPU, and the NCCL that they need for it, as a sentence."""
    version, settings = _compat.nccl_version(), " ".join(f"{name}={text}" for name, text in SETTINGS.items())
    given = f"this is {'.'.join(map(str, version))}" if version else "this torch has none"
    return f"NCCL 2.30 and newer lets ranks share a GPU, slowly, with {settings} in the environment of all; {given}"


def check_shared_gpus(place: Placement, ranks: Sequence[int], gpus: Sequence[str]) -> None:
    """Raise PlacementError where ranks share a GPU and NCCL does not let them.  gpus: unique names, by rank."""
    sharing = next((some for name in gpus if len(some := _ranks_on(name, ranks, gpus)) > 1), None)
    if sharing is not None and not may_share_gpus():
        raise PlacementError(
            f"ranks {sharing} of {place!r} are on one GPU, and NCCL wants one for each\n  Call torch.cuda.set_device "
            "with another number on each rank of a machine (torchrun's LOCAL_RANK), or start fewer ranks. "
            f"{sharing_hint()}"
        )


def _ranks_on(name: str, ranks: Sequence[int], gpus: Sequence[str]) -> list[int]:
    return [rank for rank, other in zip(ranks, gpus, strict=True) if other == name]
