"""The library that holds graphzero's ops: ``torch.ops.graphzero``."""

from __future__ import annotations

from typing import Any

import torch

LIBRARY: Any = torch.library.Library("graphzero", "DEF")
ANYWHERE = "CompositeExplicitAutograd"  # the key of a kernel that is for all devices
