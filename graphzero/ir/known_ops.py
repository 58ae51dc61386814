"""Ops that a program may contain: they compute on tensors or host numbers, and have no effect on anything else.

A text from elsewhere is data.  Its ops are graphzero's own, ATen's and prims' as far as their schema says that they
take tensors and constants and make tensors, arithmetic on host numbers as capture writes it, and custom ops of this
process for which an SBP rule has been given.  Nothing else can be named: no function of a module, no op that reads a
file, writes over an operand, draws from torch's generator or talks to other processes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from graphzero import _compat
from graphzero.ir import ops
from graphzero.sbp import registry

OVERLOADS = ("Tensor", "default")  # an overload that prints as the bare op name, the first that exists
NAMESPACES = ("graphzero", "aten", "prims")

_SYMBOLIC = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
# What torch records of arithmetic on symbolic numbers.
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
        + ("lt", "le", "gt", "ge", "eq", "ne")
    },
    **{f"math.{name}": getattr(math, name) for name in ("sqrt", "log", "exp", "floor", "ceil", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not")},
    **{f"torch.{name}": getattr(torch, name) for name in (f"_sym_{one}" for one in _SYMBOLIC) if hasattr(torch, name)},
}
NAME_OF: Mapping[Any, str] = {function: name for name, function in ARITHMETIC.items()}

CONSTANTS = {"int", "bool", "float", "number", "complex", "str", "Device", "Generator"}
_TRUSTING = re.compile(
    r"aten::_*(test|foobar|(to_)?sparse|nested|jagged_to|padded_dense|convert_(indices|weight)|mkldnn|mkl_|triton_|dyn_quant|"
    r"quantized_|fbgemm|weight_int|wrapped|sobol|transform_bias|native_multi_head|transformer_encoder|(add|remove)_batch_dim|"
    r"hspmm|sspaddmm|coalesce|spdiags|rowwise_prune|cslt|gather_sparse|make_per|batch_norm_impl)"
)  # whose kernels read wherever their operands point, and which no step is captured with
UNFIT = ("aten::from_file", "aten::_pin_memory", "aten::pin_memory")  # what their schema does not say


def find_op(words: Sequence[str]) -> Any:
    """The op written as ``words``, or None: a pass's own, ``operator.mul``, ATen's, or ``namespace.op.overload``."""
    name = ".".join(words)
    if name in ops.BY_NAME or name in ARITHMETIC:
        return ops.BY_NAME.get(name) or ARITHMETIC[name]
    if len(words) <= 2:
        for namespace in ("graphzero", "aten"):
            packet = _compat.op_packet(namespace, words[0])
            if packet is not None:
                names = words[1:] or OVERLOADS
                return next((getattr(packet, overload) for overload in names if overload in packet.overloads()), None)
    if len(words) == 3:
        packet = _compat.op_packet(words[0], words[1])
        if packet is not None and words[2] in packet.overloads():
            return getattr(packet, words[2])
    return None


def why_unfit(target: Any, needs_rule: bool = True) -> str:
    """Say why a program may not hold a call of ``target``; "" if it may.

    needs_rule: whether a custom op needs one, because a text names it.
    """
    if target is operator.getitem or target in ops.OF_PASSES or target in NAME_OF:
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        return "is a function of Python, not an op"
    if (why := _why_unfit(target)) or target.namespace in NAMESPACES or not needs_rule or registry.has_rule(target):
        return why
    return "is a custom op; give it a rule with gz.sbp.rule before a program that names it is read"


@cache
def _why_unfit(op: torch._ops.OpOverload) -> str:
    schema = op._schema
    if schema.is_mutable:
        return "writes over an operand"
    if schema.name in UNFIT:
        return "has effects beyond tensors"
    if _TRUSTING.match(schema.name):
        return "has kernels that rely on their operands, and is not an op of a step"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "draws from torch's own generator"
    if not schema.returns or any(_element(r.type) != "Tensor" for r in schema.returns):
        return "does not make tensors"
    strange = next((a for a in schema.arguments if _element(a.type) not in {*CONSTANTS, "Tensor"}), None)
    return f"takes the {strange.type} {strange.name}, which is neither tensor nor constant" if strange else ""


def _element(type_: Any) -> str:
    """The type without its lists and optionals."""
    while hasattr(type_, "getElementType"):
        type_ = type_.getElementType()
    return str(type_)
