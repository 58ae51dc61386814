"""graphzero: whole training steps of PyTorch as one graph, rewritten by passes, run on many ranks.

The public names; everything else may change.  They are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphzero import errors as errors
    from graphzero import nn as nn
    from graphzero import passes as passes
    from graphzero import sbp as sbp
    from graphzero import testing as testing
    from graphzero.config import GraphConfig
    from graphzero.convert import to_global, to_local
    from graphzero.errors import CaptureError as CaptureError
    from graphzero.errors import CheckError as CheckError
    from graphzero.errors import CheckpointError as CheckpointError
    from graphzero.errors import ConfigError as ConfigError
    from graphzero.errors import GraphZeroError as GraphZeroError
    from graphzero.errors import PlacementError as PlacementError
    from graphzero.errors import RankError as RankError
    from graphzero.errors import SbpError as SbpError
    from graphzero.errors import VerifyError as VerifyError
    from graphzero.graph import Graph
    from graphzero.ir.graph import StepGraph
    from graphzero.ir.text.parser import parse
    from graphzero.logs import set_logs as set_logs
    from graphzero.passes import Pipeline
    from graphzero.plan import Plan
    from graphzero.plugins.check import check as check
    from graphzero.plugins.deepspeed import DeepSpeed as DeepSpeed
    from graphzero.plugins.explain import explain as explain
    from graphzero.plugins.page import save_page as save_page
    from graphzero.plugins.pretrained import load_pretrained as load_pretrained
    from graphzero.plugins.pretrained import materialize as materialize
    from graphzero.plugins.pretrained import save_pretrained as save_pretrained
    from graphzero.plugins.profiler import Trace as Trace
    from graphzero.plugins.profiler import trace as trace
    from graphzero.plugins.ragged.batches import until_all_end as until_all_end
    from graphzero.region import local_region
    from graphzero.sbp.link_costs import Link
    from graphzero.sbp.placement import Placement, placement
    from graphzero.serialization import latest as latest
    from graphzero.serialization import load as load
    from graphzero.serialization import save as save

__version__ = "0.1.0"


def _refuse_other_distribution() -> None:
    """Raise ImportError where PyPI's package ``graphzero``, by others, is installed over the same folder."""
    installed = Path(__file__).parents[1]
    if any(installed.glob("graphzero-*.dist-info")):
        raise ImportError(
            f"{installed} has two packages that are imported as graphzero: graphzero-torch, and `graphzero` of PyPI, a "
            "graph-network engine by other people, mixed with these. Uninstall both, and install the one "
            "that is meant: pip uninstall graphzero graphzero-torch"
        )


_refuse_other_distribution()

_HOMES = {
    "CaptureError": "errors",
    "CheckError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DeepSpeed": "plugins.deepspeed",
    "Graph": "graph",
    "GraphConfig": "config",
    "GraphZeroError": "errors",
    "Link": "sbp.link_costs",
    "Pipeline": "passes",
    "Placement": "sbp.placement",
    "PlacementError": "errors",
    "Plan": "plan",
    "RankError": "errors",
    "SbpError": "errors",
    "StepGraph": "ir.graph",
    "Trace": "plugins.profiler",
    "VerifyError": "errors",
    "check": "plugins.check",
    "explain": "plugins.explain",
    "latest": "serialization",
    "load": "serialization",
    "load_pretrained": "plugins.pretrained",
    "materialize": "plugins.pretrained",
    "local_region": "region",
    "parse": "ir.text.parser",
    "placement": "sbp.placement",
    "save": "serialization",
    "save_page": "plugins.page",
    "save_pretrained": "plugins.pretrained",
    "set_logs": "logs",
    "to_global": "convert",
    "to_local": "convert",
    "trace": "plugins.profiler",
    "until_all_end": "plugins.ragged.batches",
}
_MODULES = ("errors", "nn", "passes", "sbp", "testing")

__all__ = [
    "CaptureError",
    "CheckError",
    "CheckpointError",
    "ConfigError",
    "DeepSpeed",
    "Graph",
    "GraphConfig",
    "GraphZeroError",
    "Link",
    "Pipeline",
    "Placement",
    "PlacementError",
    "Plan",
    "RankError",
    "SbpError",
    "StepGraph",
    "Trace",
    "VerifyError",
    "check",
    "errors",
    "explain",
    "latest",
    "load",
    "load_pretrained",
    "local_region",
    "materialize",
    "parse",
    "passes",
    "placement",
    "save",
    "save_page",
    "save_pretrained",
    "sbp",
    "set_logs",
    "testing",
    "to_global",
    "to_local",
    "trace",
    "until_all_end",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"graphzero.{name}")
    if name in _HOMES:
        public = getattr(importlib.import_module(f"graphzero.{_HOMES[name]}"), name)
        globals()[name] = public
        return public
    import torch

    torchs = f"; it runs torch's own modules, optimizers and tensors: torch.{name}" if hasattr(torch, name) else ""
    raise AttributeError(f"module 'graphzero' has no attribute {name!r}{torchs}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
