"""What watches the user's build while it is traced.

``UserCode`` sees calls as Python makes them: it stands in for parameters that are reached around the modules, puts in
our attention, and refuses what needs a value that does not exist yet.  ``Watch`` sees the ATen ops below autograd: it
marks each with phase and source, and refuses the ops whose result depends on data.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero import _compat
from graphzero.capture.attention import attention
from graphzero.capture.problems import problem_here
from graphzero.capture.source import user_frame
from graphzero.capture.unchecked import STAND_INS

aten = torch.ops.aten

_READS: dict[Any, str] = {
    Tensor.item: ".item()",
    Tensor.__bool__: "bool(tensor), as in `if tensor:`",
    Tensor.__float__: "float(tensor)",
    Tensor.__int__: "int(tensor)",
    Tensor.__index__: "a tensor as an index or size",
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "numpy of a tensor",
    Tensor.__repr__: "the text of a tensor (print, str, f-string)",
    Tensor.__format__: "the text of a tensor (print, str, f-string)",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
}
_DATA_SHAPED = {
    getattr(aten, name).default: name
    for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
}
_READ_HINT = (
    "A graph is written down before it runs, so build cannot look at values. Return the tensor from build and look "
    "at it outside; for a branch use torch.where(condition, a, b)"
)
_SHAPE_HINT = (
    "Keep shapes fixed: torch.where(mask, x, 0) in place of x[mask], weights that are 0 in place of dropped rows, "
    "or select outside of build and pass the result in"
)

_RENORM = "Leave out max_norm; to bound the rows that are used, divide the looked-up vectors by their norm"
_SPARSE = {aten.embedding.default: 4, aten._embedding_bag.default: 5}  # where the argument stands
_LENGTHS = {
    aten._pack_padded_sequence.default: "a packed sequence",
    aten._ctc_loss.default: "ctc_loss",
    aten._ctc_loss.Tensor: "ctc_loss",
}
_LENGTHS_HINT = (
    "Give the padded tensor to the layers and leave padding out of the loss by a mask; what needs the lengths as "
    "numbers on the host, as this does, runs outside of a Graph"
)
_DENSE = "Leave out sparse=True: ZeRO splits gradients and states, so a dense gradient costs little"


class UserCode(TorchFunctionMode):
    """Stands between build and torch.

    stand_ins: id of a real parameter or buffer of the Graph -> its fake.
    """

    def __init__(self, stand_ins: dict[int, Tensor], build: CodeType | None) -> None:
        super().__init__()
        self.stand_ins, self.build = stand_ins, build

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and args and isinstance(args[0], _compat.FakeTensor):
            raise problem_here(f"build reads a value: {_READS[func]}", _READ_HINT, self.build)
        if any(isinstance(arg, Tensor) and id(arg) in self.stand_ins for arg in args):
            args = tuple(self.stand_ins.get(id(arg), arg) if isinstance(arg, Tensor) else arg for arg in args)
        if kwargs and any(isinstance(arg, Tensor) and id(arg) in self.stand_ins for arg in kwargs.values()):
            kwargs = {name: self.stand_ins.get(id(arg), arg) for name, arg in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return STAND_INS.get(func, func)(*args, **kwargs)


class Watch(TorchDispatchMode):
    """Marks every op with phase and source.

    phase: what the following ops belong to.
    line: the user's line whose gradient is being computed, while backward runs.
    """

    def __init__(self, build: CodeType | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.build = "forward", build
        self.line = self.backward_line = ""
        self.running = False  # whether autograd runs
        self.lines: dict[int, str] = {}  # autograd sequence number -> source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refuse(func, args)
        source = user_frame()
        if self.phase == "forward":
            self.lines[_compat.sequence_number()] = source
        elif self.line and source == self.backward_line:
            source = self.line
        with _compat.annotate({"phase": self.phase, "source": source}):
            return func(*args, **(kwargs or {}))

    def follow(self, loss: Tensor) -> list[Any]:
        """Name the forward line of each op of the coming backward; returns hooks to remove."""
        self.backward_line = user_frame()
        hooks, seen, todo = [], set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
            line = self.lines.get(node._sequence_nr(), "")
            hooks.append(node.register_prehook(lambda grads, line=line: setattr(self, "line", line)))
        return hooks

    def _refuse(self, func: Any, args: Any) -> None:
        if func is aten._local_scalar_dense.default:
            raise problem_here("build reads a value of a tensor on the host", _READ_HINT, self.build)
        if func in _DATA_SHAPED or (func is aten.index.Tensor and _by_mask(args[1])):
            name = _DATA_SHAPED.get(func, "indexing by a boolean mask")
            raise problem_here(f"the shape of a result depends on data: {name}", _SHAPE_HINT, self.build)
        if func in _LENGTHS:
            raise problem_here(
                f"the shapes inside {_LENGTHS[func]} depend on lengths, which are data", _LENGTHS_HINT, self.build
            )
        if func is aten.embedding_renorm_.default:
            raise problem_here("an embedding with max_norm rewrites rows of its weight in forward", _RENORM, self.build)
        if _SPARSE.get(func, 99) < len(args) and args[_SPARSE[func]]:
            raise problem_here("an embedding with sparse=True makes a sparse gradient", _DENSE, self.build)
        for arg in pytree.arg_tree_leaves(*args):
            if isinstance(arg, nn.Parameter) and not isinstance(arg, _compat.FakeTensor):
                raise problem_here(
                    f"build uses a parameter of shape {list(arg.shape)} that belongs to no module of this Graph",
                    "Assign the module that owns it to the Graph in __init__ (self.model = model), or call "
                    ".detach() on it outside of build to use its present value as a constant",
                    self.build,
                )


def _by_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
