"""Modes that are active while build is traced.

``UserCodeMode`` sees calls of Python functions: it replaces parameters that are reached around the modules, calls
graphzero's attention op, and refuses reads of values that do not exist yet.  ``OpMode`` sees ATen ops below autograd:
it marks each op with phase and source, and refuses ops whose result's shape depends on data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero import _compat
from graphzero.capture.host_values.floats import has_inputs, numbers_of, symbols_of, tensor_of
from graphzero.capture.host_values.kernel_checks import KERNEL_CHECKS
from graphzero.capture.host_values.masks import (
    MaskedSelection,
    data_dependent_shape_problem,
    folded_call,
    has_mask,
    select_by_mask,
    write_by_mask,
)
from graphzero.capture.host_values.sync_free_functions import STAND_INS
from graphzero.capture.host_values.value_reads import FACTORIES, ValueReads
from graphzero.capture.problems import form_of, problem_here, record_problem, traced_code, user_lines, withdraw_problem
from graphzero.capture.trace.attention import attention
from graphzero.capture.trace.captured_constants import CapturedConstants
from graphzero.capture.trace.casts import ParameterCasts, replace_known_tensors
from graphzero.capture.trace.refusals import VARLEN_ATTENTION
from graphzero.errors import CaptureError
from graphzero.ir.aliases import UNMARKED, is_view
from graphzero.ir.source_location import running_module, user_frame
from graphzero.ops import CHECK

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default,
             aten.addmv.default, aten.dot.default, aten.convolution.default)  # fmt: skip
_PRODUCT_HINT = (
    "Cast one of them (x.float()), convert the modules before the first call (model.to(torch.float64)), or run the "
    "forward part under torch.autocast; a Graph over converted modules compiles once more"
)
_GENERATOR_HINT = (
    "Leave generator= out: what a Graph draws follows from torch.manual_seed and the step, and is the same on every "
    "placement; or draw outside of build and pass the result in"
)
_COLLECTIVE_HINT = (
    "Leave collectives out: build is written for one device and the whole batch, so sums and means are global as they "
    "are, and what moves between ranks is put in by the passes"
)
_MOVE_HINT = "Leave .to(device), .cuda() and device= out: a Graph keeps everything on the devices of its placement"
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_DATA_HINT = "Write into it instead: with torch.no_grad(): p.copy_(new), or p.mul_(factor)"

_SHAPE_HINT = (
    "Leave it as it is and go on with a view: y = x.t() in place of x.t_(), y = x[:, None] for x.unsqueeze_(1)"
)

_TENSORS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor")

_RENORM = "Leave out max_norm; to bound the rows that are used, divide the looked-up vectors by their norm"
_SPARSE = {aten.embedding.default: 4, aten._embedding_bag.default: 5}  # where the argument is
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


class UserCodeMode(TorchFunctionMode):
    """The mode between build and torch.

    stand_ins: id of a real parameter or buffer of the Graph -> its fake.  free: what it meets besides these.
    looks: what becomes of values that build looks at.  casts: of parameters, under mixed precision.  device: the
    placement's device type.
    """

    def __init__(
        self, stand_ins: dict[int, Tensor], free: CapturedConstants, value_reads: ValueReads, casts: ParameterCasts,
        device: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stand_ins, self.free, self.value_reads, self.device = stand_ins, free, value_reads, device
        self.casts, self.has_floats = casts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func``; of float inputs by their symbols, or where no symbol is taken, by their values."""
        kwargs = kwargs or {}
        if not (self.has_floats and has_inputs((args, kwargs))):
            return self._call(func, types, args, kwargs)
        try:
            return self._call(func, types, *symbols_of((args, kwargs)))
        except Exception as error:
            if isinstance(error, CaptureError):
                withdraw_problem(error)
            return self._call(func, types, *numbers_of((args, kwargs)))

    def _call(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if MaskedSelection in types:
            return MaskedSelection.__torch_function__(func, types, args, kwargs)
        if func in self.value_reads.handlers and args and isinstance(args[0], _compat.FakeTensor):
            return self.value_reads(func, args, kwargs)
        args, kwargs = self._stay(func, args, kwargs)
        args = self._stood_in(args)
        if kwargs:
            kwargs = dict(zip(kwargs, self._stood_in(kwargs.values()), strict=True))
        if func == _SET_DATA and isinstance(args[0], _compat.FakeTensor):
            what = "a parameter: p.data = ..." if isinstance(args[0], nn.Parameter) else "a tensor: x.data = ..."
            raise problem_here(f"build puts another tensor in {what}", _DATA_HINT)
        if func is Tensor.__setitem__ and write_by_mask(*args):
            return None
        if func is Tensor.__getitem__ and (rows := select_by_mask(self.value_reads, *args)) is not None:
            return rows
        if func is F.scaled_dot_product_attention:
            return self.casts.call(attention, args, kwargs)
        known = STAND_INS.get(func, func)
        if func in _TENSORS and isinstance(args[0], torch.SymFloat):
            return tensor_of(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and not isinstance(args[0], _compat.FakeTensor):
            return self.casts.call(known, args, kwargs, lambda *given, **named: self.free.call(known, given, named))
        return self.casts.call(known, args, kwargs)

    def _stood_in(self, args: Iterable[Any]) -> tuple[Any, ...]:
        """Arguments, lists of tensors among them, with the fakes in the place of real parameters and buffers."""
        return replace_known_tensors(args, self.stand_ins, lambda x: self.stand_ins[id(x)])

    def _stay(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call that stays where the graph is: the placement's device is the fakes' CPU."""
        if func is Tensor.cuda:
            self._check_device("cuda")
            return args[:1], {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._here(kwargs["device"])}
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], self._here(args[1]), *args[2:])
        return args, kwargs

    def _here(self, device: Any) -> Any:
        kind = torch.device(device).type if isinstance(device, (str, torch.device)) else device
        if kind in ("cpu", "meta") or not isinstance(kind, str):
            return device
        self._check_device(kind)
        return torch.device("cpu")

    def _check_device(self, kind: str) -> None:
        if kind != self.device:
            what = f"build moves a tensor to {kind}, but the Graph's placement is on {self.device}"
            raise problem_here(what, _MOVE_HINT)


class OpMode(TorchDispatchMode):
    """Marks every op with phase and source.

    phase: what the following ops belong to.
    modules: id of each module -> its path.
    line, module: the user's line whose gradient is being computed, and the module it is of, while backward runs.
    """

    def __init__(self, free: CapturedConstants, value_reads: ValueReads, modules: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.free, self.value_reads = "forward", free, value_reads
        self.modules = modules
        self.line = self.backward_line = self.module = ""
        self.running = False  # whether autograd runs
        self.views: dict[int, list[Tensor]] = {}  # of each storage
        self.given: dict[int, str] = {}  # id of a fake that stands for an input, parameter or buffer -> its name
        self.lines: dict[int, tuple[str, str]] = {}  # autograd sequence number -> source and module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := _compat.device_asked(func, args)) is not None:
            return device
        fold = folded_call(func, args, kwargs or {}) if _sized_by_values(func, args) else None
        if fold is None:
            self._refuse(func, args, kwargs)
        kernel_check = KERNEL_CHECKS.get(func)
        source = user_frame() if func is not CHECK and kernel_check is None else ", called from ".join(user_lines())
        module = running_module(self.modules, traced_code())
        if self.line and source == self.backward_line:
            source, module = self.line, self.module
        elif self.phase != "backward":
            self.lines[_compat.sequence_number()] = source, module
        before = (args[0].shape, args[0].stride()) if torch.Tag.inplace_view in func.tags else None
        with _compat.annotate({"phase": self.phase, "source": source, "module": module}):
            if kernel_check is not None:
                self.value_reads.check(*kernel_check(*args, **(kwargs or {})))
            result = fold() if fold else self.value_reads.bounded(func, args, kwargs or {})
        if before is not None and before != (result.shape, result.stride()):
            self._check_turned(args[0], func._schema.name.split("::")[1])
        if func not in (aten.detach.default, *UNMARKED) and is_view(func):  # what autograd takes for a view
            for x in result if isinstance(result, (list, tuple)) else [result]:
                self.views.setdefault(_compat.storage_id(x), []).append(x)
        self.free.note_result(func, args, result)
        if func in FACTORIES:
            self.value_reads.know(result, func, args, kwargs or {})
        return result

    @_compat.contextmanager
    def following(self, losses: Sequence[Tensor]) -> Iterator[None]:
        """Name the forward line of each op of the gradients of ``losses`` that are taken meanwhile."""
        self.backward_line = user_frame()
        hooks, seen, todo = [], set(), [loss.grad_fn for loss in losses]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
            line = self.lines.get(_compat.sequence_number(node), ("", ""))
            hooks.append(node.register_prehook(lambda grads, line=line: self._computes_gradient_of(*line)))
        try:
            yield
        finally:
            self._computes_gradient_of("", "")
            for hook in hooks:
                hook.remove()

    def _computes_gradient_of(self, line: str, module: str) -> None:
        self.line, self.module = line, module

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._local_scalar_dense.default and _compat.constant_of(args[0]) is None:
            raise self.value_reads.host_problem(args[0])
        if func in _LENGTHS:
            raise problem_here(f"the shapes inside {_LENGTHS[func]} depend on lengths, which are data", _LENGTHS_HINT)
        if _sized_by_values(func, args):
            name = "indexing by a boolean mask" if func is aten.index.Tensor else func._schema.name.split("::")[1]
            raise record_problem(data_dependent_shape_problem(name))
        if func.namespace == "torch_attn":
            raise problem_here(*VARLEN_ATTENTION)
        if func in _PRODUCTS:
            self._check_product(func, args)
        if func.namespace in _COLLECTIVES:
            name = func._schema.name.split("::")[1].strip("_")
            raise problem_here(f"build calls a collective of torch.distributed: {name}", _COLLECTIVE_HINT)
        if isinstance((kwargs or {}).get("generator"), torch.Generator):
            raise problem_here("build draws from its own torch.Generator", _GENERATOR_HINT)
        if func is aten.embedding_renorm_.default:
            raise problem_here("an embedding with max_norm rewrites rows of its weight in forward", _RENORM)
        if _SPARSE.get(func, 99) < len(args) and args[_SPARSE[func]]:
            raise problem_here("an embedding with sparse=True makes a sparse gradient", _DENSE)
        self.free.check(func, args, kwargs or {})

    def _check_turned(self, x: Tensor, how: str) -> None:
        """A view in place, of a tensor that stays, or of one whose views autograd would trace back to the new form."""
        stays = self.given.get(id(x))
        views = [view for view in self.views.get(_compat.storage_id(x), []) if view is not x]
        if stays is None and not (x.requires_grad and views):
            return
        of = stays or "a tensor that has views and requires a gradient"
        raise problem_here(f"build changes the shape of {of} in place: {how}", _SHAPE_HINT)

    def _check_product(self, func: Any, args: Any) -> None:
        operands = [arg for arg in args if isinstance(arg, Tensor)]
        if len({x.dtype for x in operands}) > 1:
            name, shown = func._schema.name.split("::")[1], ", ".join(map(form_of, operands))
            raise problem_here(f"{name} of different dtypes: {shown}", _PRODUCT_HINT)


def _sized_by_values(func: Any, args: Any) -> bool:
    """Return whether the shape of the result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags and (func is not aten.index.Tensor or has_mask(args[1]))
