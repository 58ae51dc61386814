"""Between plain tensors and global ones: ``to_global`` and ``to_local``.

A global tensor is a torch DTensor; on a virtual placement it is a whole plain tensor with an annotation.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.capture import is_capturing, pin_value, placement_of_capture
from graphzero.errors import PlacementError, SbpError
from graphzero.runtime import modules as tree
from graphzero.runtime import shards
from graphzero.runtime.agree import PLACE, Ranks
from graphzero.runtime.launch import located
from graphzero.runtime.modules import Found
from graphzero.runtime.placed import check_kept
from graphzero.runtime.relocate import check_ranks, nd_here, relocated, standing
from graphzero.runtime.shards import wrap
from graphzero.runtime.world import device_of
from graphzero.sbp.dtensor import annotate, nd_of_dtensor
from graphzero.sbp.local import chunk, nests
from graphzero.sbp.placement import Placement, as_placement
from graphzero.sbp.types import B, Nd, Sbp

Wanted = Sbp | Sequence[Sbp] | None  # one SBP for each placement axis


@_compat.cpu_by_default
def to_global(
    x: Any,
    placement: Placement | DeviceMesh | None = None,
    sbp: Wanted | Mapping[str, Wanted] = None,
) -> Any:
    """Make ``x`` a global tensor, or give it another SBP.

    * a plain tensor: this rank's local tensor becomes a DTensor; on a virtual placement the whole tensor is annotated;
    * a DTensor: redistributed to ``sbp``, on its own ranks as ``placement`` arranges them;
    * a module: its full parameters and buffers, taken from rank 0, become DTensors in place, those that are DTensors
      are redistributed; it is returned.  ``sbp`` may map names of them, ``"*.q_proj.*"`` as in a shell, to SBPs: the
      first that fits counts, the rest is B.  What moves is a new ``nn.Parameter``: make optimizers afterwards;
    * inside ``build`` or a module's forward, ``to_global(h, sbp=...)`` pins the value h; outside a Graph it is
      then the identity.

    Raises SbpError for an SBP that the value cannot have, PlacementError for ranks that do not exist.
    """
    if isinstance(x, nn.Module):
        if is_capturing():
            raise SbpError(
                f"to_global of a {type(x).__name__} inside build: a module is placed once, before the first call. "
                "Place it in __init__, or pin the values that it makes: gz.to_global(h, sbp=...)"
            )
        return _module_to_global(x, _required(placement, x), sbp)
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
    shape = tuple(x.shape) if where.virtual else _gathered_shape(x, where, nd)
    _check_even(shape, nd, where, "to_global")
    if where.virtual:
        if isinstance(x, nn.Parameter):
            check_kept(nd, "a parameter")
        annotate(x, where, nd, by_user=True)
        return x
    return wrap(x, where.mesh(), nd, shape)


def to_local(x: Any) -> Any:
    """This rank's shard as a plain tensor.  A plain tensor (whole, on a virtual placement) is itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def _required(placement: Placement | DeviceMesh | None, x: object) -> Placement:
    if placement is None:
        raise PlacementError(f"to_global of a {type(x).__name__} needs placement=, the ranks to put it on")
    return located(placement)


def _nd(sbp: Wanted | Mapping[str, Wanted], placement: Placement, x: object) -> Nd:
    nd = _tuple(sbp)
    if len(nd) != len(placement.names) or not all(isinstance(item, Sbp) for item in nd):
        raise SbpError(
            f"to_global of a {type(x).__name__} on {placement!r} needs sbp= with one SBP per axis "
            f"({', '.join(placement.names)}), not {sbp!r}"
        )
    return nd


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
            f"{what}: shape {tuple(shape)} cannot be ({', '.join(map(str, nd))}) on {where!r}: the sections of a dim "
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
            f"to_global: a DTensor that is ({', '.join(map(str, nd_of_dtensor(x)))}) has no summands that could become "
            f"({', '.join(map(str, nd))}); make a partial from the ranks' own: gz.to_global(local, placement, sbp)"
        )
    return relocated(x, where, nd)


def _gathered_shape(x: Tensor, placement: Placement, nd: Nd) -> tuple[int, ...]:
    """The global shape of every rank's ``x``: the ranks tell each other their sizes along the split dims."""
    shape = list(x.shape)
    mesh = placement.mesh()
    for axis in reversed(range(len(nd))):
        sbp, ranks = nd[axis], placement.hierarchy[axis]
        if not sbp.is_split or ranks == 1:
            continue
        mine = torch.tensor([shape[sbp.dim]], device=mesh.device_type)
        sizes = [torch.zeros_like(mine) for _ in range(ranks)]
        dist.all_gather(sizes, mine, group=mesh.get_group(axis))
        found = [int(size) for size in sizes] if dist.get_backend() != "fake" else [shape[sbp.dim]] * ranks
        total = sum(found)
        if found != [chunk(total, ranks, place)[1] for place in range(ranks)]:
            raise SbpError(
                f"to_global(sbp={sbp}): the ranks' pieces are {found} long in dim {sbp.dim}; a split is cut as "
                f"torch.chunk cuts: {[chunk(total, ranks, place)[1] for place in range(ranks)]}"
            )
        shape[sbp.dim] = total
    return tuple(shape)


def _module_to_global(module: nn.Module, placement: Placement, sbp: Wanted | Mapping[str, Wanted]) -> nn.Module:
    held = list(tree.tensors({"": module}).values())
    nds = Ranks(placement, type(module).__name__).agree_on(
        PLACE, lambda: _checked_nds(module, held, placement, sbp), lambda nds: _facts(held, nds, placement)
    )
    for found, nd in zip(held, nds, strict=True):
        _put(found, placement, nd if found.tensor.dim() else (B,) * len(nd))  # a count of batches has nothing to split
    return module


def _checked_nds(
    module: nn.Module, held: Sequence[Found], placement: Placement, sbp: Wanted | Mapping[str, Wanted]
) -> list[Nd]:
    """Where each of the module's tensors is to lie."""
    if isinstance(sbp, Mapping):
        nds = _by_name(held, sbp, placement, module)
    else:
        nds = [_nd(sbp, placement, module)] * len(held)
        check_kept(nds[0] if nds else (), f"a module, {type(module).__name__},")
    for found, nd in zip(held, nds, strict=True):
        check_kept(nd, f"the module's {found.path}")
        if found.tensor.dim():
            _check_dims(found.tensor.shape, nd, f"to_global of the module's {found.path}")
            _check_even(found.tensor.shape, nd, placement, f"to_global of the module's {found.path}")
        if isinstance(found.tensor, DTensor):
            check_ranks(found.tensor, placement, f"the module's {found.path}")
    return nds


def _put(found: Found, placement: Placement, nd: Nd) -> None:
    """Place one tensor of a module where it stands."""
    if placement.virtual:
        annotate(found.tensor, placement, nd, by_user=True)
        return
    if isinstance(found.tensor, DTensor):
        given: Any = found.tensor.detach()
        new = relocated(given, placement, nd)
        if new is not given:
            tree.replace(found, new)
        return
    tree.to_device(found.tensor, device_of(placement))
    tree.from_first_rank(found.tensor, placement)
    tree.replace(found, shards.as_dtensor(found.tensor.detach(), placement, nd))


def _by_name(
    tensors: Sequence[Found], wanted: Mapping[str, Wanted], placement: Placement, module: nn.Module
) -> list[Nd]:
    """The SBP of each tensor: that of the first pattern that fits one of its names, B where none does."""
    known = {pattern: _nd(sbp, placement, module) for pattern, sbp in wanted.items()}
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
        next((nd for p, nd in known.items() if fnmatch.filter(names[id(found.tensor)], p)), whole) for found in tensors
    ]


def _facts(held: Sequence[Found], nds: Sequence[Nd], placement: Placement) -> dict[str, str]:
    """What must be the same on all ranks: how each tensor stands, with values or without, and where it is to lie."""
    return {
        found.path: f"{standing(found.tensor, placement)} to {', '.join(map(str, nd))}"
        for found, nd in zip(held, nds, strict=True)
    }
