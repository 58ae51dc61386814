"""Hashes that a checkpoint has in place of the values of frozen parameters, compared with the parameters here."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphzero._compat import is_dtensor
from graphzero.checkpoint.files import save_plan
from graphzero.checkpoint.files.blocks import sha256_of
from graphzero.checkpoint.files.index import StoredTensor
from graphzero.errors import CheckpointError, shorten_list
from graphzero.runtime.tensors.resplit import whole
from graphzero.runtime.tensors.shards import local_of, position_of
from graphzero.sbp.placement import Placement


def check_hashable(stored: Mapping[str, StoredTensor], params: Mapping[str, Tensor], where: str) -> None:
    """Raise CheckpointError for parameters without values to compare, or of another dtype."""
    for name, x in params.items():
        if x.is_meta:
            raise CheckpointError(
                f"{where} has hashes of frozen parameters, not their values, and {name} is on the meta device here: "
                "load what they were frozen from first, gz.load_pretrained(graph, path)"
            )
        if x.dtype != stored[name].dtype:
            raise CheckpointError(f"{name} is frozen, and {x.dtype} here, {stored[name].dtype} in {where}")


def find_changed(
    stored: Mapping[str, StoredTensor], params: Mapping[str, Tensor], placement: Placement, is_first_alone: bool
) -> list[str]:
    """Names of the parameters whose hashes this rank finds to be others.  All ranks call it.

    Where pieces are those that were saved each rank hashes its own, else one tensor at a time is made whole.

    stored, params: by name, of the same shapes.  is_first_alone: of a plain tensor the first rank's values count.
    """
    parts_of_params = save_plan.assign_chunks(list(params.values()), placement, is_first_alone)
    here, changed = position_of(placement), []
    for (name, x), parts in zip(params.items(), parts_of_params, strict=True):
        saved_hashes = {chunk: text for text, chunk in stored[name].hashes}
        if {part.chunk for _, part in parts} == saved_hashes.keys():
            local = local_of(x)
            own = [(part.chunk, part.local.view_in(local)) for position, part in parts if position == here]
        else:
            count = 1 if placement.virtual or is_first_alone and not is_dtensor(x) else placement.size
            full = whole(x, placement) if is_dtensor(x) else x
            own = [(chunk, chunk.view_in(full)) for i, chunk in enumerate(saved_hashes) if i % count == here]
        if any(sha256_of(piece) != saved_hashes[chunk] for chunk, piece in own):
            changed.append(name)
    return changed


def raise_changed(names: list[str], where: str) -> None:
    """Raise CheckpointError if there are any."""
    if names:
        raise CheckpointError(
            f"{where} has hashes of frozen parameters, and {shorten_list(names)} have other values here; "
            "nothing was loaded. Load what they were frozen from first"
        )
