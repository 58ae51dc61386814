"""Optimizer state before the first step.

torch makes state inside the first step, a graph needs it before.  The keys and shapes are learnt from a step on
fakes (``optimizer.py``), the values here, from a twin: the same class and settings on tiny real parameters.  What the
twin first puts in its state is the initial value if it is one number; else 0 is tried (SGD's momentum buffer, first a
copy of the gradient).  Either way the twin must then step from the filled state exactly as it stepped from none; where
it does not, no number fills the state, and the first step is a program of its own, which makes it (``states.py``).
"""

from __future__ import annotations

import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphzero.capture.optimizer.hyperparameters import OF_STATE, is_number, with_numbers
from graphzero.capture.optimizer.stepping import OptimizerTracer
from graphzero.capture.problems import first_line, problem
from graphzero.errors import CaptureError
from graphzero.ir.source_location import line_of

SIDE = 2  # length of each dim of a twin's parameter: enough to tell a constant from an identity matrix


class ObservedDict(dict[str, Any]):
    """A dict of which subclasses record each new entry: also what ``setdefault`` and ``update`` put in goes through
    ``__setitem__``."""

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, entry in dict(*args, **kwargs).items():
            self[key] = entry


class _RecordedDict(ObservedDict):
    """The state of one parameter; remembers what was first put under each key."""

    def __init__(self, start: dict[str, Any]) -> None:
        super().__init__(start)
        self.first: dict[str, Any] = {key: _copy(x) for key, x in start.items()}

    def __setitem__(self, key: str, entry: Any) -> None:
        if key not in self.first or self.first[key] is None:
            self.first[key] = _copy(entry)
        super().__setitem__(key, entry)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def initial_fill(stepping: OptimizerTracer, group: int, ndim: int) -> dict[str, float] | None:
    """State key -> the number that fills it before the first step, for parameters of ``ndim`` dims in ``group``.

    None where no numbers give torch's first step, or the twin cannot step.
    """
    try:
        fill = _fill_of_twin(stepping, group, ndim)
    except Exception:  # noqa: BLE001 - whatever a tiny parameter alone breaks; the step itself is traced elsewhere
        return None
    return None if fill is None else fill[0]


def _fill_of_twin(stepping: OptimizerTracer, group: int, ndim: int) -> tuple[dict[str, float], dict[str, Any]] | None:
    """Initial fills of a twin's state tensors, and the Python numbers in its state."""
    first = _run(stepping, group, ndim, seed=0)
    other = _run(stepping, group, ndim, seed=1)
    fills = {
        key: _common(entry, other.recorded.get(key))
        for key, entry in first.recorded.items()
        if isinstance(entry, Tensor)
    }
    for numbers in _candidates({key: x for key, x in first.recorded.items() if is_number(x)}):
        if not first.differs(_run(stepping, group, ndim, seed=0, fills={**fills, **numbers}, like=first)):
            return fills, numbers
    return None


def _candidates(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Candidates for the values of numbers before the first step: what the step writes first, or zeros."""
    return [recorded, {key: type(x)(0) for key, x in recorded.items()}] if recorded else [{}]


class _TwinStep:
    """group: the numbers of the parameter's group after the step; began: those that it began with, or first got."""

    def __init__(self, param: Tensor, recorder: _RecordedDict, group: _RecordedDict) -> None:
        self.param, self.recorded, self.state = param, recorder.first, dict(recorder)
        self.group = {key: x for key, x in group.items() if is_number(x)}
        self.began = {key: group.first[key] for key in self.group}
        counts = {key: x for key, x in recorder.items() if is_number(x)}
        self.group |= {OF_STATE + key: x for key, x in counts.items()}
        self.began |= {OF_STATE + key: recorder.first[key] for key in counts}

    def differs(self, other: _TwinStep) -> bool:
        states = any(differ(x, other.state.get(key)) for key, x in self.state.items())
        return states or self.group != other.group or differ(self.param, other.param)


def _run(
    stepping: OptimizerTracer, group: int, ndim: int, seed: int, fills: dict[str, float] | None = None,
    like: _TwinStep | None = None, numbers: Mapping[str, Any] | None = None,
) -> _TwinStep:  # fmt: skip
    """Run one step of a twin without state, or with the state of ``like`` filled with ``fills``.

    numbers: what its group holds besides what the user's does."""
    generator = torch.Generator().manual_seed(seed)
    groups, stand_ins, params = _twin_groups(stepping, group, ndim, generator)
    param, settings = params[0], _RecordedDict({**groups[group], **(numbers or {})})
    groups[group] = settings
    recorders = {x: _RecordedDict(start_of(stepping.optimizer, settings, x)) for x in params}
    if fills is not None and like is not None:
        recorders[param] = _RecordedDict(
            {
                key: torch.full_like(x, fills[key])
                if isinstance(x, Tensor)
                else fills.get(key, like.recorded.get(key, x))
                for key, x in like.state.items()
            }
        )
    with stepping.standing_in(groups, defaultdict(dict, recorders), stand_ins):
        stepping.take_step()
    return _TwinStep(param.detach(), recorders[param], settings)


def _twin_groups(
    stepping: OptimizerTracer, group: int, ndim: int, generator: torch.Generator
) -> tuple[list[dict[str, Any]], dict[int, Tensor], list[Tensor]]:
    """Groups with a tiny parameter of ``ndim`` dims in ``group``, alone unless the optimizer mixes parameters.

    Also what stands for what, by id, and the tiny parameters, that one first.
    """
    reals = stepping.groups[group]["params"]
    first = next((p for p in reals if p.dim() == ndim), None)
    stood_for = list(stepping.owned.values()) if stepping.mixes else [] if first is None else [first]
    dims = {id(p): ndim if p is first else p.dim() for p in stood_for}
    tiny = {key: tiny_parameter(dim, generator) for key, dim in dims.items()}
    alone = [tiny_parameter(ndim, generator)] if first is None else []
    groups = tiny_groups(stepping, tiny)
    groups[group]["params"] += alone
    own = tiny[id(first)] if first is not None else alone[0]
    return groups, tiny, [own, *(x for x in tiny.values() if x is not own)]


def tiny_groups(stepping: OptimizerTracer, tiny: Mapping[int, Tensor]) -> list[dict[str, Any]]:
    """The optimizer's groups with twins of parameters, by id, and numbers as numbers."""
    groups = []
    for group in stepping.groups:
        settings = with_numbers({**group, "params": [tiny[id(p)] for p in group["params"] if id(p) in tiny]}, {})
        groups.append({key: x if key == "params" else _number_of(x) for key, x in settings.items()})
    return groups


def tiny_parameter(ndim: int, generator: torch.Generator) -> Tensor:
    param = torch.nn.Parameter(torch.randn([SIDE] * ndim, generator=generator, dtype=torch.float64))
    param.grad = torch.randn([SIDE] * ndim, generator=generator, dtype=torch.float64)
    return param


def changed_numbers(optimizer: torch.optim.Optimizer, group: int, ndims: Iterable[int]) -> dict[str, Any]:
    """Key of each number of a group that a step changes -> what it is where the group lacks it, see ``Carried``.

    ndims: those of the group's parameters, each of which a twin steps alone; one that cannot says nothing.
    """
    numbers: dict[str, Any] = {}
    try:
        stepping = OptimizerTracer(optimizer)
    except CaptureError:  # capture says why
        return {}
    for ndim in ndims:
        try:
            with torch.random.fork_rng(devices=[]):
                changed = _changed_by_twin(stepping, group, ndim)
        except Exception:  # noqa: BLE001 - as in ``initial_fill``
            continue
        numbers = {**changed, **{key: x if changed.get(key, x) == x else None for key, x in numbers.items()}}
    return numbers


def _changed_by_twin(stepping: OptimizerTracer, group: int, ndim: int) -> dict[str, Any]:
    first = _run(stepping, group, ndim, seed=0)
    settings = stepping.groups[group]
    changed = {key: x for key, x in first.began.items() if key not in settings or first.group[key] != x}
    begin = dict.fromkeys(changed)
    if any(key.startswith(OF_STATE) for key in changed):
        fill = _fill_of_twin(stepping, group, ndim)
        begin |= {OF_STATE + key: x for key, x in (fill or ((), {}))[1].items()}
    lacked = {key: x for key, x in changed.items() if key not in settings and not key.startswith(OF_STATE)}
    for numbers in _candidates(lacked) if lacked else ():
        if not first.differs(_run(stepping, group, ndim, seed=0, numbers=numbers)):
            begin |= numbers
            break
    return begin


def start_of(optimizer: torch.optim.Optimizer, settings: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """The state that an optimizer makes for a parameter when it is constructed."""
    if not optimizer.state:  # else it is loaded, stepped, or made by __init__ as Adagrad does
        return {}
    known: Callable[..., Any] = type(optimizer).__init__
    accepted = inspect.signature(known).parameters
    plain = {k: optimizer.param_groups[0].get(k, x) for k, x in optimizer.defaults.items()}
    chosen = {k: settings.get(k, x) for k, x in plain.items() if k in accepted}
    chosen.update({k: None for k in ("foreach", "fused") if k in chosen})
    chosen.update({k: False for k in ("capturable", "differentiable") if k in chosen})
    try:
        return dict(type(optimizer)([param], **chosen).state.get(param, {}))
    except Exception:
        return {}


def _number_of(x: Any) -> Any:
    return float(x) if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta else x


def _common(entry: Tensor, other: Any) -> float:
    """The one number that fills both, or 0."""
    flat = torch.cat([entry.reshape(-1).double(), other.reshape(-1).double()]) if isinstance(other, Tensor) else entry
    return float(flat[0]) if flat.numel() and bool((flat == flat[0]).all()) else 0.0


def differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
    return isinstance(a, Tensor) or isinstance(b, Tensor)


def missing(optimizer: torch.optim.Optimizer, path: str, key: str) -> CaptureError:
    """The state of a parameter is there in part, and no number fills the rest."""
    return problem(
        f"the state of {type(optimizer).__name__} for {path} lacks {key!r}, and its initial value is not a constant: "
        "it begins as a copy of a gradient or a parameter",
        "load a checkpoint that holds the whole state of this parameter, or delete it to start again: "
        "optimizer.state.pop(p)",
    )


def cannot_step(optimizer: torch.optim.Optimizer, error: BaseException) -> CaptureError:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    where = [shown for code, line in reversed(frames) if (shown := line_of(code, line))]
    by_value = "Data" in type(error).__name__ or "data" in str(error) or where == []
    return problem(
        f"{type(optimizer).__name__}.step() cannot be traced as a graph: {first_line(error)}",
        _BY_VALUE if by_value else _BY_CALL,
        where[:3],
    )


_BY_VALUE = (
    "an optimizer inside a Graph may not branch on values of tensors (.item(), float(t)); keep counters in 0-d tensors "
    "and choose with torch.where, or step this optimizer outside of the Graph"
)
_BY_CALL = (
    "a Graph calls step() without a closure, on tensors that have shapes and no values yet; the exception above says "
    "what this step needs besides. Step an optimizer that needs more outside of the Graph"
)
