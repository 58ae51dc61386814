"""The arguments of ``build``, read once a call: names, global shapes, SBPs; and what a Graph cannot be given.

A plain tensor is this rank's share of the batch, split along dim 0 over the data axes; on a virtual placement it
is the whole batch.  What a program does with it is not decided here.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture import Input, Inputs
from graphzero.capture.objects import pytrees as tree
from graphzero.errors import CaptureError, ConfigError
from graphzero.runtime.state.placement_checks import check_here
from graphzero.runtime.tensors.shards import global_shape, piece
from graphzero.runtime.world.consensus import tensor_text
from graphzero.runtime.world.world import World
from graphzero.sbp.dtensor import annotation, nd_of_dtensor
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S

_LEAVES = {Tensor, nn.Parameter, DTensor, float, int, bool, str, type(None)}  # classes that no tree goes through
_PLAIN = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device, torch.memory_format, enum.Enum, slice)


class BuildInputReader:
    """Reads the arguments of ``build``: bound to its signature, a placement and the user's ``set_input``s."""

    def __init__(self, build: Callable[..., Any], placement: Placement):
        self.placement = placement
        self._signature = inspect.signature(build)
        self._names: dict[pytree.TreeSpec, tuple[str, ...]] = {}
        self._flat: dict[tuple[Any, ...], tuple[pytree.TreeSpec, tuple[str, ...]]] = {}
        self._splits = tuple(S(0) if axis in placement.data_axes else B for axis in placement.names)
        self._whole = (B,) * len(placement.names)
        self._plain: dict[str, tuple[torch.Size, Nd, tuple[int, ...]]] = {}  # of the last call: shape, nd, global shape

    def read_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Mapping[str, Nd], running: bool = False
    ) -> Inputs:
        """Flatten and place.  running: tensors must have values.

        Raises TypeError, ConfigError, CaptureError or PlacementError; says which input.
        """
        return self.placed(*self.flatten(args, kwargs), wanted, running)

    def placed(
        self, flat: list[Any], spec: pytree.TreeSpec, names: tuple[str, ...], wanted: Mapping[str, Nd], running: bool
    ) -> Inputs:
        """The leaves of ``flatten`` as inputs on the ranks; see ``read_inputs``."""
        unknown = [name for name in wanted if name not in names and not self.may_be(name)]
        if unknown:
            raise ConfigError(
                f"set_input({unknown[0]!r}, ...): build has no such input; its inputs in this call are "
                f"{', '.join(names) or 'none'}"
            )
        leaves = tuple(
            [
                self._tensor(name, raw, wanted.get(name), running)
                if isinstance(raw, Tensor)
                else Input(name, _checked_object(name, raw))
                for name, raw in zip(names, flat, strict=True)
            ]
        )
        return Inputs(leaves, spec)

    def flatten(
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

    def may_be(self, name: str) -> bool:
        """Return whether another call may have an input of that name."""
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

    def _tensor(self, name: str, raw: Tensor, wanted: Nd | None, running: bool) -> Input:
        check_kind(name, raw)
        if running and raw.is_meta:
            raise ConfigError(
                f"input {name} ({tensor_text(raw)}) is on the meta device: compile() takes it, a call does not. Pass a "
                "tensor with values"
            )
        check_here(raw, self.placement, f"input {name}")
        if isinstance(raw, DTensor):
            nd, shape = nd_of_dtensor(raw), tuple(raw.shape)
            _check_divides(name, shape, nd, self.placement)
            return Input(name, raw, shape, nd, is_global=True)
        known = annotation(raw)
        nd = known[1] if known is not None and known[0] == self.placement else self.nd(name, raw, wanted)
        last = self._plain.get(name)
        if last is None or last[0] != raw.shape or last[1] != nd:
            last = self._plain[name] = raw.shape, nd, self._global_shape(name, tuple(raw.shape), nd)
        return Input(name, raw, last[2], nd, is_global=known is not None)

    def nd(self, name: str, raw: Tensor, wanted: Nd | None) -> Nd:
        """The SBP of a plain tensor: as ``set_input`` says, else split along dim 0 over the data axes."""
        if wanted is None:
            return self._splits if raw.dim() else self._whole
        for sbp in wanted:
            if sbp.is_split and sbp.dim >= raw.dim():
                raise ConfigError(
                    f"set_input({name!r}, sbp={sbp}): {name} is {tensor_text(raw)}, it has no dim {sbp.dim}"
                )
        return wanted

    def _global_shape(self, name: str, shape: tuple[int, ...], nd: Nd) -> tuple[int, ...]:
        """Global shape of a plain tensor."""
        if not self.placement.virtual:
            return global_shape(shape, nd, self.placement.hierarchy)
        _check_divides(name, shape, nd, self.placement)
        return shape


def _step(key: Any) -> str:
    for field in ("key", "name", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def _checked_object(name: str, raw: Any) -> Any:
    """Check a leaf that becomes a constant of the program: it must not change, nor hold tensors that the graph cannot
    see."""
    if isinstance(raw, (float, *_PLAIN)):
        return raw
    if isinstance(raw, Iterator):
        raise CaptureError(
            f"input {name} is a {type(raw).__name__}, which only the first call would read; take the next item "
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


def check_kind(name: str, raw: Tensor) -> None:
    """Refuse what is not a dense tensor of numbers, or requires a gradient."""
    if raw.requires_grad:
        raise CaptureError(
            f"input {name} ({tensor_text(raw)}) requires grad; a Graph puts gradients into no input. Pass "
            f"{name}.detach(); for its gradient call {name}.requires_grad_() in build, and use or return what "
            "torch.autograd.grad gives; what is to be trained is an nn.Parameter of a module on the Graph"
        )
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


def _tensor_inside(x: Any, depth: int = 3) -> str:
    """The path of a tensor in an object, as ``.batch[0]``, or ""; looks into attributes, slots and plain containers."""
    if isinstance(x, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in x.items()]
    elif isinstance(x, (list, tuple, set, frozenset)):
        parts = [(f"[{i}]", item) for i, item in enumerate(x)]
    else:
        slots = [slot for kind in type(x).__mro__ for slot in vars(kind).get("__slots__", ())]
        names = [*getattr(x, "__dict__", {}), *(slot for slot in slots if hasattr(x, slot))]
        parts = [(f".{name}", getattr(x, name)) for name in names]
    for where, item in parts:
        if isinstance(item, Tensor):
            return where
        if depth and not isinstance(item, _PLAIN):
            inside = _tensor_inside(item, depth - 1)
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
            drop = " or drop the last batch (drop_last=True), or let config.set_shapes pad it" if dim == 0 else ""
            raise CaptureError(
                f"input {name} of shape {list(shape)} cannot be split over {n} ranks: dim {dim} is {shape[dim]} = "
                f"{shape[dim] // n} x {n} + {shape[dim] % n}. Pad it{drop}; for an input that is not a batch call "
                f"config.set_input({name!r}, sbp={whole})"
            )


def text_of(leaf: Input) -> str:
    """A leaf as text for messages: the same in every process."""
    if leaf.is_tensor:
        return f"{tensor_text(leaf.raw)} {', '.join(map(str, leaf.nd))}"
    kind = type(leaf.raw).__name__
    return f"{kind} {leaf.raw!r}" if isinstance(leaf.raw, _PLAIN) else kind


def rank_values(leaf: Input, world: World) -> list[Any]:
    """The piece of a leaf for each local rank, on its device.

    A copy to a GPU is under way when this returns: a tensor in pinned memory must not be written to until then.
    """
    if leaf.shape is None:
        return [leaf.raw] * len(world.local_ranks)
    raw = _compat.local_tensor(leaf.raw).detach()
    raw = raw.to(world.device, non_blocking=world.device.type != "cpu")  # to the CPU it would not wait for the values
    if len(world.local_ranks) == 1:
        return [raw]
    return [piece(raw, leaf.nd, world.placement.hierarchy, position) for position in world.local_ranks]
