"""Host numbers that a recorded step reads from memory: a learning rate changes from step to step, a recording does not.

A number that an op is given as a Python number becomes part of a recording.  So a number that changes is given, while
the step is recorded, as a ``Fed``: a float with 0-d tensors next to it that hold its value.  ``Feeding`` watches
for calls with one and calls, instead, the form of the op that reads a tensor.  ``FORMS`` lists the ops that have such
a form; a number that goes into any other op stays a constant, see ``constants``.  When which number is fed is
``replay``'s to say.

In 16-bit types a number counts with more digits than the type has, where a 0-d tensor would be rounded to it first (a
factor of 0.9997 to 1).  There the number is a tensor of one float32 element that takes part in promotion, and the
result is rounded into ``out``, as it is for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import adam, adam_rounded

_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)


class Cells:
    """The values of numbers on a device: a 0-d tensor for each number and dtype that an op has asked for.

    is_frozen: whether a step is being recorded, so that nothing can be filled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_frozen = device, False
        self._cells: dict[int, dict[torch.dtype, Tensor]] = {}

    def cell_of(self, number: Fed, dtype: torch.dtype) -> Tensor:
        known = self._cells.setdefault(number.place, {})
        if dtype not in known:
            if self.is_frozen:
                raise RuntimeError(f"no run before this recording has read the number {float(number)} as {dtype}")
            known[dtype] = torch.full((), float(number), dtype=dtype, device=self.device)
        return known[dtype]

    def fill(self, numbers: Mapping[int, Any]) -> None:
        """Give all cells of these numbers, by place, their values; on CUDA without waiting for anything."""
        for place in self._cells.keys() & numbers.keys():
            for cell in self._cells[place].values():
                cell.fill_(numbers[place])


class Fed(float):
    """A number, and the cells that hold it; ``place`` is its place in environments."""

    place: int
    cells: Cells

    @classmethod
    def at_place(cls, number: float, place: int, cells: Cells) -> Fed:
        fed = cls(number)
        fed.place, fed.cells = place, cells
        return fed


@dataclass(frozen=True)
class _Form:
    """``call(number, *other arguments, out=None or a tensor)``.  narrow: also for results of 16 bits."""

    call: Callable[..., Any]
    narrow: bool = False


# By the op's name and where the number is: its index among the arguments, or its keyword.
FORMS: Mapping[tuple[str, Any], _Form] = {
    ("mul", 1): _Form(lambda k, x, out: torch.mul(x, k, out=out), narrow=True),
    ("div", 1): _Form(lambda k, x, out: torch.div(x, k, out=out), narrow=True),
    ("add", 1): _Form(lambda k, x, out: torch.add(x, k, out=out), narrow=True),
    ("sub", 1): _Form(lambda k, x, out: torch.sub(x, k, out=out), narrow=True),
    ("rsub", 1): _Form(lambda k, x, out: torch.sub(k, x, out=out), narrow=True),
    ("add", "alpha"): _Form(lambda k, x, y, out: torch.addcmul(x, y, k, out=out), narrow=True),
    ("pow", 0): _Form(lambda k, x, out: torch.pow(k, x, out=out)),
    ("pow", 1): _Form(lambda k, x, out: torch.pow(x, k, out=out)),
    ("lerp", 2): _Form(lambda k, x, y, out: torch.lerp(x, y, k, out=out)),
    ("addcmul", "value"): _Form(lambda k, x, y, z, out: torch.addcmul(x, y * k, z, out=out)),
    ("addcdiv", "value"): _Form(lambda k, x, y, z, out: torch.addcdiv(x, y * k, z, out=out)),
}
_ADAM: Mapping[str, Callable[..., Any]] = {
    "adam": adam.adam,
    "adam_": adam.adam_,
    "adam_rounded": adam_rounded.adam_rounded,
    "adam_rounded_": adam_rounded.adam_rounded_,
}
_RATE = 6  # index of the rate among their arguments, which torch's fused kernel reads as float32


def constants(graph: StepGraph) -> dict[str, fx.Node | None]:
    """Host numbers that ops read, by name: the first op that needs it as a constant, or None for a number to be fed."""
    first_reader: dict[str, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not value.is_scalar(node):
            read = [arg for arg in value.flat_nodes((node.args, node.kwargs)) if value.is_scalar(arg)]
            for number in dict.fromkeys(one for one in read if one.target is not ops.micro_batch):  # the same each time
                takes = read.count(number) == 1 and _takes(node, number)
                first_reader[number.name] = first_reader.get(number.name) or (None if takes else node)
    return first_reader


def _takes(node: fx.Node, number: fx.Node) -> bool:
    """Return whether there is a form of the op that reads ``number`` from memory."""
    kwargs = value.own_kwargs(node)
    at = next((key for key, arg in (*enumerate(node.args), *kwargs.items()) if arg is number), None)
    target, tensors = node.target, value.tensor_operands(node)
    if at is None or not isinstance(target, torch._ops.OpOverload):
        return False
    if target._opname in _ADAM:
        return target.namespace == "graphzero" and at == _RATE
    form = FORMS.get((target._opname, at))
    if form is None or target.namespace != "aten" or not value.is_tensor(node) or set(kwargs) - {at}:
        return False
    dtypes = {value.tensor_type(x).dtype for x in (node, *tensors)}
    return len(dtypes) == 1 and dtypes <= {*_WIDE, *(_NARROW if form.narrow else ())}


class Feeding(TorchFunctionMode):
    """While it is on, ops that are given a ``Fed`` read it from memory.  seen: places of those that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = next((key for key, arg in (*enumerate(args), *kwargs.items()) if isinstance(arg, Fed)), None)
        if at is None:
            return func(*args, **kwargs)
        name = getattr(func, "_opname", func.__name__)
        number: Fed = args[at] if isinstance(at, int) else kwargs[at]
        self.seen.add(number.place)
        if name in _ADAM:
            return _ADAM[name](*args[:_RATE], number.cells.cell_of(number, torch.float32), *args[_RATE + 1 :], **kwargs)
        rest = [arg for arg in args if arg is not number]
        return _call(FORMS[name.removesuffix("_"), at], number, rest, rest[0] if name[-1] == "_" else kwargs.get("out"))


def _call(form: _Form, number: Fed, rest: list[Any], out: Tensor | None) -> Any:
    x: Tensor = rest[0]
    if x.dtype not in _NARROW:
        return form.call(number.cells.cell_of(number, x.dtype), *rest, out=out)
    cell = number.cells.cell_of(number, torch.float32).view((1,) * x.dim())
    return form.call(cell, *rest, out=torch.empty_like(x) if out is None else out)
