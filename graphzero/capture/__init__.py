"""From the user's ``build`` to a StepGraph: forward, backward, clipping and optimizer as one functional graph.

What is traced is in ``trace`` (build) and ``optimizer`` (the update), put together by ``join`` and ``assemble``.
Shapes are global and devices unknown: what lies where is for the passes, what runs how for the runtime.
"""

from graphzero.capture.assemble import capture
from graphzero.capture.hyper import baked_of_group
from graphzero.capture.hyper import of_group as hypers_of_group
from graphzero.capture.initial_state import initial_fill
from graphzero.capture.pins import is_capturing, pin_value, placement_of_capture
from graphzero.capture.reads import Written, frozen
from graphzero.capture.regions import region_runs
from graphzero.capture.spec import Captured, FloatLeaf, OptimizerSpec, StateSpec, Step, TensorLeaf

__all__ = [
    "Captured",
    "FloatLeaf",
    "OptimizerSpec",
    "StateSpec",
    "Step",
    "TensorLeaf",
    "Written",
    "baked_of_group",
    "capture",
    "frozen",
    "hypers_of_group",
    "initial_fill",
    "is_capturing",
    "pin_value",
    "placement_of_capture",
    "region_runs",
]
