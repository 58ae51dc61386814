"""How partial values of ranks combine: by sum, max or min.  A new way is an entry here, and one in ``law`` that cuts a
value into such parts, for tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# What combines two parts, elementwise; by upper case it is the name of torch.distributed's.
REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
