"""An optimizer of the user's that steps on stand-ins of its parameters while the step is written down.

The user's own object steps.  Whatever it reaches is watched as build's objects are: by identity, parameters are
replaced by their stand-ins, groups and state by those of the trace, in lists, other optimizers and closures alike;
what it reads holds the capture, what it writes is refused, and afterwards all of it is as it was.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero import _compat
from graphzero.capture.guards.attribute_guards import AttributeGuards, forward_tensor_attributes
from graphzero.capture.guards.guarded_values import ObjectIdentity
from graphzero.capture.guards.referenced_names import ReferencedNames
from graphzero.capture.host_values.kernel_checks import KERNEL_CHECKS
from graphzero.capture.objects.object_snapshot import DictSnapshot, ObjectSnapshot, TensorSnapshot, restore_all
from graphzero.capture.objects.side_effects import snapshot_reachable
from graphzero.capture.objects.snapshot_diff import describe_changes
from graphzero.capture.optimizer.branches import BranchOutcomes
from graphzero.capture.optimizer.host_math import symbolic_math
from graphzero.capture.optimizer.step_functions import FusedSteps, HostNumbers
from graphzero.capture.problems import place_of, problem, problem_here, tracing
from graphzero.capture.trace.captured_constants import CapturedConstants, ConstantMessages, written_by
from graphzero.errors import CaptureError
from graphzero.ir.source_location import user_frame

_KEEP = (
    "keep a number in param_groups, group['step'] += 1, and a tensor in the state of each parameter; for what one step "
    "needs alone use a local variable"
)
_SHARE = (
    "let the two share them, super().__init__(inner.param_groups, inner.defaults) and self.state = inner.state, or "
    "give the inner optimizers to add_optimizer themselves"
)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether its class and its step are torch's own, which keep everything relevant in groups and state."""
    own = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    return own and _compat.is_torchs_step(optimizer.step)


class OptimizerTracer:
    """The steps that one capture takes of an optimizer.

    index: of the optimizer in its Graph.  paths: id of a parameter -> its path.
    mixes: whether it holds parameters outside of its groups, or depends on their order, so that all step together.
    """

    def __init__(self, optimizer: Optimizer, index: int = 0, paths: Mapping[int, str] | None = None) -> None:
        self.optimizer, self.paths = optimizer, paths or {}
        self.name, self.step = type(optimizer).__name__, _compat.unhooked_step(optimizer)
        self.groups, self.state = optimizer.param_groups, optimizer.state
        self.owned = {id(p): p for group in self.groups for p in group["params"]}
        own = [self.groups, self.state, *self.groups, *(group["params"] for group in self.groups)]
        self._own = set(map(id, own))
        self.guards: AttributeGuards | None = None
        self.inner: list[Optimizer] = []
        self.free: list[CapturedConstants] = []
        if is_of_torch(optimizer):
            self.snapshots: list[ObjectSnapshot] = [DictSnapshot(vars(optimizer), (optimizer, ""))]
            self.mixes = False
            return
        self.snapshots = self._reached()
        self.mixes = any(map(self._holds_params, self.snapshots))
        self._check_inner()
        spaces: dict[str, Any] = {f"optimizer {index}": optimizer}
        spaces |= {f"optimizer {index} inside {n}": inner for n, inner in enumerate(self.inner)}
        referenced = ReferencedNames(self.step, optimizer, nn.Module())
        self.guards = AttributeGuards(nn.Module(), None, referenced, spaces)

    # ---- what it reaches

    def _reached(self) -> list[ObjectSnapshot]:
        roots: list[Any] = [self.optimizer]
        while True:
            snapshots = snapshot_reachable(roots, self.step)
            owners = (x.owner[0] for x in snapshots if isinstance(x, DictSnapshot) and not x.owner[1])
            inner = {id(x): x for x in owners if isinstance(x, Optimizer) and x is not self.optimizer}
            self.inner = list(inner.values())
            if len(roots) == 1 + len(inner):
                return snapshots
            roots = [self.optimizer, *self.inner]  # what their classes name counts too

    def _holds_params(self, snapshot: ObjectSnapshot) -> bool:
        """Return whether an attribute holds parameters or their ids, though it is not a group or the state of the
        optimizer."""
        return id(snapshot.holder) not in self._own and any(map(self._is_owned, snapshot.content))

    def _is_owned(self, x: Any) -> bool:
        if isinstance(x, (tuple, frozenset)):
            return any(map(self._is_owned, x))
        x = x() if type(x) is weakref.ref else x
        return (x if type(x) is int else id(x)) in self.owned

    def _check_inner(self) -> None:
        own = set(map(id, self.groups))
        for inner in self.inner:
            if _compat.has_step_hooks(inner):
                raise problem(
                    f"{type(inner).__name__}, which {self.name} holds, has step hooks, which a graph cannot call",
                    "remove the hooks and run that code before or after the Graph's call",
                )
            groups = getattr(inner, "param_groups", ())
            if any(id(group) not in own and any(map(self._is_owned, group["params"])) for group in groups):
                raise self._inner_problem(inner, "parameter groups")

    def _inner_problem(self, inner: Optimizer, what: str) -> CaptureError:
        return problem(
            f"{self.name} steps by an optimizer that it holds, {type(inner).__name__}, whose {what} are not its own; a "
            f"graph reads and writes those of {self.name} alone",
            _SHARE,
            [place_of(self.step)],
        )

    # ---- a step

    @_compat.contextmanager
    def standing_in(
        self, groups: list[dict[str, Any]], state: Any, stand_ins: Mapping[int, Tensor],
        mode: _compat.FakeTensorMode | None = None, strict: bool = True,
    ) -> Iterator[None]:  # fmt: skip
        """The optimizer holds ``groups`` and ``state``, and stand-ins of parameters, by id; ``take`` is for inside.

        mode: of the fakes, None for real tensors.  strict: whether a write to what it holds otherwise is an error.
        """
        defaults: dict[str, Any] = getattr(self.optimizer, "defaults", {})
        settings = {**defaults, "differentiable": False}
        put: dict[int, Any] = {id(self.groups): groups, id(self.state): state, id(defaults): settings}
        put |= {id(old): new for old, new in zip(self.groups, groups, strict=True)}
        put |= {id(old["params"]): new["params"] for old, new in zip(self.groups, groups, strict=True)}
        put |= stand_ins
        inner_states = [(inner, inner.state) for inner in self.inner if inner.state is not self.state]
        with _compat.undoing(lambda: restore_all(self.snapshots)):
            started = [self._put(snapshot, put) for snapshot in self.snapshots]
            for key, x in stand_ins.items():
                _compat.take_class(x, self.owned[key])
            self._check_held(groups, state)
            started.append(DictSnapshot(settings, (self.optimizer, "defaults")))
            started += [] if self.guards is None else [DictSnapshot(vars(x), (x, "")) for x in stand_ins.values()]
            with self._watching(stand_ins, mode):
                yield
            for inner, states in inner_states:
                if states:
                    raise self._inner_problem(inner, "states")
            if strict:
                self._check_changes(started)
                self._check_state(state)

    def _put(self, snapshot: ObjectSnapshot, put: Mapping[int, Any]) -> ObjectSnapshot:
        """Write stand-ins in the place of what they stand for; returns what is there then."""
        content = (
            snapshot.content if id(snapshot.holder) in self._own else [_replaced(x, put) for x in snapshot.content]
        )
        if all(map(is_, content, snapshot.content)):
            return snapshot
        snapshot.write_content(content)
        started = copy.copy(snapshot)
        started.content = snapshot.read_content(snapshot.holder)
        return started

    def _check_held(self, groups: list[dict[str, Any]], state: Any) -> None:
        current = self.optimizer.param_groups
        is_held = len(current) == len(groups) and all(x is y for x, y in zip(current, groups, strict=True))
        if not is_held or self.optimizer.state is not state:
            raise problem(
                f"{self.name} makes its {'state' if is_held else 'param_groups'} again at each access, "
                "so a graph cannot step it",
                "keep one object, self.param_groups = inner.param_groups and self.state = inner.state, as "
                "torch.optim.Optimizer does",
                [place_of(self.step)],
            )

    @_compat.contextmanager
    def _watching(self, stand_ins: Mapping[int, Tensor], mode: _compat.FakeTensorMode | None) -> Iterator[None]:
        with ExitStack() as stack:
            if self.guards is not None:
                free = None if mode is None else CapturedConstants(mode, self._by_path, self._words())
                self.free += [] if free is None else [free]
                stack.enter_context(self.guards)
                reals = {id(x): (self.owned[key], self._path(key)) for key, x in stand_ins.items()}
                stack.enter_context(forward_tensor_attributes(reals, self.guards))
                stack.enter_context(_Ops(self, free))
            yield

    def trace_step(self, outcomes: BranchOutcomes) -> None:
        """A step, as it is written down; what it asks of values turns out as ``outcomes`` says."""
        checks = nullcontext() if self.guards is None else _KernelChecks(outcomes)
        with symbolic_math(map(type, (self.optimizer, *self.inner))), HostNumbers(), FusedSteps(), outcomes, checks:
            self.take_step()

    def take_step(self) -> None:
        """A step on real tensors."""
        with torch.no_grad(), _compat.is_compiling(), tracing(self.step), _Calls(self):
            self.step()

    def _check_state(self, state: Any) -> None:
        other = next((key for key in (*self.state, *state) if not isinstance(key, Tensor)), None)
        if other is not None:
            raise problem(
                f"{self.name} keeps optimizer.state[{other!r}], which is not the state of a parameter",
                "keep a number in param_groups, and a tensor in the state of each parameter",
                [place_of(self.step)],
            )

    def _check_changes(self, started: list[ObjectSnapshot]) -> None:
        changed = next(
            (name for snapshot in started if snapshot.differs() for name in describe_changes(snapshot)), None
        )
        if changed is not None:
            named = changed.replace(f"{self.name}.", "self.", 1) if changed.startswith(f"{self.name}.") else changed
            raise problem(
                f"{self.name}.step() changes {named}, which is a constant in a graph", _KEEP, [place_of(self.step)]
            )

    # ---- tensors that it meets

    def _path(self, key: int) -> str:
        return self.paths.get(key, "a parameter")

    def _words(self) -> ConstantMessages:
        return ConstantMessages(
            f"{self.name}.step()", "neither a parameter nor its state", _KEEP, "is not among those that it steps",
            "give it to the optimizer too, or read a copy of its values: p.detach().clone()",
        )  # fmt: skip

    def check_written(self, x: Tensor) -> None:
        """Refuse a write to a tensor that the optimizer reaches."""
        if _compat.storage_id(x) in self._storages:
            raise problem_here(f"{self.name}.step() writes to a tensor of the user's", _KEEP)

    @cached_property
    def _by_path(self) -> dict[str, Tensor]:
        return {self._path(key): x for key, x in self.owned.items()}

    @cached_property
    def _storages(self) -> set[int]:
        reached = [snapshot.holder for snapshot in self.snapshots if isinstance(snapshot, TensorSnapshot)]
        return {_compat.storage_id(_compat.local_tensor(x)) for x in reached if x.layout is torch.strided}

    def past_stand_in(self, x: Tensor) -> CaptureError:
        """The error for a step that reaches a parameter itself: it would train nothing there."""
        inside = f", by {type(self.inner[0]).__name__} inside of it" if self.inner else ""
        return problem_here(
            f"{self.name}.step() reaches {self._path(id(x))} itself{inside}, in a way that capture does not follow",
            "reach parameters by self.param_groups, or by lists, dicts and other attributes of the optimizer",
        )

    # ---- what it has read

    def guarded_attributes(self) -> dict[str, Any]:
        """Guarded values of the attributes that the steps have read besides groups and state, by path."""
        return {} if self.guards is None else self.guards.current_values()

    def constants(self) -> list[tuple[Tensor, ObjectIdentity]]:
        """Tensors that the steps have read elsewhere, and their identity and version."""
        return [constant for free in self.free for constant in free.identities()]

    @property
    def namespaces(self) -> dict[str, Any]:
        """See ``GuardSet.namespaces``."""
        return {} if self.guards is None else self.guards.namespaces


def _replaced(x: Any, put: Mapping[int, Any]) -> Any:
    """``x``, or what stands for it; in tuples too, and an id in the place of an id."""
    if type(x) in (tuple, frozenset):
        inside = [_replaced(y, put) for y in x]
        return x if all(a is b for a, b in zip(inside, x, strict=True)) else type(x)(inside)
    if type(x) is weakref.ref and id(x()) in put:
        return weakref.ref(put[id(x())])
    if type(x) is int:
        return id(put[x]) if x in put else x
    return put.get(id(x), x)


class _Calls(TorchFunctionMode):
    """Refuses what reaches a parameter itself, past its stand-in: the step would train nothing there."""

    def __init__(self, stepping: OptimizerTracer) -> None:
        super().__init__()
        self.stepping = stepping

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and id(args[0]) in self.stepping.owned:
            raise self.stepping.past_stand_in(args[0])
        return func(*args, **(kwargs or {}))


class _KernelChecks(TorchDispatchMode):
    """Notes what torch's kernels check."""

    def __init__(self, outcomes: BranchOutcomes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outcomes = outcomes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (kernel_check := KERNEL_CHECKS.get(func)) is not None:
            self.outcomes.check(*kernel_check(*args, **kwargs), user_frame())
        return func(*args, **kwargs)


class _Ops(TorchDispatchMode):
    """Refuses writes to tensors that are neither stand-ins, nor their states, nor made by the step."""

    def __init__(self, stepping: OptimizerTracer, free: CapturedConstants | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stepping, self.free = stepping, free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.free is not None:
            self.free.check(func, args, kwargs)
        elif func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                self.stepping.check_written(x)
        return func(*args, **kwargs)
