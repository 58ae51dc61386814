"""Reads of tensor values in build: as a constant, a check, a text, or refused.

* A tensor that build made of Python numbers alone has a value while it is traced.
* A check, a condition that only raises, becomes an op that raises when the step runs.
* ``.item()`` gives a ``HostNumber``, which can be computed with and checked.
* The text of a tensor shows its shape.  It is made once, when the step is captured.
* Everything else is refused at its line.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.annotations.local_regions import condition_of_all_ranks
from graphzero.capture.host_values.branches import caller, check_at
from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.problems import problem, problem_here
from graphzero.errors import CaptureError
from graphzero.ir.source_location import is_project, user_frame
from graphzero.ops import CHECK

CONSTANT = 1 << 16  # elements of a tensor of Python's numbers that is known while build is traced
# The same of a batch of places of tokens, of at most so many rows: models look whether documents begin among them, and
# make a mask of all pairs of tokens where that is not known.
PLACES, ROWS = 1 << 25, 1 << 10
_MOST = 1024  # numbers that one .tolist() may give

_HINT = (
    "A graph is written down before it runs, so build cannot look at values. Return the tensor from build and look "
    "at it outside; for a branch use torch.where(condition, a, b). What only raises, as assert, may look"
)
_OF_INPUTS = (
    "A graph is written down before it runs, so build cannot look at values. This one follows from the inputs of build "
    "alone: compute what depends on it before the call, outside of build, and pass that in, as models take position "
    "ids that are made already; for a branch use torch.where(condition, a, b). What only raises, as assert, may look"
)
_OF_DRAWS = (
    "A graph is written down before it runs, so build cannot look at values. This one is drawn at random: draw it with "
    "Python's random before the call and pass it in, or choose by torch.where(drawn < p, a, b)"
)
aten = torch.ops.aten
FACTORIES = frozenset({
    aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.scalar_tensor.default, aten.linspace.default, aten.eye.default, aten.eye.m,
})  # fmt: skip

_TRUTH = "bool(tensor), as in `if tensor:`"
_AS_NUMPY: Any = (Tensor.numpy, Tensor.__array__)


def _is_small(shape: Sequence[int]) -> bool:
    """Return whether a tensor of Python's numbers is known."""
    count, second = math.prod(shape), sorted(shape)[-2:-1]
    return bool(count <= CONSTANT or (count <= PLACES and all(rows <= ROWS for rows in second)))


def _makes_small(tensors: list[Any]) -> bool:
    """Return whether what an op makes of these tensors is known."""
    try:
        shape: Any = torch.broadcast_shapes(*(x.shape for x in tensors))
        return _is_small(shape)
    except RuntimeError:
        return bool(math.prod(x.numel() for x in tensors) <= CONSTANT)


def _filled(message: str, variables: Mapping[str, Any]) -> str:
    """Message of a check, with the words and integers that it refers to as ``{param}``."""

    def word(match: re.Match[str]) -> str:
        value = variables.get(match[1])
        return str(value) if type(value) in (str, int, bool) else match[0]

    return re.sub(r"\{(\w+)\}", word, message)


def read_problem(what: str, where: list[str] | None = None, hint: str = _HINT) -> CaptureError:
    """build needs the value of a tensor; ``where``: its lines, by default those that run now."""
    text = f"build reads a value: {what}"
    return problem_here(text, hint) if where is None else problem(text, hint, where)


class ValueReads:
    """Reads of values in one trace of build.

    checks: the ops that check, in program order.  paused: whether what runs has run before, as in recomputation.
    sources: of what kind each input of the trace is: "input", "state" or "seed".  texts: the user's lines that have
    made texts of values.
    """

    def __init__(self) -> None:
        self.checks: list[Tensor] = []
        self.sources: list[str] = []
        self.texts: dict[str, None] = {}
        self.taker = ""  # the function of torch that is given a number of a tensor
        self.paused: Callable[[], bool] = lambda: False
        self.handlers: dict[Any, Callable[..., Any]] = {
            Tensor.__bool__: self.truth,
            Tensor.item: self.item,
            Tensor.tolist: self.tolist,
            Tensor.__repr__: self.text,
            Tensor.__format__: self.text,
            torch.equal: self.equal,
            torch.allclose: self.allclose,
            _compat.ASSERT_ASYNC: lambda ok, message="": self.check(ok, message),
            Tensor.__float__: self._refuses("float(tensor)"),
            Tensor.__int__: self._refuses("int(tensor)"),
            Tensor.__index__: self._refuses("a tensor as an index or size"),
            Tensor.numpy: self._refuses(".numpy()"),
            Tensor.__array__: self._refuses("numpy of a tensor"),
        }

    def problem(self, what: str, x: Tensor) -> CaptureError:
        """build needs the value of ``x``."""
        sources = _compat.traced_from(x)
        kinds = {"state"} if sources is None else {self.sources[i] for i in sources}
        hint = _OF_DRAWS if "seed" in kinds else _OF_INPUTS if kinds == {"input"} else _HINT
        return read_problem(what, hint=hint)

    def host_problem(self, x: Tensor) -> CaptureError:
        """An op that takes numbers of Python's needs that of ``x``."""
        taker = f", as {self.taker} takes sizes and indices" if self.taker else ""
        return self.problem(f"a number of a tensor on the host{taker}", x)

    def _refuses(self, what: str) -> Callable[..., Any]:
        def refuse(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise self.problem(what, x)

        return refuse

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func``, one of ``handlers``, of a fake tensor."""
        known = [_compat.constant_of(x) if isinstance(x, Tensor) else x for x in args]
        if all(x is not None for x in known):
            with _compat.no_modes():
                result = func(*known, **kwargs)
            if func in _AS_NUMPY:
                result.setflags(write=False)
            return result
        return self.handlers[func](*args, **kwargs)

    # ---- values

    def item(self, x: Tensor) -> HostNumber:
        return HostNumber.read_tensor(x, self)

    def tolist(self, x: Tensor) -> Any:
        if x.numel() > _MOST or x.is_complex():
            raise self.problem(".tolist()", x)
        return self.item(x) if x.dim() == 0 else [self.tolist(row) for row in x.unbind()]

    def equal(self, a: Tensor, b: Tensor) -> Any:
        with torch.no_grad():
            return a.shape == b.shape and HostNumber((a == b).all(), self)

    def allclose(self, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return HostNumber(torch.isclose(a, b, *args, **kwargs).all(), self)

    def text(self, x: Tensor, *_: Any, **__: Any) -> str:
        frame = caller()
        if frame is not None and is_project(
            frame.f_globals.get("__name__")
        ):  # a library's is a check's message, mostly
            self.texts[user_frame()] = None
        return f"tensor(..., size={tuple(x.shape)}, dtype={x.dtype})"

    def know(self, tensor: Any, func: Any, args: Any, kwargs: Any) -> None:
        """``func`` has made a tensor of numbers: keep them."""
        if isinstance(tensor, _compat.FakeTensor) and _is_small(tensor.shape):
            flat = pytree.arg_tree_leaves(*args, **kwargs)
            if not any(isinstance(x, (torch.SymFloat, torch.SymInt)) for x in flat):
                with _compat.no_modes():
                    _compat.keep_constant(tensor, func(*args, **{**kwargs, "device": "cpu"}))

    def bounded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` of its arguments; of known values nothing is computed that is too large to be known itself."""
        known = [x for x in args if isinstance(x, _compat.FakeTensor) and _compat.constant_of(x) is not None]
        if len(known) < 2 or _makes_small(known):
            return func(*args, **kwargs)
        with _compat.unknown(known):
            return func(*args, **kwargs)

    def warn_of_texts(self) -> None:
        """A text is made once, of a value that is not there yet."""
        if self.texts:
            warnings.warn(
                f"build converts a tensor to text ({', '.join([*self.texts][:4])}), only once, while it is traced: it "
                "shows the shape, and later steps print and log nothing. Return the value and look at it outside",
                stacklevel=2,
            )

    # ---- conditions

    def truth(self, x: Tensor) -> bool:
        """The truth of a condition with which the step goes on, if it is a check."""
        frame = caller()
        branch = check_at(frame) if frame is not None and x.numel() == 1 else None
        if frame is None or branch is None:
            raise self.problem(_TRUTH, x)
        with torch.no_grad():
            x = x.detach().reshape(()).bool()
            self.check(x.logical_not() if branch.when else x, _filled(branch.message, frame.f_locals))
        return not branch.when

    def check(self, ok: Tensor, message: str = "") -> None:
        """The step raises when it runs, where ``ok``, of one element, is 0; in a region, where that of any rank is."""
        if not self.paused():
            with torch.no_grad():
                self.checks.append(CHECK(condition_of_all_ranks(ok.detach().reshape(()).bool()), message or "a check"))

    def check_number(self, ok: Callable[[], Tensor], message: str) -> None:
        """The step raises when it runs, where Python's arithmetic on numbers of tensors would: ``ok`` is 0 there."""
        self.check(ok(), message)

    @_compat.contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, ``torch._check`` and its kind take conditions that are not known yet."""

        def takes_numbers(function: Callable[..., bool]) -> Callable[..., Any]:
            def look(x: Any) -> Any:
                if type(x) is not HostNumber:
                    return function(x)
                return HostNumber(getattr(torch, function.__name__)(x.tensor), self)

            return look

        def asserts(original: Callable[..., None]) -> Callable[..., None]:
            def look(condition: Any, message: Any = "") -> None:
                if isinstance(condition, (Tensor, HostNumber)) and _compat.constant_of(condition) is None:
                    self._checked(condition, "AssertionError", message)
                else:
                    original(condition, message)

            return look

        functions = [(math, one.__name__, takes_numbers(one)) for one in (math.isnan, math.isinf, math.isfinite)]
        patches = [*functions, (torch, "_assert", asserts(_compat.ASSERT))]
        with (
            _compat.patched_all(patches),
            _compat.checks_given_to(self._checked_by_torch),
            _compat.validity_as_tensor(),
        ):
            yield

    def _checked_by_torch(self, error: type[Exception], condition: Any, message: Any) -> bool:
        """Return whether a condition of ``torch._check`` is one that only the step knows, and has been noted."""
        if type(condition) is not HostNumber:
            return False
        self._checked(condition, error.__name__, message)
        return True

    def _checked(self, condition: Any, kind: str, message: Any) -> None:
        before = dict(self.texts)
        said = str(message() if callable(message) else message or "a check is not met")
        self.texts = before
        self.check(condition.tensor if type(condition) is HostNumber else condition, f"{kind}: {said}")
