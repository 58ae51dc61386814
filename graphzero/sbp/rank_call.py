"""The call of one rank for an op on whole tensors: sizes in arguments and offsets are those of its pieces.

Which arguments hold sizes, and which ops have another form where an index points into a split dim, is said with rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from graphzero.sbp.op_call import Op, argument_names
from graphzero.sbp.registry import Offset, Shape, base_of, entry_of, is_offset_form
from graphzero.sbp.shards import LocalSize, LocalStart
from graphzero.sbp.types import Nd

Pair = tuple[Sequence[int], Nd]  # global shape and SBP of a tensor


def size_arguments(op: Op) -> Collection[str]:
    """The arguments of ``op`` that say how long its results are, or its operands: see ``rule``."""
    entry = entry_of(op)
    return entry.sizes.keys() if entry is not None else ()


def local_args(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Pair],
    outputs: Sequence[Pair],
    local: Callable[[Sequence[int], Nd], Shape],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with arguments that hold global sizes rewritten to what one rank passes.

    ``inputs`` and ``outputs`` are (global shape, SBP) pairs; ``local`` turns one into local sizes, ints or LocalSize.
    """
    entry = entry_of(op)
    if entry is None or not entry.sizes:
        return tuple(args), dict(kwargs)
    local_inputs = [list(local(shape, sbp)) for shape, sbp in inputs]
    local_outputs = [list(local(shape, sbp)) for shape, sbp in outputs]
    new_args, new_kwargs = list(args), dict(kwargs)
    names = argument_names(op)
    for name, compute in entry.sizes.items():
        at, size = names.index(name), compute(local_inputs, local_outputs)
        if size is None:  # it says nothing here
            continue
        if name in new_kwargs:
            new_kwargs[name] = size
        elif at < len(new_args) and new_args[at] is not None:
            new_args[at] = size
    return tuple(new_args), new_kwargs


def needed_offset(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Offset | None:
    """The offset form of an op that depends on places; None of any other."""
    entry = entry_of(op)
    offset = entry.offset if entry is not None else None
    return offset if offset is not None and offset.is_needed(op, args, kwargs) else None


def offset_form(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Pair],
    outputs: Sequence[Pair],
    places: Callable[[Sequence[int], Nd], Sequence[tuple[Any, int] | None]],
) -> tuple[Op, dict[str, Any]]:
    """The op that one rank calls for ``op``, with its keyword arguments: the op itself, or its offset form.

    ``inputs`` and ``outputs`` are as for ``local_args``; ``places`` tells of each dim the rank's first place, an int or
    LocalStart, and how far apart its places are; None where it is whole.
    """
    counted = _counted_dim(op, args, kwargs, inputs, outputs)
    if counted is not None:
        offset, dim, shape, nd = counted
        place_and_step = places(shape, nd)[dim]
        if place_and_step is not None:
            start, step = place_and_step
            return offset.op, {**kwargs, "start": start, **({"step": step} if step > 1 else {}), "total": shape[dim]}
    return op, dict(kwargs)


def counts_places(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Pair], outputs: Sequence[Pair]
) -> bool:
    """Return whether a rank's call depends on which places of a dim are its own; arguments as for ``offset_form``."""
    counted = _counted_dim(op, args, kwargs, inputs, outputs)
    return counted is not None and any(sbp.is_split and sbp.dim == counted[1] for sbp in counted[3])


def _counted_dim(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Pair], outputs: Sequence[Pair]
) -> tuple[Offset, int, Sequence[int], Nd] | None:
    """The offset form of an op, and the dim whose places it counts, of a tensor with its shape and SBP; None of any
    other op."""
    offset = needed_offset(op, args, kwargs)
    shape, nd = (*inputs, *outputs)[offset.tensor] if offset is not None else ((), ())
    return (offset, offset.dim_in(op, args, kwargs, len(shape)), shape, nd) if offset is not None and shape else None


def of_whole(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Op, tuple[Any, ...], dict[str, Any]]:
    """The call on whole tensors of which this is what one rank makes: the way back from the two above."""
    base, said = base_of(op), ("start", "step", "total") if is_offset_form(op) else ()
    named = {name: arg for name, arg in kwargs.items() if name not in said}
    return base, tuple(map(_global, args)), {name: _global(arg) for name, arg in named.items()}


def _global(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return type(arg)(map(_global, arg)) if any(map(_is_local, arg)) else arg
    return _global(arg.size) if isinstance(arg, LocalSize) else 0 if isinstance(arg, LocalStart) else arg


def _is_local(arg: Any) -> bool:
    return isinstance(arg, (LocalSize, LocalStart, list, tuple))
