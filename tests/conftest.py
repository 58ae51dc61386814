"""What all tests share.  Its being here also puts ``tests/`` on the path, for ``toys``."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Each test draws the same random numbers, alone or among others."""
    torch.manual_seed(0)
