"""Arguments of a call and what build returns: names, global shapes, SBPs, pieces per rank.

A plain tensor is this rank's share of the batch, split along dim 0 over the data axes; on a virtual placement it
is the whole batch.  What a program does with it is not decided here.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.errors import CaptureError, ConfigError
from graphzero.ir import tree
from graphzero.ir.value import Role
from graphzero.runtime import resplit
from graphzero.runtime.agree import tensor_text
from graphzero.runtime.placed import check_here
from graphzero.runtime.shards import global_shape, join, piece, wrap
from graphzero.runtime.world import World
from graphzero.sbp.dtensor import annotate, annotation, nd_of_dtensor
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S

_LEAVES = {Tensor, nn.Parameter, DTensor, float, int, bool, str, type(None)}  # classes that no tree goes through
_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, torch.memory_format, enum.Enum, slice)


@dataclass(frozen=True)
class Input:
    """One leaf of build's arguments.  ``nd`` is () and ``shape`` None for anything but a tensor."""

    name: str
    raw: Any
    nd: Nd = ()
    shape: tuple[int, ...] | None = None

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def is_float(self) -> bool:
        return isinstance(self.raw, float)

    @property
    def key(self) -> Any:
        """What of it selects a capture.  A float is read at run time and selects none."""
        if self.shape is not None:
            return self.raw.dtype, self.shape
        return (float,) if self.is_float else (type(self.raw), self.raw)

    def __str__(self) -> str:
        if self.is_tensor:
            return f"{tensor_text(self.raw)} {', '.join(map(str, self.nd))}"
        kind = type(self.raw).__name__
        return f"{kind} {self.raw!r}" if isinstance(self.raw, _PLAIN) else kind


@dataclass(frozen=True)
class Inputs:
    """The leaves of one call, in pytree order, and the tree they came from: of (args, kwargs)."""

    leaves: tuple[Input, ...]
    spec: pytree.TreeSpec

    @property
    def has_dtensor(self) -> bool:
        """Whether the caller speaks of global tensors, so that outputs are given as such."""
        return any(isinstance(leaf.raw, DTensor) or leaf.is_tensor and annotation(leaf.raw) for leaf in self.leaves)

    def scalars(self) -> dict[Role, float]:
        return {Role("scalar", leaf.name): leaf.raw for leaf in self.leaves if leaf.is_float}

    def placed(self) -> dict[Role, Nd]:
        return {Role("batch", leaf.name): leaf.nd for leaf in self.leaves if leaf.is_tensor}


class Reader:
    """Reads the arguments of ``build``: bound to its signature, a placement and the user's ``set_input``s."""

    def __init__(self, build: Callable[..., Any], placement: Placement):
        self.placement = placement
        self._signature = inspect.signature(build)
        self._names: dict[pytree.TreeSpec, tuple[str, ...]] = {}
        self._flat: dict[tuple[Any, ...], tuple[pytree.TreeSpec, tuple[str, ...]]] = {}
        self._splits = tuple(S(0) if axis in placement.data_axes else B for axis in placement.names)
        self._whole = (B,) * len(placement.names)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Mapping[str, Nd]) -> Inputs:
        """Flatten and place.  Raises TypeError, ConfigError, CaptureError or PlacementError; says which input."""
        flat, spec, names = self._flatten(args, kwargs)
        unknown = [name for name in wanted if name not in names and not self._may_be(name)]
        if unknown:
            raise ConfigError(
                f"set_input({unknown[0]!r}, ...): build has no such input; its inputs in this call are "
                f"{', '.join(names) or 'none'}"
            )
        return Inputs(
            tuple(self._leaf(name, raw, wanted.get(name)) for name, raw in zip(names, flat, strict=True)), spec
        )

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], pytree.TreeSpec, tuple[str, ...]]:
        """Leaves, the tree they came from, and their names."""
        given = [*args, *kwargs.values()]
        nothing_nested = _LEAVES.issuperset(map(type, given))
        how = len(args), *kwargs
        known = self._flat.get(how) if nothing_nested else None
        if known is not None:
            return given, *known
        flat, spec = tree.flatten((args, kwargs))
        names = self._names.get(spec)
        if names is None:
            self._signature.bind(*args, **kwargs)
            names = self._names[spec] = tuple(map(self._name, tree.paths((args, kwargs))))
        if nothing_nested and all(map(is_, flat, given)):
            self._flat[how] = spec, names
        return flat, spec, names

    def _may_be(self, name: str) -> bool:
        """Whether another call may have an input of that name."""
        known = self._signature.parameters
        return name.split(".")[0] in known or any(p.kind is p.VAR_KEYWORD for p in known.values())

    def _name(self, path: tuple[Any, ...]) -> str:
        which, first, *rest = (_step(key) for key in path)
        words = [*rest]
        if which == "0":
            parameters = list(self._signature.parameters.values())
            index = int(first)
            packed = [i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL]
            if packed and index >= packed[0]:
                words = [parameters[packed[0]].name, str(index - packed[0]), *rest]
            else:
                words = [parameters[index].name, *rest]
        else:
            words = [first, *rest]
        return ".".join(words)

    def _leaf(self, name: str, raw: Any, wanted: Nd | None) -> Input:
        if not isinstance(raw, Tensor):
            return Input(name, _checked_object(name, raw))
        if raw.requires_grad:
            raise CaptureError(
                f"input {name} ({tensor_text(raw)}) requires grad; a Graph puts gradients into no input. Pass "
                f"{name}.detach(); for its gradient call {name}.requires_grad_() in build, and use or return what "
                "torch.autograd.grad gives; what is to be trained is an nn.Parameter of a module on the Graph"
            )
        _check_kind(name, raw)
        nd = self._nd(name, raw, wanted)
        placement = self.placement
        shape = tuple(raw.shape)
        if isinstance(raw, DTensor) or placement.virtual:
            _check_divides(name, shape, nd, placement)
        else:
            shape = global_shape(shape, nd, placement.hierarchy)
        return Input(name, raw, nd, shape)

    def _nd(self, name: str, raw: Tensor, wanted: Nd | None) -> Nd:
        check_here(raw, self.placement, f"input {name}")
        if isinstance(raw, DTensor):
            return nd_of_dtensor(raw)
        known = annotation(raw)
        if known is not None and known[0] == self.placement:
            return known[1]
        if wanted is None:
            return self._splits if raw.dim() else self._whole
        for sbp in wanted:
            if sbp.is_split and sbp.dim >= raw.dim():
                raise ConfigError(
                    f"set_input({name!r}, sbp={sbp}): {name} is {tensor_text(raw)}, it has no dim {sbp.dim}"
                )
        return wanted


def _step(key: Any) -> str:
    for field in ("key", "name", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def _checked_object(name: str, raw: Any) -> Any:
    """A leaf that is baked into the program: it must be a constant, and hold no tensors that the graph cannot see."""
    if isinstance(raw, (float, *_PLAIN)):
        return raw
    if isinstance(raw, Iterator):
        raise CaptureError(
            f"input {name} is a {type(raw).__name__}, which the first call alone would read; take the next item "
            f"outside: graph(next({name}))"
        )
    hidden = _tensor_inside(raw)
    if hidden or type(raw).__hash__ is None:
        kind = type(raw).__name__
        raise CaptureError(
            f"input {name} is a {kind}, which a Graph cannot look into"
            f"{f' (it holds a tensor in {hidden})' if hidden else ''}; "
            "pass tensors in dicts, lists, tuples and dataclasses "
            f"({'torch.as_tensor(x)' if kind == 'ndarray' else 'dict(x)'}), or "
            f"register {kind} with torch.utils._pytree.register_pytree_node"
        )
    return raw


def _check_kind(name: str, raw: Tensor) -> None:
    """Refuse what is not a dense tensor of numbers."""
    if raw.is_nested:
        raise CaptureError(
            f"input {name} is a nested tensor, whose rows differ in length; a Graph takes dense ones: pad it "
            f"(torch.nested.to_padded_tensor({name}, 0.0)) and pass a mask"
        )
    if raw.layout is not torch.strided:
        raise CaptureError(f"input {name} is a {raw.layout} tensor; a Graph takes dense ones: {name}.to_dense()")
    if raw.is_quantized:
        raise CaptureError(f"input {name} is quantized ({raw.dtype}); a Graph takes numbers: {name}.dequantize()")
    if type(raw).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(raw, DTensor):
        raise CaptureError(
            f"input {name} is a {type(raw).__name__}, which computes by its own rules; a Graph takes plain tensors "
            "and DTensors: pass the tensors that it is made of"
        )


def check_values(inputs: Inputs) -> None:
    """Refuse a call with tensors that have none.  Raises ConfigError."""
    for leaf in inputs.leaves:
        if leaf.is_tensor and leaf.raw.is_meta:
            raise ConfigError(
                f"input {leaf.name} ({tensor_text(leaf.raw)}) is on the meta device: compile() takes it, a call does "
                "not. Pass a tensor with values"
            )


def _tensor_inside(x: Any, depth: int = 3) -> str:
    """Where an object holds a tensor, as ``.batch[0]``, or ""; looks into attributes, slots and plain containers."""
    if isinstance(x, Mapping):
        parts = [(f"[{key!r}]", held) for key, held in x.items()]
    elif isinstance(x, (list, tuple, set, frozenset)):
        parts = [(f"[{i}]", held) for i, held in enumerate(x)]
    else:
        slots = [slot for kind in type(x).__mro__ for slot in vars(kind).get("__slots__", ())]
        names = [*getattr(x, "__dict__", {}), *(slot for slot in slots if hasattr(x, slot))]
        parts = [(f".{name}", getattr(x, name)) for name in names]
    for where, held in parts:
        if isinstance(held, Tensor):
            return where
        if depth and not isinstance(held, _PLAIN):
            inside = _tensor_inside(held, depth - 1)
            if inside:
                return where + inside
    return ""


def _check_divides(name: str, shape: tuple[int, ...], nd: Nd, placement: Placement) -> None:
    ranks: dict[int, int] = {}
    for sbp, n in zip(nd, placement.hierarchy, strict=True):
        if sbp.is_split:
            ranks[sbp.dim] = ranks.get(sbp.dim, 1) * n
    axes = len(placement.names)
    whole = "gz.sbp.B" if axes == 1 else f"({', '.join(['gz.sbp.B'] * axes)})"
    for dim, n in ranks.items():
        if shape[dim] % n:
            drop = " or drop the last batch (drop_last=True)" if dim == 0 else ""
            raise CaptureError(
                f"input {name} of shape {list(shape)} cannot be split over {n} ranks: dim {dim} is {shape[dim]} = "
                f"{shape[dim] // n} x {n} + {shape[dim] % n}. Pad it{drop}; an input that is no batch is said so: "
                f"config.set_input({name!r}, sbp={whole})"
            )


def rank_values(leaf: Input, world: World) -> list[Any]:
    """What each local rank is given of a leaf, on its device.

    A copy to a GPU is under way when this returns: a tensor in pinned memory must not be written to until then.
    """
    if not leaf.is_tensor:
        return [leaf.raw] * len(world.local_ranks)
    raw = _compat.local_tensor(leaf.raw).detach()
    raw = raw.to(world.device, non_blocking=world.device.type != "cpu")  # to the CPU it would not wait for the values
    if world.placement.size == 1 or not world.placement.virtual:
        return [raw]
    return [piece(raw, leaf.nd, world.placement.hierarchy, position) for position in world.local_ranks]


def output_value(pieces: list[Any], nd: Nd, shape: tuple[int, ...], world: World, as_global: bool) -> Any:
    """What the user is given of one output tensor: see api.md, Outputs."""
    placement = world.placement
    if placement.virtual:
        whole = (join(pieces, nd, placement.hierarchy) if placement.size > 1 else pieces[0]).detach()
        if as_global:
            annotate(whole, placement, nd)
        return whole
    local: Tensor = pieces[0].detach()
    batch_split = all(
        sbp.is_broadcast or sbp is S(0) and axis in placement.data_axes
        for axis, sbp in zip(placement.names, nd, strict=True)
    )
    if batch_split and not as_global:
        return local
    found = wrap(local, placement.mesh(), nd, shape)
    return found if as_global else resplit.whole(found, placement)
