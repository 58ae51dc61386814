"""From the user's ``build`` to a StepGraph: forward, backward, clipping and optimizer as one functional graph.

What is traced is in ``trace`` (build) and ``optimizer`` (the update), put together by ``graph_builder``,
``update_writer`` and ``assemble``.
Shapes are global and devices unknown: passes decide where values are, and the runtime how ops run.
"""

from graphzero.capture.annotations.local_regions import region_runs
from graphzero.capture.annotations.pins import is_capturing, pin_value, placement_of_capture
from graphzero.capture.assemble import capture
from graphzero.capture.guards.guard_set import GuardSet
from graphzero.capture.guards.guarded_attributes import GuardedAttributes, describe_path
from graphzero.capture.optimizer.average import constants_of_average
from graphzero.capture.optimizer.hyperparameters import Carry
from graphzero.capture.optimizer.initial_state import initial_fill
from graphzero.capture.optimizer.loss_scale import LossScale
from graphzero.capture.optimizer.stepped_numbers import constants_of_group, counts_in_states, hyperparameters_of_group
from graphzero.capture.optimizer.stepping import OptimizerTracer
from graphzero.capture.spec import (
    LOSS_SCALE,
    AverageSpec,
    Captured,
    Input,
    Inputs,
    OptimizerSpec,
    Precision,
    Scaling,
    Step,
)
