"""What capture takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from graphzero.capture.guards.number_guards import Guards
from graphzero.capture.optimizer.hyperparameters import Carry
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed_graph import PackedGraph
from graphzero.ir.ragged import Along
from graphzero.ir.value import Role
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
    """One optimizer of a Graph and how its gradients are clipped."""

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
    """How the loss scale goes on from step to step; see ``LossScale``."""

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
        """Whether what an update makes of ``x``, a parameter or state, is rounded stochastically."""
        return self.stochastic_rounding and x.dtype is torch.bfloat16


@dataclass
class Step:
    """What is captured: the user's build, its modules by attribute name, the optimizers that follow it, in which
    precision, None for that of the parameters, and the averages that are updated behind the optimizers."""

    name: str
    placement: Placement
    build: Callable[..., Any]
    modules: dict[str, nn.Module]
    optimizers: list[OptimizerSpec] = field(default_factory=list)
    precision: Precision | None = None
    averages: list[AverageSpec] = field(default_factory=list)

    def rounds(self, x: Tensor) -> bool:
        """Whether what the update makes of ``x``, a parameter or state, is rounded stochastically."""
        return self.precision is not None and self.precision.rounds(x)


@dataclass(frozen=True)
class StateSpec:
    """One tensor of optimizer state: whose it is, what it looks like, what it is before the first step.

    ``param`` is ``attribute.fqn``, ``placeholder`` the node that stands for it; several 0-d states may share one.
    ``born``: the step makes it and nobody reads what was there; then ``fill`` means nothing.
    """

    optimizer: int
    param: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: float
    placeholder: str
    born: bool = False


@dataclass(frozen=True)
class Entry:
    """What a capture takes for granted about optimizer state, each as (optimizer, path of the parameter).

    absent: there is none, the step makes it.  present: there is some, which no numbers could stand for.  filled: of
    these it does not matter, but the numbers that fill state which is not there may follow from ``numbers``, the
    hyperparameters of their groups (Rprop's first step size is its learning rate).
    """

    absent: frozenset[tuple[int, str]] = frozenset()
    present: frozenset[tuple[int, str]] = frozenset()
    filled: frozenset[tuple[int, str]] = frozenset()
    numbers: Mapping[Role, float] = field(default_factory=dict)

    def __or__(self, other: Entry) -> Entry:
        sets = (self.absent | other.absent, self.present | other.present, self.filled | other.filled)
        return Entry(*sets, {**self.numbers, **other.numbers})

    def holds(self, numbers: Mapping[Role, float], has_state: Callable[[int, str], bool]) -> bool:
        if any(has_state(*x) for x in self.absent) or not all(has_state(*x) for x in self.present):
            return False
        same = all(numbers.get(role) == number for role, number in self.numbers.items())
        return same or all(has_state(*x) for x in self.filled)


@dataclass
class Captured:
    """A captured step.

    packed: the graph, of level "captured", which is read when a configuration asks for another program.
    out_spec: of build's return value, whose flat leaves are ``graph.outputs``.
    training: whether the step has an update.  states: all optimizer state of the graph.
    unused: trainable parameters of the optimizers that get no gradient.
    guards: whether this capture still holds for given hyperparameters and float inputs, by role
        (``hyper`` and ``scalar`` roles; a guarded number that is not given counts as changed).
    constants: tensors that build closes over, by placeholder name.
    entry: which optimizer state must be there, and which must not, for this capture to be the step.
    padded: along what each output of build is padded, where inputs are.  least: the fewest places of a ragged dim that
        the step reads, by its name, where that is more than one.
    attributes: what plain attributes of the Graph and its modules were when build read them, by path: ``model.1.p``.
    spaces: of those that stand elsewhere, as ``global train.SCALE`` does: label -> what has them as attributes.
    free: tensors that build has met anywhere else, and as what: see ``written``.
    carries: the numbers of parameter groups that the step changes.
    told: the lines that go by the answer that build is being traced, which plain PyTorch is not.
    """

    packed: PackedGraph
    out_spec: pytree.TreeSpec
    training: bool
    states: list[StateSpec]
    unused: list[str]
    guards: Guards
    constants: dict[str, Tensor]
    entry: Entry = field(default_factory=Entry)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    padded: tuple[frozenset[Along], ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    spaces: Mapping[str, Any] = field(default_factory=dict)
    free: Sequence[tuple[Tensor, Any]] = ()
    told: Sequence[str] = ()
    carries: Sequence[Carry] = ()

    @property
    def graph(self) -> StepGraph:
        """The captured step, made anew each time."""
        return self.packed.graph()

    def enters(self, numbers: Mapping[Role, float], has_state: Callable[[int, str], bool]) -> bool:
        """Whether optimizer state is what this capture takes for granted.

        ``entry`` holds, and of the parameters that share a step counter all have state, or none has.
        """
        sharing: dict[str, set[bool]] = {}
        for spec in self.states:
            sharing.setdefault(spec.placeholder, set()).add(has_state(spec.optimizer, spec.param))
        return all(len(found) == 1 for found in sharing.values()) and self.entry.holds(numbers, has_state)
