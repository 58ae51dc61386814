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
    from graphzero.config import GraphConfig as GraphConfig
    from graphzero.convert import to_global as to_global
    from graphzero.convert import to_local as to_local
    from graphzero.errors import CaptureError as CaptureError
    from graphzero.errors import CheckError as CheckError
    from graphzero.errors import CheckpointError as CheckpointError
    from graphzero.errors import ConfigError as ConfigError
    from graphzero.errors import GraphZeroError as GraphZeroError
    from graphzero.errors import PlacementError as PlacementError
    from graphzero.errors import RankError as RankError
    from graphzero.errors import SbpError as SbpError
    from graphzero.errors import VerifyError as VerifyError
    from graphzero.graph import Graph as Graph
    from graphzero.ir.graph import StepGraph as StepGraph
    from graphzero.ir.text.parser import parse as parse
    from graphzero.logs import set_logs as set_logs
    from graphzero.passes import Pipeline as Pipeline
    from graphzero.plan import Plan as Plan
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
    from graphzero.region import local_region as local_region
    from graphzero.sbp.link_costs import Link as Link
    from graphzero.sbp.placement import Placement as Placement
    from graphzero.sbp.placement import placement as placement
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

_PUBLIC = {  # module -> its public names
    "config": ("GraphConfig",),
    "convert": ("to_global", "to_local"),
    "errors": (
        "CaptureError",
        "CheckError",
        "CheckpointError",
        "ConfigError",
        "GraphZeroError",
        "PlacementError",
        "RankError",
        "SbpError",
        "VerifyError",
    ),
    "graph": ("Graph",),
    "ir.graph": ("StepGraph",),
    "ir.text.parser": ("parse",),
    "logs": ("set_logs",),
    "passes": ("Pipeline",),
    "plan": ("Plan",),
    "plugins.check": ("check",),
    "plugins.deepspeed": ("DeepSpeed",),
    "plugins.explain": ("explain",),
    "plugins.page": ("save_page",),
    "plugins.pretrained": ("load_pretrained", "materialize", "save_pretrained"),
    "plugins.profiler": ("Trace", "trace"),
    "plugins.ragged.batches": ("until_all_end",),
    "region": ("local_region",),
    "sbp.link_costs": ("Link",),
    "sbp.placement": ("Placement", "placement"),
    "serialization": ("latest", "load", "save"),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
_MODULES = ("errors", "nn", "passes", "sbp", "testing")

__all__ = sorted({*_HOMES, *_MODULES} - {"nn"})  # which import * would put over torch's


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
