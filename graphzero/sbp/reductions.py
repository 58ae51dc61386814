"""Reductions of partial values: sum, max, min.  A new one is an entry here, and one in ``rule_checks`` that cuts a
value into such parts, for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# What combines two parts, elementwise; by upper case it is the name of torch.distributed's.
REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
