"""Ctrl-C at chosen instructions of a Graph's calls: afterwards all must work, or be refused with the reason.

Python handles a signal between two instructions: as a function begins, after a call, at the end of a turn of a loop.
All such places of a call in graphzero, and in torch's and Python's context managers, are written down in an undisturbed
run.  Then, one after another, the signal is raised at a place, by C code as the kernel's handler does, so that
KeyboardInterrupt comes exactly where it may.  After it, while the exception is still held, as a prompt holds it:

* torch and Python are as before: gradients on, no mode, no autocast, the collector of garbage at work, same streams;
* another Graph, and plain torch, work;
* the same call again gives what it gives undisturbed, from the same state; or, where the update was under way, it is
  refused with the sentence that says so, until a checkpoint has been loaded.
"""

from __future__ import annotations

import copy
import ctypes
import dis
import gc
import random
import signal
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import graphzero as gz

CHECKED = frozenset({"RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "CALL_KW"})  # where signals are handled
WATCHED = (
    str(Path(gz.__file__).parent), "contextlib.py", "torch/overrides.py", "torch/utils/_python_dispatch.py",
    "torch/autograd/grad_mode.py", "torch/amp/autocast_mode.py", "torch/utils/_contextlib.py",
)  # fmt: skip
_TRIP = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.py_object)(("PyErr_SetInterruptEx", ctypes.pythonapi))


@dataclass
class Places:
    """Counts instructions of watched code; at the one numbered ``at`` it raises SIGINT at the instruction after.

    found: (number of the instruction before, where) of each place where a signal would be handled, the first time that
    code comes there and the last.
    """

    at: int = -1
    count: int = 0
    found: dict[tuple[CodeType, int], list[int]] = field(default_factory=dict)
    where: str = ""
    _watched: dict[CodeType, bool] = field(default_factory=dict)
    _last: dict[FrameType, int] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._watched:
            self._watched[code] = any(name in code.co_filename for name in WATCHED)
        if not self._watched[code]:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            if self.at < 0:
                self._note(frame)
            elif self.count == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                return self._trip()
            self.count += 1
        elif event == "return":
            self._last.pop(frame, None)
        return self._instruction

    def _note(self, frame: FrameType) -> None:
        code, last = frame.f_code, self._last.get(frame)
        if last is not None and dis.opname[code.co_code[frame.f_lasti]] in CHECKED:
            known = self.found.setdefault((code, frame.f_lasti), [last])
            known[1:] = [last]
        self._last[frame] = self.count

    def _trip(self) -> Any:
        """A trace function that raises the signal in its first call, without an instruction of Python's."""

        class Held: ...

        held = [Held()]
        self._ref = weakref.ref(held[0], partial(_TRIP, signal.SIGINT))
        once = partial(print, file=SimpleNamespace(write=held.__init__))  # type: ignore[misc]
        sys.settrace(once)
        return once


def places_of(work: Callable[[], Any], places: Places | None = None) -> list[int]:
    """The numbers of its places; ``places`` has the code, too."""
    places = places or Places()
    sys.settrace(places)
    try:
        work()
    finally:
        sys.settrace(None)
    return sorted({number for numbers in places.found.values() for number in numbers})


def interrupted(work: Callable[[], Any], at: int) -> tuple[BaseException | None, str]:
    """The error that ``work`` raises with a signal at that place, and where that is."""
    places = Places(at)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(places)
        work()
    except BaseException as error:
        sys.settrace(None)
        return error, places.where
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
    return None, places.where


# ---- what is interrupted


class Train(gz.Graph):
    def __init__(self, model: nn.Module, stage: int = 1) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 3))
        self.config.enable_zero(stage=stage)

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


X = torch.linspace(-1, 1, 32).view(8, 4)


class Subject:
    """A Graph, and what an interrupted call of it is compared with."""

    def __init__(self, steps: int) -> None:
        self.graph = Train(model())
        for _ in range(steps):
            self.graph(X)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "saved"
        if steps:
            gz.save(self.graph, self.path)

    def step(self) -> float:
        return float(self.graph(X))

    def compile(self) -> None:
        self.graph.compile(X)

    def save(self) -> None:
        gz.save(self.graph, self.path)

    def load(self) -> None:
        gz.load(self.graph, self.path)

    def state_dict(self) -> None:
        self.graph.full_state_dict()

    def load_state_dict(self) -> None:
        self.graph.load_state_dict(SAVED[2])

    def full_parameters(self) -> None:
        with self.graph.full_parameters():
            self.graph.model(X)

    def check(self) -> None:
        gz.check(self.graph, X)


WORKS: dict[str, tuple[Callable[[Subject], Any], int]] = {
    "first step": (Subject.step, 0),
    "compile": (Subject.compile, 0),
    "step": (Subject.step, 2),
    "state_dict": (Subject.state_dict, 2),
    "load_state_dict": (Subject.load_state_dict, 2),
    "full_parameters": (Subject.full_parameters, 2),
    "save": (Subject.save, 2),
    "load": (Subject.load, 2),
    "check": (Subject.check, 2),
}
SAVED: dict[int, dict[str, Any]] = {}  # after so many steps
LOSSES: list[float] = []


def know_undisturbed() -> None:
    if not LOSSES:
        graph = Train(model())
        for step in range(6):
            SAVED[step] = copy.deepcopy(graph.full_state_dict())
            LOSSES.append(float(graph(X)))


def surroundings() -> dict[str, Any]:
    """State of torch and Python that an interrupt must leave as it was."""
    return {
        "gradients": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(),
        "function modes": torch._C._len_torch_function_stack(), "modes": torch._C._len_torch_dispatch_stack(),
        "autocast": torch.is_autocast_enabled("cpu"), "collector": gc.isenabled(),
        "attention": nn.functional.scaled_dot_product_attention, "backward": Tensor.backward,
        "apply": nn.Module._apply, "read": nn.Module.__getattribute__, "batch norm": nn.BatchNorm1d.forward,
        "compiling": torch.compiler._is_compiling_flag, "asks": torch.compiler.is_compiling,
        "fast path": torch.backends.mha.get_fastpath_enabled(), "onednn": torch._C._get_mkldnn_enabled(),
        "hooks": len(_global_optimizer_pre_hooks), "fakes": vars(torch._subclasses)["FakeTensor"],
        "stream": torch.random.get_rng_state().sum().item(), "dtype": torch.get_default_dtype(),
        "seed": torch.manual_seed, "check": torch._check_with, "engine": torch.autograd._engine_run_backward,
        "step": "step" in vars(torch.optim.AdamW), "zero_grad": nn.Module.zero_grad,
    }  # fmt: skip


def trial(name: str, at: int) -> tuple[str, str]:
    """Outcome of an interrupt at a place: "worked", "refused", "unnoticed" or what is wrong; and the place."""
    work, steps = WORKS[name]
    subject = USED.pop(name, None) or Subject(steps)
    if steps:
        subject.graph.load_state_dict(copy.deepcopy(SAVED[steps - 1]))
        subject.step()  # what the load has let go of is bound again
    before = surroundings()
    error, where = interrupted(lambda: work(subject), at)
    wrong = [key for key, x in surroundings().items() if x is not before[key] and x != before[key]]
    if wrong:
        return f"left changed: {', '.join(wrong)}", where
    if error is None:
        return "unnoticed", where
    if not isinstance(error, KeyboardInterrupt):
        return f"raised {type(error).__name__}: {str(error)[:120]}", where
    try:
        plain()
        try:
            subject.graph.compile(X)
        except gz.ConfigError as refused:
            assert "within full_parameters()" in str(refused), refused
            error = error.with_traceback(None)  # the block was not left, and what was raised refers to it
        end = again(name, subject, steps)
        if steps:
            USED[name] = subject
        return end, where
    except BaseException as wrong_one:
        return f"then {type(wrong_one).__name__}: {str(wrong_one)[:160]}", where


USED: dict[str, Subject] = {}  # one that has been interrupted, and works
OTHER: dict[str, Train] = {}


def plain() -> None:
    """Another Graph, and plain torch."""
    other = OTHER.setdefault("graph", Train(model(), stage=2))
    other.load_state_dict(copy.deepcopy(SAVED[0]))
    assert abs(float(other(X)) - LOSSES[0]) < 1e-6
    eager = model()
    eager(X).square().mean().backward()
    assert all(p.grad is not None for p in eager.parameters())


def again(name: str, subject: Subject, steps: int) -> str:
    work, _ = WORKS[name]
    taken = int(next(iter(subject.graph._source.optimizers)).optimizer.state.get(first(subject), {}).get("step", 0))
    try:
        loss = subject.step()
    except gz.GraphZeroError as error:
        assert "in the middle of its update" in str(error) or "ended half way" in str(error), error
        subject.graph.load_state_dict(copy.deepcopy(SAVED[steps]))
        taken, loss = steps, subject.step()
        refused = True
    else:
        refused = False
    assert taken in (steps, steps + 1), taken
    assert abs(loss - LOSSES[taken]) < 1e-6, f"loss {loss}, undisturbed {LOSSES[taken]}, after {taken} steps"
    work(subject)
    loaded = name in ("load", "load_state_dict")
    now = steps if loaded else taken + 1 + ("step" in name)
    assert abs(subject.step() - LOSSES[now]) < 1e-6, f"the loss after {name}"
    return "refused" if refused else "worked"


def first(subject: Subject) -> Tensor:
    return next(iter(subject.graph.model.parameters()))


def sweep(name: str, count: int, seed: int) -> Iterator[tuple[int, str, str]]:
    know_undisturbed()
    work, steps = WORKS[name]
    WORKS[name][0](Subject(steps))  # what is kept for the process is there
    subject = Subject(steps)
    if steps:
        subject.step()
    places = places_of(lambda: work(subject))
    if count and len(places) > count:
        places = sorted(random.Random(seed).sample(places, count))
    for at in places:
        yield at, *trial(name, at)


def run_sweep(name: str, count: int, seed: int) -> list[str]:
    """A line for each interrupt that ended otherwise than it should.  count: of the places; 0: all."""
    bad = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, end, where in sweep(name, count, seed):
            if end not in ("worked", "refused", "unnoticed"):
                bad.append(f"{name}, {at}, {where}: {end}")
    return bad
