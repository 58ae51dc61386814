"""The guards of one capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from graphzero.capture.guards.guarded_values import ObjectIdentity
from graphzero.capture.guards.number_guards import NumberGuards
from graphzero.capture.guards.optimizer_state_guard import HasState, OptimizerStateGuard
from graphzero.ir.value import Role


class AttributeChecker(Protocol):
    """Present values of attributes, against which guards are checked: see ``GuardedAttributes``."""

    def check(self, guards: GuardSet, /) -> bool: ...


@dataclass(frozen=True, eq=False)
class GuardSet:
    """Guards of one capture.

    numbers: on hyperparameters and float inputs, by role (``hyper`` and ``scalar`` roles).
    optimizer_state: on which optimizer states exist.
    attributes: guarded values of the attributes that build read, by path: ``model.1.p``, ``global train.SCALE``.
    namespaces: of the paths that are not attributes of the Graph, as ``global train`` -> what has the names.
    tensors: tensors that build read anywhere else, and their identity and version then.
    """

    numbers: NumberGuards
    optimizer_state: OptimizerStateGuard = field(default_factory=OptimizerStateGuard)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    namespaces: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[tuple[Tensor, ObjectIdentity]] = ()

    def check(self, numbers: Mapping[Role, float], has_state: HasState | None, attributes: AttributeChecker) -> bool:
        """Return whether all guards hold.  has_state: None where optimizer states are known to be as assumed."""
        has_states = has_state is None or self.optimizer_state.check(numbers, has_state)
        return has_states and attributes.check(self) and self.numbers.check(numbers)
