"""Inputs and results of a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from graphzero.capture.guards.guard_set import GuardSet
from graphzero.capture.optimizer.hyperparameters import Carry
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed_graph import PackedGraph
from graphzero.ir.ragged import Along
from graphzero.ir.value import StateSpec
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd

LOSS_SCALE = "loss_scale"  # among the modules of a step; a Graph has it for itself


@dataclass(frozen=True)
class Input:
    """One leaf of build's arguments.

    raw: what the caller has given: a tensor, of which capture asks only its dtype; a float, which is a run-time scalar;
    or anything else, which is fixed.  shape: the global one of a tensor, None for anything else.  nd: how a tensor lies
    on the ranks, and is_global, whether the caller has said so of the tensor itself, are not for capture.
    """

    name: str
    raw: Any
    shape: tuple[int, ...] | None = None
    nd: Nd = ()
    is_global: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def is_float(self) -> bool:
        return isinstance(self.raw, float)


@dataclass(frozen=True)
class Inputs:
    """The leaves of one call's arguments, in pytree order, and the tree they came from: of (args, kwargs)."""

    leaves: tuple[Input, ...]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> list[Input]:
        return [leaf for leaf in self.leaves if leaf.shape is not None]

    @property
    def floats(self) -> list[Input]:
        return [leaf for leaf in self.leaves if isinstance(leaf.raw, float)]


@dataclass
class OptimizerSpec:
    """One optimizer of a Graph, and how its gradients are clipped."""

    optimizer: torch.optim.Optimizer
    clip_grad_norm: float | None = None
    norm_type: float = 2.0
    clip_grad_value: float | None = None


@dataclass(frozen=True)
class AverageSpec:
    """An average that each training step updates, and the module of which it is one."""

    averaged: AveragedModel
    of: nn.Module


@dataclass(frozen=True)
class Scaling:
    """The settings by which the loss scale changes from step to step; see ``LossScale``."""

    init: float
    growth: float
    backoff: float
    interval: int
    hysteresis: int
    least: float
    consecutive: bool = False


@dataclass(frozen=True)
class Precision:
    """Mixed precision of a step.

    dtype: of the casts of parameters that forward reads, and of autocast.  reduce_dtype: of gradients until they are
    complete.  scaling: of the loss, None for none.  stochastic_rounding: whether parameters that are bfloat16 are
    masters themselves, stepped in float32 and rounded at random.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype
    scaling: Scaling | None = None
    stochastic_rounding: bool = False

    def rounds(self, x: Tensor) -> bool:
        """Return whether what an update makes of ``x``, a parameter or state, is rounded stochastically."""
        return self.stochastic_rounding and x.dtype is torch.bfloat16


@dataclass
class Step:
    """The step to capture: the user's build, its modules by attribute name, the optimizers that follow it, the
    precision (None for that of the parameters), and the averages that are updated after the optimizers."""

    name: str
    placement: Placement
    build: Callable[..., Any]
    modules: dict[str, nn.Module]
    optimizers: list[OptimizerSpec] = field(default_factory=list)
    precision: Precision | None = None
    averages: list[AverageSpec] = field(default_factory=list)

    def rounds(self, x: Tensor) -> bool:
        """Return whether what the update makes of ``x``, a parameter or state, is rounded stochastically."""
        return self.precision is not None and self.precision.rounds(x)


@dataclass
class Captured:
    """A captured step.

    packed: the graph, of level "captured", which is read when a configuration asks for another program.
    out_spec: of build's return value, whose flat leaves are ``graph.outputs``.
    training: whether the step has an update.  states: all optimizer state of the graph.
    unused: trainable parameters of the optimizers that get no gradient.
    guards: what must hold for a program of this capture to run.
    constants: tensors that build closes over, by placeholder name.
    padded: along what each output of build is padded, where inputs are.  least: the fewest places of a ragged dim that
        the step reads, by its name, where that is more than one.
    carries: the numbers of parameter groups that the step changes.
    asks_whether_traced: lines of build that branch on whether it is being traced, which plain PyTorch is not.
    """

    packed: PackedGraph
    out_spec: pytree.TreeSpec
    training: bool
    states: list[StateSpec]
    unused: list[str]
    guards: GuardSet
    constants: dict[str, Tensor]
    padded: tuple[tuple[Along, ...], ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    carries: Sequence[Carry] = ()
    asks_whether_traced: Sequence[str] = ()

    @property
    def graph(self) -> StepGraph:
        """The captured step, made again each time."""
        return self.packed.graph()
