"""What all tests on a GPU share: they are marked ``cuda``, skip with a reason where there is none, and round as the
CPU does.  With a parameter ``device`` that is "cpu" a test only shows that its code runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.append(str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"needs a GPU; torch {torch.__version__} finds none")
    for item in items:
        callspec = getattr(item, "callspec", None)
        if HERE in item.path.parents and (callspec is None or callspec.params.get("device") != "cpu"):
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """float32 products in float32, not in TF32; without a GPU the flags may be frozen by another file of tests."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def nccl() -> Iterator[None]:
    """A process group of this process alone, which needs no network."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
