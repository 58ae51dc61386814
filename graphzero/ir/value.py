"""Metadata of one value of a graph: type, SBP, pins, role, phase, source line.

A graph is a ``torch.fx.Graph``; the facts live in ``node.meta`` under the keys below and are read and
written through the functions of this module only.

======== ==================================================================================
key      content
======== ==================================================================================
type     ``TensorType`` (global shape), ``ScalarType``, or a tuple of them for an op with several
         results (``None`` for a result that the op does not make)
sbp      ``Nd``: one ``Sbp`` per placement axis; a tuple of ``Nd`` for several results; ``None`` = not yet known
pins     per placement axis, whether the SBP is fixed by the user or by a pass
role     ``Role`` or None: what a value is for the user's step
phase    "input", "forward", "backward" or "update"
source   "file:line in function" of the user's code, or ""
module   path of the innermost module that ran the op, or whose op's gradient it is; else it is not there
repeat   of an op that runs once a micro-batch, how often it does; else it is not there
stage    of a placeholder that lives on one pipeline stage, its number; see ``ir.pipeline_stages``
======== ==================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import is_
from typing import Any

import torch
from torch import fx

from graphzero._compat import properties
from graphzero.sbp.signature import TensorMeta
from graphzero.sbp.types import Nd

PHASES = ("input", "forward", "backward", "update")
OP_PHASES = PHASES[1:]  # those of ops

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

OUT = "out"  # the keyword, in a graph, of the value whose storage a result takes: a fact, no argument of the op


@dataclass(frozen=True)
class StateSpec:
    """One tensor of optimizer state: its parameter, its type, and its value before the first step.

    ``param`` is ``attribute.fqn``, ``placeholder`` the node that stands for it; several 0-d states may share one.
    ``created``: the step makes it and nothing reads what was there; then ``fill`` means nothing.
    """

    optimizer: int
    param: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: float
    placeholder: str
    created: bool = False


@dataclass(frozen=True)
class TensorType:
    """Dtype and global shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (global) tensor, stored densely."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def meta(self) -> TensorMeta:
        """The TensorMeta that rules of ops read; one object, since it is looked up often."""
        return TensorMeta(self.shape, self.dtype)

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ScalarType:
    """A host number: ``float``, ``int`` or ``bool``, the same on every rank."""

    kind: str

    def __str__(self) -> str:
        return self.kind


Type = TensorType | ScalarType | tuple["TensorType | ScalarType | None", ...]


@dataclass(frozen=True)
class Role:
    """Role of a value in the step.

    =========== =============================================== ======================
    kind        of                                              key
    =========== =============================================== ======================
    batch       name of the input, ``x`` or ``batch.labels``    ""
    param       ``attribute.fqn`` of the parameter              ""
    buffer      ``attribute.fqn`` of the buffer                 ""
    state       ``attribute.fqn`` of the parameter, or          name in ``optimizer.state``, ``exp_avg``
                ``optimizer0.group1`` for a 0-d state that
                several parameters share
    hyper       ``optimizer0.group1``                           ``lr``, ``betas.0``
    scalar      name of a float input of build                  ""
    constant    running number of a tensor that build closes over  ""
    seed        "" (the 0-d int64 key of this step's random draws) ""
    saved       name of a value that another part of a      ""
                pipeline hands over
    accumulator name of what micro-batches of a pipeline     ""
                add up; of an op: ``attribute.fqn``
    gradient    ``attribute.fqn``: p.grad when backward ends    ""
    loss        ""                                              ""
    recompute   name of the value of forward that is computed   ""
                again
    =========== =============================================== ======================

    The first ten are the roles of placeholders, and ``(kind, of, key)`` names one for the runtime.
    """

    kind: str
    of: str = ""
    key: str = ""

    @property
    def path(self) -> str:
        return f"{self.of}/{self.key}" if self.key else self.of


PLACEHOLDER_KINDS = (
    "batch", "param", "buffer", "state", "hyper", "scalar", "constant", "seed", "saved", "accumulator",
)  # fmt: skip
ROLE_KINDS = (*PLACEHOLDER_KINDS, "gradient", "loss", "recompute")


def type_of(node: fx.Node) -> Any:
    """The node's ``Type``: TensorType, ScalarType or a tuple of them."""
    return node.meta["type"]


def tensor_type(node: fx.Node) -> TensorType:
    """The type of a node that is one tensor."""
    type_ = node.meta["type"]
    assert isinstance(type_, TensorType), f"{node.name} is {type_}, not one tensor"
    return type_


def shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The global shape of each result, () for anything that is not a tensor."""
    node_type = node.meta.get("type")
    types = node_type if isinstance(node_type, tuple) else (node_type,)
    return tuple(type_.shape if isinstance(type_, TensorType) else () for type_ in types)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("type"), TensorType)


def is_scalar(node: fx.Node) -> bool:
    return isinstance(node.meta.get("type"), ScalarType)


def is_multi(node: fx.Node) -> bool:
    """Return whether the node is an op with several results, read through ``operator.getitem`` nodes."""
    return isinstance(node.meta.get("type"), tuple)


def sbp_of(node: fx.Node) -> Any:
    """The node's SBP: ``Nd``, a tuple of ``Nd | None`` for several results, or None where not known yet."""
    return node.meta.get("sbp")


def results_of(node: fx.Node) -> list[tuple[Any, Any]]:
    """Type and SBP of each result; the SBP is None where it is not known yet."""
    type_, nd = type_of(node), sbp_of(node)
    if not isinstance(type_, tuple):
        return [(type_, nd)]
    return list(zip(type_, nd or (None,) * len(type_), strict=True))


def nd_of(node: fx.Node) -> Nd:
    """The SBP of a node that is one tensor, already known."""
    nd: Nd = node.meta["sbp"]
    return nd


def pins_of(node: fx.Node) -> tuple[bool, ...]:
    """Per placement axis, whether the node's SBP is pinned; () = nowhere."""
    pins: tuple[bool, ...] = node.meta.get("pins", ())
    return pins


def role_of(node: fx.Node) -> Role | None:
    return node.meta.get("role")


def has_role(node: fx.Node, *kinds: str) -> bool:
    """Return whether the node has a role of one of these kinds."""
    role = role_of(node)
    return role is not None and role.kind in kinds


def path_of(node: fx.Node) -> str | None:
    """The path of an input of the step, "model.weight" or "model.weight/exp_avg"; None without a dot, as names are."""
    role = role_of(node) if node.op == "placeholder" else None
    return role.path if role is not None and "." in role.path else None


def is_recomputed(node: fx.Node) -> bool:
    """Return whether the node computes, in backward, what forward has computed before."""
    return has_role(node, "recompute")


def phase_of(node: fx.Node) -> str:
    return str(node.meta.get("phase", "forward"))


def last_phase(nodes: Iterable[fx.Node]) -> str:
    """The last phase of the ops among nodes; forward if there are none."""
    return max((phase_of(node) for node in nodes if node.op == "call_function"), key=PHASES.index, default="forward")


def is_average(param: fx.Node) -> bool:
    """Return whether only the update reads a parameter: an average of others, which is a state."""
    return {phase_of(user) for user in param.users if user.op != "output"} == {"update"}


def repeats_of(node: fx.Node) -> int:
    """The number of times that a repeated op runs in a step; 0 for any other."""
    repeats: int = node.meta.get("repeat", 0)
    return repeats


def source_of(node: fx.Node) -> str:
    return str(node.meta.get("source", ""))


def module_of(node: fx.Node) -> str:
    """The path of the module that a value belongs to, "model.layers.0"; "" for none that is known.

    That is the module that holds what the role names, or the innermost one that ran the op; what computes a gradient
    belongs to the module of the op whose gradient it is.
    """
    role = role_of(node)
    if role is not None and role.kind in ("param", "buffer", "state", "gradient", "accumulator"):
        return role.of.rpartition(".")[0]
    return str(node.meta.get("module", ""))


def facts(nodes: Iterable[fx.Node]) -> list[Any]:
    """All facts about a program's nodes, as objects: while they are the same objects, the program has not changed.

    Arguments, types, SBPs and roles are never changed, only replaced.
    """
    all_facts: list[Any] = []
    add, add_all = all_facts.append, all_facts.extend
    for node in nodes:
        meta = node.meta
        add(node)
        add_all(properties(node))
        add_all(meta)
        add_all(meta.values())
    return all_facts


def are_same(facts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(facts) == len(others) and all(map(is_, facts, others))


def operand(node: fx.Node, at: int = 0) -> fx.Node:
    """The value that argument number ``at`` is."""
    arg = node.args[at]
    assert isinstance(arg, fx.Node), f"argument {at} of {node.name} is {arg!r}"
    return arg


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """A value, and all that it follows from."""
    seen, rest = {node}, [node]
    yield node
    while rest:
        for x in rest.pop().all_input_nodes:
            if x not in seen:
                seen.add(x)
                rest.append(x)
                yield x


def own_kwargs(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of the op itself: not where its result is put."""
    return {name: arg for name, arg in node.kwargs.items() if name != OUT}


def own_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of the op itself, in the order a signature lists them: args, then kwargs."""
    return _tensors((*node.args, *own_kwargs(node).values()))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands in the order a signature lists them: args, then kwargs, lists flattened, repeats kept."""
    return _tensors((*node.args, *node.kwargs.values()))


def _tensors(args: Iterable[Any]) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    _collect(args, nodes)
    return [arg for arg in nodes if isinstance(arg.meta.get("type"), TensorType)]


def flat_nodes(args: Any) -> list[fx.Node]:
    """Every node in nested arguments, in order, with repeats."""
    nodes: list[fx.Node] = []
    _collect((args,), nodes)
    return nodes


def _collect(args: Iterable[Any], nodes: list[fx.Node]) -> None:
    for arg in args:
        if isinstance(arg, fx.Node):
            nodes.append(arg)
        elif isinstance(arg, (tuple, list)):
            _collect(arg, nodes)
        elif isinstance(arg, dict):
            _collect(arg.values(), nodes)
