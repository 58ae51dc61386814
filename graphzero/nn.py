"""``gz.nn.Graph``: the Graph class under the name that users of torch.nn look for."""

import sys
from typing import NoReturn

from torch import nn

from graphzero.graph import Graph

__all__ = ["Graph"]


def __getattr__(name: str) -> NoReturn:
    torchs = f"; modules are torch's own: torch.nn.{name}" if hasattr(nn, name) else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{torchs}", name=name, obj=sys.modules[__name__])
