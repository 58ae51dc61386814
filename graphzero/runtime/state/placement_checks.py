"""Checks, before anything is compiled, of tensors that are on other ranks or that a step cannot keep as they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.errors import ConfigError, PlacementError, SbpError
from graphzero.ir.storage.overlap import Regions, shares_elements
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.tensors.shards import check_mesh
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.dtensor import annotation, said_placement
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd


def check_kept(nd: Nd, what: str) -> None:
    """Raise SbpError for an SBP that nothing can have which stays from step to step."""
    if any(sbp.is_partial for sbp in nd):
        raise SbpError(
            f"{what} cannot be ({', '.join(map(str, nd))}): a partial is the sum of what the ranks hold, and an update "
            "needs the value itself; make it B, or split it: gz.sbp.S(0)"
        )


def check_here(x: Tensor, placement: Placement, what: str) -> None:
    """Raise PlacementError for a tensor that its user has put on other ranks than those of ``placement``."""
    if isinstance(x, DTensor):
        check_mesh(x, placement, what)
        return
    said = said_placement(x)
    if said is not None and said != placement:
        raise PlacementError(
            f"{what} was placed on {said!r} by gz.to_global, the graph runs on {placement!r}; place it there "
            "(gz.to_global once more), or make the Graph on its placement: Graph(placement)"
        )


def check_held(entry: ModuleTensor, placement: Placement) -> None:
    """Both, for a parameter or buffer."""
    if isinstance(entry.tensor, DTensor):
        nd = nd_on(entry.tensor, placement, entry.path)
    else:
        check_here(entry.tensor, placement, entry.path)
        known = annotation(entry.tensor)
        nd = known[1] if known is not None else ()
    check_kept(nd, f"the {name_of_tensor(entry)}")


def name_of_tensor(entry: ModuleTensor) -> str:
    """Name of a parameter or buffer in messages."""
    return f"{'parameter' if entry.kind == 'param' else entry.kind} {entry.path}"


def check_apart(tensors: Mapping[str, Tensor], written: Iterable[str]) -> None:
    """Raise ConfigError where what is written lies in memory that another tensor, or another of its elements, has too.

    A step computes new values and writes each to its own place; what plain PyTorch computes there depends on the order
    of its writes.  tensors: by what to call them, "parameter model.weight".  written: those that a step may write to.
    """
    written = set(written)
    for name in filter(written.__contains__, tensors):
        local = _compat.local_tensor(tensors[name])
        if local.layout is torch.strided and not local.is_contiguous() and shares_elements(local):
            raise ConfigError(
                f"the {name} of shape {list(local.shape)} and strides {list(local.stride())} has elements that share "
                "memory, as after expand, so a write to one also changes others; give each its own before the first "
                "call: p.data = p.data.clone()"
            )
    for one, other in Regions(tensors).overlapping():
        if one in written or other in written:
            first, second = sorted((one, other), key=list(tensors).index)
            raise ConfigError(
                f"the {first} and the {second} share memory, but are two tensors, each with its own update; make "
                "them one object (a.weight = b.weight; neither .data = ... nor load_state_dict(assign=True) does), or "
                "give one its own memory: p.data = p.data.clone()"
            )


def check_trained_apart(entries: Iterable[ModuleTensor]) -> None:
    """``check_apart`` for parameters and buffers of which those are written that require a gradient."""
    by_name = {name_of_tensor(entry): entry.tensor for entry in entries}
    check_apart(by_name, [name for name, x in by_name.items() if x.requires_grad])


_MAPS, _BOOT = Path("/proc/self/maps"), Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class MappedMemory:
    """can_write: whether this process may.  shared: what processes that share it have in common, else ""."""

    can_write: bool
    shared: str


def find_mapped_memory(tensors: Mapping[str, Tensor]) -> dict[str, MappedMemory]:
    """Find the CPU tensors whose memory torch did not allocate, by name."""
    foreign = {name: local.data_ptr() for name, x in tensors.items() if _is_foreign(local := _compat.local_tensor(x))}
    if not foreign:
        return {}
    try:
        lines, boot = _MAPS.read_text().splitlines(), _BOOT.read_text().strip()
    except OSError:
        return {}
    starts = [int(line.partition("-")[0], 16) for line in lines]
    mapped = {name: _place(lines, starts, boot, at) for name, at in foreign.items()}
    return {name: place for name, place in mapped.items() if place is not None}


def _is_foreign(x: Tensor) -> bool:
    if x.device.type != "cpu" or x.layout is not torch.strided or not x.numel():
        return False
    storage = x.untyped_storage()
    return storage.is_shared() or not storage.resizable()


def _place(lines: list[str], starts: list[int], boot: str, address: int) -> MappedMemory | None:
    at = bisect_right(starts, address) - 1
    if at < 0:
        return None
    span, access, offset, device, inode, *_ = lines[at].split()
    if address >= int(span.partition("-")[2], 16):
        return None
    inside = address - starts[at] + int(offset, 16)
    return MappedMemory("w" in access, f"{boot} {device} {inode} {inside}" if "s" in access else "")
