"""The passes, from a captured step to a program that runs.

A pass is a callable ``StepGraph -> StepGraph``; ``Pipeline`` runs, verifies and records them.  ``pass_list`` has the
list of them.
"""

from __future__ import annotations

import sys
from typing import Any

from graphzero.ir.memory_space import host_memory
from graphzero.passes.base import BuiltinPass, Group, Pass, Pipeline, Record, pass_name
from graphzero.passes.boxing.insert_boxing import InsertBoxing
from graphzero.passes.boxing.localize import Localize
from graphzero.passes.boxing.lower_boxing import LowerBoxing
from graphzero.passes.memory.dead_code import DeadCode
from graphzero.passes.memory.delay_gradients import DelayGradients
from graphzero.passes.memory.in_place import InPlace
from graphzero.passes.memory.keep_gathered import KeepGathered
from graphzero.passes.memory.recompute import Recompute
from graphzero.passes.pass_list import Fuse, Options, PassEntry, Schedule, default_passes, pass_entries, pass_names
from graphzero.passes.pass_list_text import parse_passes, print_passes
from graphzero.passes.place.cast_before_gather import CastBeforeGather
from graphzero.passes.place.expand import Expand
from graphzero.passes.place.pin import Pin
from graphzero.passes.place.propagate import Propagate
from graphzero.passes.place.zero import Zero
from graphzero.passes.schedule.assign import Assign
from graphzero.passes.schedule.bucket import Bucket
from graphzero.passes.schedule.copy_old import CopyOld
from graphzero.passes.schedule.launch import Launch
from graphzero.passes.schedule.optimizer_in_backward import OptimizerInBackward
from graphzero.passes.schedule.overlap import Overlap, OverlapUpdate
from graphzero.passes.schedule.slots import Slots

__all__ = [
    "Assign", "Bucket", "BuiltinPass", "CopyOld", "DeadCode", "Expand", "Fuse", "Group", "InsertBoxing",
    "KeepGathered", "Launch", "Localize", "LowerBoxing", "CastBeforeGather", "Options", "DelayGradients", "Overlap",
    "OverlapUpdate", "Pass", "PassEntry", "Pin", "Pipeline", "Propagate", "Recompute", "Record",
    "InPlace", "Schedule", "Slots",
    "OptimizerInBackward", "Zero", "default_passes", "host_memory", "parse_passes", "pass_name", "print_passes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """``NAMES``, of all passes in order, and the classes of plug-ins' passes, which are loaded when they are used."""
    if name == "NAMES":
        return pass_names()
    for entry in () if name.startswith("_") else pass_entries():
        if entry.kind.__name__ == name:
            return entry.kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, "NAMES", *(entry.kind.__name__ for entry in pass_entries() if entry.after)})
