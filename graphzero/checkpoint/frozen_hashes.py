"""Frozen parameters of which a checkpoint has hashes alone: whether those that stand here are the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphzero._compat import is_dtensor
from graphzero.checkpoint.files import save_plan
from graphzero.checkpoint.files.blocks import sha256_of
from graphzero.checkpoint.files.chunks import Chunk
from graphzero.checkpoint.files.index import StoredTensor
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.resplit import whole
from graphzero.runtime.tensors.shards import local_of
from graphzero.sbp.placement import Placement

_SHOWN = 6


def check_present(stored: Mapping[str, StoredTensor], have: Mapping[str, Tensor], where: str) -> None:
    """Raise CheckpointError for what has no values here to compare, or others at first sight."""
    for name, x in have.items():
        if x.is_meta:
            raise CheckpointError(
                f"{where} has hashes of frozen parameters, not their values, and {name} is on the meta device here: "
                "load what they were frozen from first, gz.load_pretrained(graph, path)"
            )
        if x.dtype != stored[name].dtype:
            raise CheckpointError(f"{name} is frozen, and {x.dtype} here, {stored[name].dtype} in {where}")


def different(
    stored: Mapping[str, StoredTensor], have: Mapping[str, Tensor], placement: Placement, is_first_alone: bool
) -> list[str]:
    """Names of those whose hashes this rank finds to be others.  All ranks call it; where pieces are those that were
    saved each hashes its own, else one tensor at a time is made whole.

    stored, have: by name, of the same shapes.  is_first_alone: of a plain tensor the first rank's values count.
    """
    names = list(have)
    parts = save_plan.assign_chunks([have[name] for name in names], placement, [is_first_alone] * len(names))
    here = save_plan.rank_position(placement)
    found = []
    for name, held in zip(names, parts, strict=True):
        x, wanted = have[name], {chunk: text for text, chunk in stored[name].hashes}
        if {one.chunk for _, one in held} == wanted.keys():
            mine = [(one.chunk, one.here.of(local_of(x))) for position, one in held if position == here]
        else:
            sharing = 1 if placement.virtual or is_first_alone and not is_dtensor(x) else placement.size
            mine = _share(list(wanted), whole(x, placement) if is_dtensor(x) else x, here, sharing)
        if any(sha256_of(piece) != wanted[chunk] for chunk, piece in mine):
            found.append(name)
    return found


def _share(chunks: list[Chunk], x: Tensor, here: int, sharing: int) -> list[tuple[Chunk, Tensor]]:
    """What of the whole ``x`` this rank hashes, one of so many."""
    return [(chunk, chunk.of(x)) for i, chunk in enumerate(chunks) if i % sharing == here]


def refuse(names: list[str], where: str) -> None:
    """Raise CheckpointError if there are any."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(
            f"{where} has hashes of frozen parameters, and {', '.join(names[:_SHOWN])}{more} have other values here; "
            "nothing was loaded. Load what they were frozen from first"
        )
