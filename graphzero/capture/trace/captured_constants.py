"""Tensors that build reads and that are not parameters, buffers or inputs of the step.

They are constants of the graph.  A write to one is refused, because the graph has no name for the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture.guards.guarded_values import ObjectIdentity, tensor_identity
from graphzero.capture.objects.array_snapshot import address_of_array, size_of_array
from graphzero.capture.objects.object_snapshot import TensorSnapshot
from graphzero.capture.problems import problem, problem_here
from graphzero.errors import CaptureError
from graphzero.ir.storage.overlap import Regions, shares_elements
from graphzero.sbp.op_call import instances_in

_WRITE_HINT = (
    "Keep what build changes in a buffer of a module (self.register_buffer(name, tensor)), which a step may change in "
    "place, or write to a copy: x = x.clone()"
)
_SHARED_ELEMENTS_HINT = (
    "What is in an element that is many, as after expand, depends on the order of writes. Make them apart first: "
    "x = x.expand(sizes).clone()"
)
_SHARED_HINT = (
    "Use the parameter or buffer itself, by the name that its module has for it: a graph follows names, and what it "
    "writes there may be in other memory than this tensor's"
)
_FOREIGN_HINT = (
    "Assign the module that owns it to the Graph in __init__ (self.model = model), or call .detach() on it outside of "
    "build to use its present value as a constant"
)
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[union-attr]
_SET_FLAG: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_FLAGS = frozenset({_SET_FLAG, Tensor.requires_grad_})
_LIFT = torch.ops.aten.lift_fresh.default
_AS_NUMPY: Any = (Tensor.numpy, Tensor.__array__)


@dataclass(frozen=True)
class ConstantMessages:
    """Words in errors for the traced function, tensors that it may not write, and parameters that it does not have."""

    who: str = "build"
    written: str = "not a buffer of its modules"
    write_hint: str = _WRITE_HINT
    foreign: str = "belongs to no module of this Graph"
    foreign_hint: str = _FOREIGN_HINT


_OF_BUILD = ConstantMessages()


class CapturedConstants:
    """Constants that one tracing of build meets. ``put_back`` is called at the end.

    mode: of the fakes.  held: parameters and buffers of the step by path, of which those that the step may change must
    not be met under another name.  words: of errors.
    """

    def __init__(
        self, mode: _compat.FakeTensorMode, tensors: Mapping[str, Tensor], words: ConstantMessages = _OF_BUILD
    ) -> None:
        self.mode, self.words = mode, words
        self.held = Regions(tensors)
        self.flags: dict[int, TensorSnapshot] = {}
        self._known: dict[int, Tensor] = {}
        self._storages: dict[int, Tensor] = {}  # of their fakes, which views of them share
        self._lifted: list[Tensor] = []  # in memory of other code
        self._shown = False  # as numpy arrays

    # ---- ops

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse a write to a free tensor or to shared elements, and a use of a free one that requires a gradient."""
        if func is _LIFT:  # what torch.tensor has made just now
            return
        for x in instances_in((*args, *kwargs.values()), Tensor):
            if not isinstance(x, _compat.FakeTensor) and id(x) not in self._known:
                self._meet(x)
        if func._schema.is_mutable:
            how = func._schema.name.split("::")[1]
            for x in written_by(func, args, kwargs):
                if not isinstance(x, _compat.FakeTensor) or _compat.storage_id(x) in self._storages:
                    raise self._write_problem(x, how)
                if x.layout is torch.strided and shares_elements(x):
                    what = f"{self.words.who} writes in place to elements of {list(x.shape)} that share memory: {how}"
                    raise problem_here(what, _SHARED_ELEMENTS_HINT)

    def note_result(self, func: Any, args: Any, result: Any) -> None:
        """Look at what an op has made: torch.from_numpy gives a tensor over memory of other code."""
        if func is _LIFT and not args[0].untyped_storage().resizable():
            self._storages[_compat.storage_id(result)] = result
            self._lifted.append(args[0])

    def lies_in(self, array: Any) -> bool:
        """Return whether a constant lies in the memory of an array: numpy's, an ``array.array`` or a ``bytearray``."""
        start, end = address_of_array(array), address_of_array(array) + size_of_array(array)
        return any(x.data_ptr() < end and start < x.data_ptr() + x.nbytes() for x in self._memory())

    def is_whole(self, array: Any) -> bool:
        """Return whether a constant is all of an array, so that every step reads what is in the array then."""
        start, size = address_of_array(array), size_of_array(array)
        return any(x.data_ptr() == start and x.nbytes() >= size for x in self._memory())

    def _memory(self) -> Iterator[torch.UntypedStorage]:
        constants = (*self._lifted, *self._known.values())
        return (x.untyped_storage() for x in constants if x.layout is torch.strided)

    def _meet(self, x: Tensor) -> None:
        if isinstance(x, nn.Parameter) or (x.requires_grad and torch.is_grad_enabled()):
            kind = "a parameter" if isinstance(x, nn.Parameter) else "a tensor that requires a gradient,"
            what = f"{self.words.who} uses {kind} of shape {list(x.shape)} that {self.words.foreign}"
            raise problem_here(what, self.words.foreign_hint)
        shared = self.held.meeting(x)
        if shared is not None:
            shape = list(x.shape)
            what = f"{self.words.who} uses a tensor of shape {shape} that shares memory with {shared}, but is not it"
            raise problem_here(what, _SHARED_HINT)
        with _compat.without_modes():  # the fake of a view is made by ops, which are none of build's
            fake = self.mode.fake_tensor_converter.from_real_tensor(self.mode, x)
        self._known[id(x)], self._storages[_compat.storage_id(fake)] = x, fake

    def _write_problem(self, x: Tensor, how: str) -> CaptureError:
        what = f"{self.words.who} writes to a tensor of shape {list(x.shape)} that is {self.words.written}: {how}"
        return problem_here(what, self.words.write_hint)

    # ---- calls

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a function of torch on a free tensor, which is not always an op."""
        x = args[0]
        if func == _SET_DATA:
            raise self._write_problem(x, ".data = ...")
        if func == _SET_GRAD and args[1] is not x.grad:
            raise self._write_problem(x, ".grad = ...")
        if func in _FLAGS and x.is_leaf:
            self.flags.setdefault(id(x), TensorSnapshot(x))
        result = func(*args, **kwargs)
        if func in _AS_NUMPY:
            result.setflags(write=False)
            self._shown = True
        return result

    def problem_of(self, error: Exception, where: list[str]) -> CaptureError | None:
        """The problem after an error that numpy raised for a write to the memory of a free tensor."""
        if self._shown and isinstance(error, ValueError) and "read-only" in str(error):
            return problem("build writes to a tensor that is not a buffer of its modules: .numpy()", _WRITE_HINT, where)
        return None

    def has_met(self, x: Any) -> bool:
        """Return whether build has read the values of ``x``, which is a constant of the graph then."""
        return id(x) in self._known

    def identities(self) -> list[tuple[Tensor, ObjectIdentity]]:
        """Each constant, with its identity and version."""
        return [(x, tensor_identity(x)) for x in self._known.values()]

    def restore(self) -> None:
        for snapshot in self.flags.values():
            snapshot.restore()


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors to which an op writes."""
    positions, names = _written(func)
    written = [args[i] for i in positions if i < len(args)] + [kwargs[n] for n in names if n in kwargs]
    yield from instances_in(written, Tensor)


@cache
def _written(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Arguments that an op writes to: positions, names."""
    arguments = op._schema.arguments
    written = [(i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
    return tuple(i for i, _ in written), tuple(name for _, name in written)
