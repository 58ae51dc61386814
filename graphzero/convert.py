"""Between plain tensors and global ones: ``to_global`` and ``to_local``.

A global tensor is a torch DTensor; on a virtual placement it is a whole plain tensor with an annotation.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.capture import is_capturing, pin_value, placement_of_capture
from graphzero.errors import PlacementError, SbpError, hides_frames, shorten_repr
from graphzero.extensions import SPLITS, extensions
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.placement_checks import check_kept, check_trained_apart
from graphzero.runtime.tensors import shards
from graphzero.runtime.tensors.shards import global_shape, is_whole, wrap
from graphzero.runtime.tensors.stage_tensors import own_member
from graphzero.runtime.tensors.submesh import check_ranks, describe_distribution, nd_here, relocate
from graphzero.runtime.world.consensus import PLACE, Ranks, digest
from graphzero.runtime.world.launch import has_fake_world, located
from graphzero.runtime.world.world import device_of
from graphzero.sbp.dtensor import annotate, nd_of_dtensor
from graphzero.sbp.placement import PIPELINE, Placement, as_placement
from graphzero.sbp.shards import chunk, cutting, nests
from graphzero.sbp.types import B, Nd, Sbp

Wanted = Sbp | Sequence[Sbp] | str | None  # one SBP for each placement axis, or the name of a plug-in that has them


@hides_frames
@_compat.cpu_by_default
def to_global(
    x: Any,
    placement: Placement | DeviceMesh | None = None,
    sbp: Wanted | Mapping[str, Wanted] = None,
) -> Any:
    """Make ``x`` a global tensor, or give it another SBP.

    * a plain tensor: this rank's local tensor becomes a DTensor; on a virtual placement the whole tensor is annotated;
    * a DTensor: redistributed to ``sbp``, on its own ranks as ``placement`` arranges them;
    * a module: its full parameters and buffers, taken from rank 0, become DTensors in place; DTensors are
      redistributed; the module is returned.  ``sbp`` may map shell patterns of their names, ``"*.q_proj.*"``, to SBPs:
      the first pattern that matches counts, all others are B.  ``"auto"`` takes the splits of a transformers
      configuration: ``base_model_tp_plan`` for an axis ``tp``, ``base_model_ep_plan`` for an axis ``ep``.  A parameter
      that moves becomes a new ``nn.Parameter``, so create optimizers afterwards;
    * inside ``build`` or a module's forward, ``to_global(h, sbp=...)`` pins the value h; outside of a Graph this call
      is the identity.

    Raises SbpError for an SBP that the value cannot have, PlacementError for ranks that do not exist.
    """
    if isinstance(sbp, str) and sbp in extensions(SPLITS):
        return to_global(x, placement, _planned(x, placement, sbp))
    everyone = placement
    if isinstance(placement, Placement) and PIPELINE in placement.names:
        everyone = located(placement)
        without: Wanted | Mapping[str, Wanted] = _stage_sbp(placement, sbp)
        placement, sbp = everyone.without_pipeline(own_member(everyone)), without
    if isinstance(x, nn.Module):
        if is_capturing():
            raise SbpError(
                f"to_global of a {type(x).__name__} inside build: a module is placed once, before the first call. "
                "Place it in __init__, or pin the values that it makes: gz.to_global(h, sbp=...)"
            )
        return _module_to_global(x, _required(placement, x), _required(everyone, x), sbp)
    if not isinstance(x, Tensor):
        raise SbpError(f"to_global takes a tensor or a module, not {type(x).__name__}; call it for each tensor")
    if sbp is not None and is_capturing():
        _check_pins(sbp, x, placement)
        return pin_value(x, _tuple(sbp))
    if isinstance(x, DTensor):
        return _redistributed(x, placement, sbp)
    if placement is None:
        if sbp is not None:
            return x
        raise SbpError("to_global of a plain tensor needs to know where: to_global(x, placement=..., sbp=...)")
    where = located(placement)
    nd = _nd(sbp, where, x)
    _check_dims(x.shape, nd, "to_global")
    shape = tuple(x.shape) if where.virtual else _global_shape(x, where, nd)
    _check_even(shape, nd, where, "to_global")
    if where.virtual:
        if isinstance(x, nn.Parameter):
            check_kept(nd, "a parameter")
        annotate(x, where, nd, by_user=True)
        return x
    return wrap(x, where.mesh(), nd, shape)


def to_local(x: Any) -> Any:
    """This rank's shard as a plain tensor.  A plain tensor is returned as it is (whole, on a virtual placement)."""
    return x.to_local() if isinstance(x, DTensor) else x


def _planned(x: Any, placement: Placement | DeviceMesh | None, name: str) -> Mapping[str, Nd]:
    """The splits that the plug-in of a name gives a module."""
    if not isinstance(x, nn.Module):
        raise SbpError(
            f"to_global of a {type(x).__name__} with sbp={name!r}: write gz.sbp.B, gz.sbp.S(0) or gz.sbp.P; "
            f'"{name}" is for a module whose configuration has plans'
        )
    plugin = extensions(SPLITS)[name]
    with plugin.name_errors():
        splits = plugin.load()(x, as_placement(_required(placement, x)))
        if not isinstance(splits, Mapping) or not all(isinstance(name, str) for name in splits):
            raise plugin.refusal(f"gave {shorten_repr(splits)}; give the SBPs of parameters by name")
    return splits


def _required(placement: Placement | DeviceMesh | None, x: object) -> Placement:
    if placement is None:
        raise PlacementError(f"to_global of a {type(x).__name__} needs placement=, the ranks to put it on")
    return located(placement)


def _nd(sbp: Wanted | Mapping[str, Wanted], placement: Placement, x: object, pattern: str = "") -> Nd:
    nd = _tuple(sbp)
    if len(nd) != len(placement.names) or not all(isinstance(item, Sbp) for item in nd):
        raise SbpError(
            f"to_global of a {type(x).__name__} on {placement!r} needs sbp= with one SBP per axis "
            f"({', '.join(placement.names)}), not {sbp!r}{f' for {pattern!r}' * bool(pattern)}; "
            "write gz.sbp.B for DTensor's Replicate(), gz.sbp.S(dim) for its Shard(dim)"
        )
    return nd


def _stage_sbp(placement: Placement, sbp: Wanted | Mapping[str, Wanted]) -> Any:
    """``sbp`` without the axis of pipeline stages, along which nothing is split."""
    if isinstance(sbp, Mapping):
        return {name: _stage_sbp(placement, one) for name, one in sbp.items()}
    nd, at = _tuple(sbp), placement.axis(PIPELINE)
    if len(nd) != len(placement.names):
        return sbp
    if nd[at] is not B:
        raise SbpError(
            f"to_global: {nd[at]} along {PIPELINE}, whose members have different stages\n  Write B there, and say "
            "which modules are on which stage: config.set_stage(module, stage)"
        )
    return (*nd[:at], *nd[at + 1 :]) or (B,)


def _text(nd: Sequence[Sbp]) -> str:
    return ", ".join(map(str, nd))


def _tuple(sbp: Any) -> tuple[Any, ...]:
    return tuple(sbp) if isinstance(sbp, (tuple, list)) else () if sbp is None else (sbp,)


def _check_pins(sbp: Any, x: Tensor, placement: Placement | DeviceMesh | None) -> None:
    wanted, own = _tuple(sbp), placement_of_capture()
    axes = own.names
    if placement is not None and as_placement(placement) != own:
        raise PlacementError(
            f"to_global inside build: the step runs on {own!r}, not on {as_placement(placement)!r}; leave placement out"
        )
    if len(wanted) != len(axes) or not all(item is None or isinstance(item, Sbp) for item in wanted):
        raise SbpError(
            f"to_global inside build takes one SBP per placement axis ({', '.join(axes)}), such as gz.sbp.S(0), or "
            f"None where the value is free, not {sbp!r}"
        )
    _check_dims(x.shape, [item for item in wanted if item is not None], "to_global")
    _check_even(x.shape, [item or B for item in wanted], own, "to_global")


def _check_dims(shape: Sequence[int], nd: Sequence[Sbp], what: str) -> None:
    for sbp in nd:
        if sbp.is_split and sbp.dim >= len(shape):
            raise SbpError(f"{what}: a tensor of shape {tuple(shape)} has no dim {sbp.dim}; choose another split, or B")


def _check_even(shape: Sequence[int], nd: Sequence[Sbp], where: Placement, what: str) -> None:
    if not nests(shape, tuple(nd), where.hierarchy):
        raise SbpError(
            f"{what}: shape {tuple(shape)} cannot be ({_text(nd)}) on {where!r}: the sections of a dim "
            "and the ranks' pieces of each are of one size; choose sections that divide, another split, or B"
        )


def _redistributed(x: DTensor, placement: Placement | DeviceMesh | None, sbp: Wanted | Mapping[str, Wanted]) -> DTensor:
    where = as_placement(x.device_mesh if placement is None else placement)
    check_ranks(x, where, "the value given to to_global")
    if sbp is None:
        return x
    nd = _nd(sbp, where, x)
    _check_dims(x.shape, nd, "to_global")
    _check_even(x.shape, nd, where, "to_global")
    before = nd_here(x, where) or (B,) * len(nd)
    if any(new.is_partial and new is not old for new, old in zip(nd, before, strict=True)):
        raise SbpError(
            f"to_global: a DTensor that is ({_text(nd_of_dtensor(x))}) has no summands that could become "
            f"({_text(nd)}); make a partial from the ranks' own: gz.to_global(local, placement, sbp)"
        )
    if before == nd or is_whole(before) and nd_here(x, where) is not None:
        return relocate(x, where, nd)  # this rank needs no other rank
    ranks = Ranks(where, "DTensor")
    with ranks.together("to_global of a DTensor"):
        text = f"{describe_distribution(x, where)} to {_text(nd)}"
        ranks.agree(PLACE, digest(text), lambda: {"tensor": text})
        return relocate(x, where, nd)


def _global_shape(x: Tensor, placement: Placement, nd: Nd) -> tuple[int, ...]:
    """The global shape of every rank's ``x``: the ranks tell each other theirs where any dim is split."""
    if has_fake_world() or not any(sbp.is_split for sbp in cutting(nd, placement.hierarchy)):
        return global_shape(x.shape, nd, placement.hierarchy)
    ranks = Ranks(placement, type(x).__name__)
    with ranks.together(f"to_global of a {type(x).__name__}"):
        ranks.agree(PLACE, digest(str(x.dtype), _text(nd)), lambda: {"tensor": f"{x.dtype} to {_text(nd)}"})
        shapes = dict(zip(ranks.ids, ranks.collect(tuple(x.shape)), strict=True))
        try:
            return _shape_of([shapes[rank] for rank in placement.ranks.ravel().tolist()], placement.hierarchy, nd)
        except SbpError as error:  # on all ranks, which know the same
            raise ranks.by_all(error) from None


def _shape_of(pieces: Sequence[tuple[int, ...]], hierarchy: Sequence[int], nd: Nd) -> tuple[int, ...]:
    """The global shape of pieces of these shapes, innermost axis first.  Raises SbpError for what chunk cuts not."""
    shapes = list(pieces)
    for sbp, ranks in reversed(list(zip(nd, hierarchy, strict=True))):
        lines = [shapes[i : i + ranks] for i in range(0, len(shapes), ranks)]
        shapes = [_joined(line, sbp) for line in lines]
    return shapes[0]


def _joined(line: Sequence[tuple[int, ...]], sbp: Sbp) -> tuple[int, ...]:
    """The shape of what the ranks along one axis hold."""
    first = line[0]
    if any(len(shape) != len(first) for shape in line):
        raise SbpError(f"to_global: the ranks' pieces have shapes {', '.join(map(str, line))}; give all as many dims")
    lengths = [shape[sbp.dim] for shape in line] if sbp.is_split else []
    joined = list(first)
    if sbp.is_split:
        joined[sbp.dim] = sum(lengths)
        cut = [chunk(sum(lengths), len(line), place)[1] for place in range(len(line))]
        if lengths != cut:
            raise SbpError(
                f"to_global(sbp={sbp}): the ranks' pieces are {lengths} long in dim {sbp.dim}; a split is cut as "
                f"torch.chunk cuts: {cut}"
            )
    others = {shape[: sbp.dim] + shape[sbp.dim + 1 :] for shape in line} if sbp.is_split else set(line)
    if len(others) > 1:
        shapes = ", ".join(map(str, line))
        raise SbpError(f"to_global(sbp={sbp}): the ranks' pieces have shapes {shapes}, which do not form one tensor")
    return tuple(joined)


def _module_to_global(
    module: nn.Module, placement: Placement, everyone: Placement, sbp: Wanted | Mapping[str, Wanted]
) -> nn.Module:
    """everyone: the ranks of all pipeline stages, of one of which ``placement`` is."""
    entries = list(tree.tensors({"": module}).values())
    name = type(module).__name__
    ranks = Ranks(everyone, name)
    with ranks.together(f"to_global of {name}"):
        nds = ranks.agree_on(
            PLACE, lambda: _checked_nds(module, entries, placement, sbp), lambda nds: _facts(entries, nds, placement)
        )
        news = [
            _placed(
                entry.tensor, placement, everyone, nd if entry.tensor.dim() else (B,) * len(nd)
            )  # a count is not split
            for entry, nd in zip(entries, nds, strict=True)
        ]
        ranks.agree(PLACE)  # from here on nobody can stop the others: the module is placed on all ranks, or on none
        for entry, new in zip(entries, news, strict=True):
            if new is not None:
                tree.replace_tensor(entry, new)
    return module


def _checked_nds(
    module: nn.Module, tensors: Sequence[ModuleTensor], placement: Placement, sbp: Wanted | Mapping[str, Wanted]
) -> list[Nd]:
    """SBPs for each of the module's tensors."""
    if isinstance(sbp, Mapping):
        nds = _by_name(tensors, sbp, placement, module)
    else:
        nds = [_nd(sbp, placement, module)] * len(tensors)
        check_kept(nds[0] if nds else (), f"a module, {type(module).__name__},")
    check_trained_apart(tensors)
    for entry, nd in zip(tensors, nds, strict=True):
        check_kept(nd, f"the module's {entry.path}")
        if entry.tensor.dim():
            _check_dims(entry.tensor.shape, nd, f"to_global of the module's {entry.path}")
            _check_even(entry.tensor.shape, nd, placement, f"to_global of the module's {entry.path}")
        if isinstance(entry.tensor, DTensor):
            check_ranks(entry.tensor, placement, f"the module's {entry.path}")
    return nds


def _placed(x: Tensor, placement: Placement, everyone: Placement, nd: Nd) -> Tensor | None:
    """The tensor that replaces a module's tensor; None where that stays."""
    if placement.virtual:
        annotate(x, placement, nd, by_user=True)
        return None
    if isinstance(x, DTensor):
        given: Any = x.detach()
        new = relocate(given, placement, nd)
        return None if new is given else new
    tree.to_device(x, device_of(placement))
    tree.from_first_rank(x, everyone)
    return shards.as_dtensor(x.detach(), placement, nd)


def _by_name(
    tensors: Sequence[ModuleTensor], wanted: Mapping[str, Wanted], placement: Placement, module: nn.Module
) -> list[Nd]:
    """The SBP of each tensor: that of the first pattern that fits one of its names, B where none does."""
    known = {pattern: _nd(sbp, placement, module, pattern) for pattern, sbp in wanted.items()}
    names: dict[int, list[str]] = {}
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in itertools.chain(*every):
        names.setdefault(id(tensor), []).append(name)
    idle = [p for p in known if not fnmatch.filter(itertools.chain(*names.values()), p)]
    if idle:
        have = ", ".join(itertools.islice((path for paths in names.values() for path in paths), 6))
        raise SbpError(
            f"to_global of a {type(module).__name__}: {idle[0]!r} fits no parameter or buffer; they are {have} ..."
        )
    whole = (B,) * len(placement.names)
    return [
        next((nd for p, nd in known.items() if fnmatch.filter(names[id(entry.tensor)], p)), whole) for entry in tensors
    ]


def _facts(tensors: Sequence[ModuleTensor], nds: Sequence[Nd], placement: Placement) -> dict[str, str]:
    """Facts that must be equal on all ranks: SBPs of each tensor, whether it has values, and its target SBPs."""
    return {
        entry.path: f"{describe_distribution(entry.tensor, placement)} to {_text(nd)}"
        for entry, nd in zip(tensors, nds, strict=True)
    }
