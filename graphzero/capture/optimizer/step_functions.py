"""Functions of torch as a traced step calls them: what a graph cannot follow is written as ops that it can.

torch's fused kernels become an op for each parameter, which splits as that parameter does.  A user who asks for
``fused=True`` asks for that kernel's rounding: in 16-bit types it rounds a step once, the ops that it stands for round
one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from graphzero import _compat
from graphzero.capture.problems import problem
from graphzero.ops import ADAM

KERNELS: Mapping[Any, bool] = {torch._fused_adam_: False, torch._fused_adamw_: True}  # whether weights decay apart
# What functionalize does not know, by what it knows.
_IN_PLACE: Any = {
    Tensor.__iand__: Tensor.bitwise_and_,
    Tensor.__ior__: Tensor.bitwise_or_,
    Tensor.__ixor__: Tensor.bitwise_xor_,
    Tensor.__ilshift__: Tensor.bitwise_left_shift_,
    Tensor.__irshift__: Tensor.bitwise_right_shift_,
}


def is_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group of parameters is stepped by one of ``KERNELS``."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and group.get("fused") is True


class FusedSteps(TorchFunctionMode):
    """While it is on, the kernels are written as ops that can be traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in KERNELS:
            return func(*args, **kwargs)
        numbers = [kwargs[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
        modes = {"decoupled": False} if not KERNELS[func] else {}
        modes |= {"maximize": True} if kwargs["maximize"] else {}
        for *tensors, step in zip_longest(*args):
            given = [[] if x is None else [x] for x in tensors]
            results = ADAM(*given, [step], *numbers, **modes)
            written: list[Tensor] = [x for x in (tensors[0], *tensors[2:]) if x is not None]
            for x, new in zip(written, results, strict=True):
                x.copy_(new)
        return None


class HostNumbers(TorchFunctionMode):
    """Ops that take a host number are written out where they get a 0-d tensor (Adagrad's rate, an average's weight)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = _IN_PLACE.get(func, func), kwargs or {}
        if func in (torch.where, Tensor.where):
            full: Any = torch.full
            like = next((x.dtype for x in args[1:] if isinstance(x, Tensor)), None)
            args = tuple(full((), x, dtype=like) if isinstance(x, torch.SymFloat) else x for x in args)
        if func is _compat.foreach_lerp_ and isinstance(args[2], Tensor):
            for x, end in zip(args[0], args[1], strict=True):
                x.lerp_(end, args[2].to(x.dtype))
            return args[0]
        if isinstance(out := kwargs.get("out"), Tensor):
            return out.copy_(func(*args, **{key: x for key, x in kwargs.items() if key != "out"}))
        if (plain := _compat.functional_form(func)) is not None:
            return args[0].copy_(plain(*args, **kwargs))
        factor = kwargs.get("value", kwargs.get("alpha"))
        if isinstance(factor, Tensor):
            x, *rest = args
            if func in (Tensor.addcdiv_, Tensor.addcdiv):
                change = rest[0] / rest[1] * factor
            elif func in (Tensor.addcmul_, Tensor.addcmul):
                change = rest[0] * rest[1] * factor
            elif func in (Tensor.add_, Tensor.add):
                change = rest[0] * factor
            elif func in (Tensor.sub_, Tensor.sub):
                change = -(rest[0] * factor)
            else:
                return func(*args, **kwargs)
            return x.add_(change) if func.__name__.endswith("_") else x + change
        return func(*args, **kwargs)


def pure_module(module: fx.GraphModule) -> fx.GraphModule:
    """A traced step without Python objects: without writes into inputs, which are results too, and without tensors."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            module.graph.erase_node(node)
        elif node.op == "get_attr":
            _write_out(module, node)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise problem(
                f"an optimizer's step draws random numbers ({node.target}), which would differ between ranks",
                "draw them before the first step, into optimizer.state, or in build",
            )
    return module


def _write_out(module: fx.GraphModule, node: fx.Node) -> None:
    """A tensor that step makes of Python numbers, as torch.tensor(0.0), becomes an op that makes it."""
    attribute: Any = getattr(module, str(node.target))
    tensor = attribute.constant if isinstance(attribute, _compat.FakeTensor) else attribute
    if tensor is None or tensor.numel() != 1:
        raise problem(
            f"an optimizer's step reads a tensor of shape {list(attribute.shape)} that is neither state nor parameter",
            "keep it in optimizer.state, or write it as numbers",
        )
    with module.graph.inserting_before(node):
        full = module.graph.call_function(
            torch.ops.aten.full.default, (list(attribute.shape), tensor.item()), {"dtype": attribute.dtype}
        )
    full.meta = dict(node.meta, val=attribute)
    node.replace_all_uses_with(full)
    module.graph.erase_node(node)
