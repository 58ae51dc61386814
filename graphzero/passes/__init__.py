"""The passes, from a captured step to a program that runs.

A pass is a callable ``StepGraph -> StepGraph``; ``Pipeline`` runs, verifies and records them.
"""

from graphzero.passes.base import BuiltinPass, Pass, Pipeline, Record, pass_name
from graphzero.passes.bucket import Bucket
from graphzero.passes.dead_code import DeadCode
from graphzero.passes.fuse import Fuse
from graphzero.passes.insert_boxing import InsertBoxing
from graphzero.passes.join_updates import JoinUpdates
from graphzero.passes.keep import Keep
from graphzero.passes.localize import Localize
from graphzero.passes.lower_boxing import LowerBoxing
from graphzero.passes.order import Order
from graphzero.passes.pin import Pin
from graphzero.passes.propagate import Propagate
from graphzero.passes.reuse import Reuse
from graphzero.passes.schedule import Schedule
from graphzero.passes.zero import Zero
from graphzero.sbp.links import Links

__all__ = [
    "Bucket",
    "BuiltinPass",
    "DeadCode",
    "Fuse",
    "InsertBoxing",
    "JoinUpdates",
    "Keep",
    "Localize",
    "LowerBoxing",
    "Order",
    "Pass",
    "Pin",
    "Pipeline",
    "Propagate",
    "Record",
    "Reuse",
    "Schedule",
    "Zero",
    "default_passes",
    "pass_name",
]

NAMES = (
    "pin", "zero", "propagate", "insert_boxing", "lower_boxing", "localize", "fuse", "keep", "order", "bucket",
    "schedule", "dead_code", "reuse", "join_updates",
)  # fmt: skip


def default_passes(
    pin: Pin | None = None, zero: Zero | None = None, bucket: Bucket | None = None, links: Links = (),
    keep: Keep | None = None, in_backward: bool = False,
) -> list[Pass]:  # fmt: skip
    """The built-in passes in order; without ``zero`` the step is plain data parallel (stage 0).

    ``Order`` is not among them: a Graph runs it before ``bucket`` where the plan of the program then peaks lower.

    links: what communication costs on each placement axis; () where bytes decide.
    keep: what stays gathered between forward and backward; None for nothing.
    in_backward: whether the optimizer steps while backward runs.
    """
    first: list[Pass] = [pin or Pin()] + ([zero] if zero is not None else [])
    rest: list[Pass] = [
        Propagate(links),
        InsertBoxing(links),
        LowerBoxing(links),
        Localize(),
        Fuse(),
        *([keep] if keep is not None else []),
        bucket or Bucket(),
        Schedule(bucket.nbytes if bucket is not None else None, in_backward),
        DeadCode(),
        Reuse(),
        JoinUpdates(),
    ]
    return first + rest
