"""The plan of a checkpoint: which rank writes which chunks of which tensors; and the writing of it.

No rank waits for another one while it writes: see ``markers``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero._compat import is_dtensor
from graphzero.checkpoint.files import blocks, folder, safetensors
from graphzero.checkpoint.files.chunks import Chunk, LocalChunk, assign_writers
from graphzero.checkpoint.files.index import NAME as INDEX
from graphzero.checkpoint.files.index import CheckpointIndex, StoredChunk, StoredTensor
from graphzero.checkpoint.files.json_values import STORED
from graphzero.checkpoint.files.markers import RankPart
from graphzero.checkpoint.files.partial_checkpoint import PartialCheckpoint
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.shards import local_of, memory_key
from graphzero.runtime.tensors.stage_tensors import home_of, own_member
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B

_WORD = 8  # bytes that are summed at once: items of other sizes are last, so that all others begin at a word


@dataclass(frozen=True)
class WriteItem:
    """A chunk of a tensor that one rank writes.  shape: of the whole tensor."""

    tensor: str
    part: LocalChunk
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.part.chunk.numel * self.dtype.itemsize

    @property
    def entry(self) -> tuple[str, torch.dtype, tuple[int, ...]]:
        """Name, dtype and shape in a safetensors file; a dtype that the format lacks is there as bytes."""
        chunk, name = self.part.chunk, self.tensor
        if chunk.sizes != self.shape:
            ranges = (f"{a}:{a + n}" for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            name += f"[{', '.join(ranges)}]"
        if self.dtype in safetensors.NAMES:
            return name, self.dtype, chunk.sizes
        return name, torch.uint8, (*chunk.sizes, self.dtype.itemsize)


@dataclass(frozen=True)
class SavePlan:
    """Contents of a checkpoint, alike on all ranks.

    stored: every tensor, without its pieces.  files: by position, what that rank writes, in order; frozen: what it only
    hashes.
    """

    stored: Mapping[str, StoredTensor]
    files: Sequence[Sequence[WriteItem]]
    frozen: Sequence[Sequence[WriteItem]]

    def file_bytes(self, position: int) -> int:
        return sum(item.nbytes for item in self.files[position])

    def make_header(self, position: int) -> tuple[bytes, list[safetensors.SafetensorsEntry]]:
        return safetensors.make_header(item.entry for item in self.files[position])

    def stored_tensors(self, hashes: Sequence[Sequence[str]]) -> dict[str, StoredTensor]:
        """All tensors, with their pieces. hashes: those of frozen tensors, by position."""
        hashes_of: dict[str, list[tuple[str, Chunk]]] = {name: [] for name in self.stored}
        for items, texts in zip(self.frozen, hashes, strict=True):
            for item, text in zip(items, texts, strict=True):
                hashes_of[item.tensor].append((text, item.part.chunk))
        pieces: dict[str, list[StoredChunk]] = {name: [] for name in self.stored}
        for position, items in enumerate(self.files):
            for item, entry in zip(items, self.make_header(position)[1], strict=True):
                if item.part.chunk.numel:
                    pieces[item.tensor].append(StoredChunk(file_name(position), entry.start, item.part.chunk))
        return {
            name: replace(stored, pieces=tuple(pieces[name]), hashes=tuple(hashes_of[name]))
            for name, stored in self.stored.items()
        }  # fmt: skip


def file_name(position: int) -> str:
    return f"rank-{position:05d}.safetensors"


def make_save_plan(
    tensors: Mapping[str, Tensor], placement: Placement, is_first_alone: bool, is_frozen: Callable[[str], bool]
) -> SavePlan:  # fmt: skip
    """The plan for ``tensors``.

    is_first_alone: whether plain tensors' values are those of the first rank, and others may not have them yet.
    is_frozen: whether a tensor, by its name, is to be hashed only.
    Raises CheckpointError for a tensor that no file can hold.
    """
    stored: dict[str, StoredTensor] = {}
    names_by_memory: dict[object, str] = {}
    for name, x in tensors.items():
        _check_savable(x, name)
        same_as = names_by_memory.setdefault(memory_key(x), name) if x.numel() else name
        stored[name] = StoredTensor(x.dtype, tuple(x.shape), (), "" if same_as == name else same_as)
    own = {name: x for name, x in tensors.items() if not stored[name].same_as}

    def plan_files(names: Sequence[str]) -> list[list[WriteItem]]:
        files: list[list[WriteItem]] = [[] for _ in range(1 if placement.virtual else placement.size)]
        parts_of_tensors = assign_chunks([own[name] for name in names], placement, is_first_alone)
        for name, parts in zip(names, parts_of_tensors, strict=True):
            for position, part in parts:
                files[position].append(WriteItem(name, part, stored[name].dtype, stored[name].shape))
        return [sorted(items, key=lambda item: item.nbytes % _WORD != 0) for items in files]

    frozen = [name for name in own if is_frozen(name) and own[name].numel()]
    return SavePlan(stored, plan_files([name for name in own if name not in set(frozen)]), plan_files(frozen))


def assign_chunks(
    tensors: Sequence[Tensor], placement: Placement, is_first_alone: bool
) -> list[list[tuple[int, LocalChunk]]]:
    """For each tensor, (position, chunk that the rank there writes), each element once. See ``make_save_plan``."""
    if placement.virtual:
        return assign_writers([(tuple(x.shape), (), is_first_alone) for x in tensors], ())
    own, homes = placement.without_pipeline(own_member(placement)), [home_of(x, placement) for x in tensors]
    assigned: list[list[tuple[int, LocalChunk]]] = [[] for _ in tensors]
    flat = placement.ranks.ravel().tolist()
    for home in sorted({*homes}, key=lambda home: -1 if home is None else home):
        here = [i for i, other in enumerate(homes) if other == home]
        shapes = [
            (tuple(x.shape), nd_on(x, own, "a tensor") if isinstance(x, DTensor) else (B,) * len(own.names),
             is_first_alone and not is_dtensor(x))
            for x in (tensors[i] for i in here)
        ]  # fmt: skip
        positions = [flat.index(rank) for rank in placement.without_pipeline(home or 0).ranks.ravel().tolist()]
        for i, parts in zip(here, assign_writers(shapes, own.hierarchy), strict=True):
            assigned[i] = [(positions[position], part) for position, part in parts]
    return assigned


def _check_savable(x: Tensor, name: str) -> None:
    if x.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values to save")
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        raise CheckpointError(f"{name} is not a dense tensor ({kind}); a checkpoint holds dense ones")
    if x.dtype not in STORED:
        raise CheckpointError(f"{name} is of {x.dtype}, which torch cannot copy; save it in a view of another dtype")


def local_views(items: Sequence[WriteItem], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of what this rank writes, in order."""
    return [item.part.local.view_in(local_of(tensors[item.tensor])) for item in items]


# ---- writing


def write_rank_file(
    partial: Path, plan: SavePlan, position: int, chunks: Sequence[Tensor], after_block: Callable[[], None]
) -> blocks.FileChecksums:  # fmt: skip
    """Write this rank's file.  Raises CheckpointError if it cannot be written."""
    nbytes, path = plan.file_bytes(position), partial / file_name(position)

    def parts() -> Iterator[memoryview]:
        yield memoryview(plan.make_header(position)[0])
        for chunk in chunks:
            yield from blocks.iterate_bytes(chunk)

    with folder.explain_write_errors(f"{path}", nbytes):
        free = shutil.disk_usage(partial).free
        if free < nbytes:
            raise CheckpointError(
                f"{path} cannot be written: it takes {nbytes} bytes, {free} are free. Nothing was saved; "
                "earlier checkpoints are as they were; make room, or keep fewer of them: gz.save(..., keep=k)"
            )
        return blocks.write_blocks(path, parts(), after_block)


def complete_checkpoint(
    partial: PartialCheckpoint, plan: SavePlan, parts: Sequence[RankPart], make_index: Callable[..., CheckpointIndex],
    keep: int | None,
) -> Path:  # fmt: skip
    """Write the index of what all ranks have written, and give the folder its name; earlier ones are removed then."""
    assert partial.path is not None
    with folder.explain_write_errors(f"{partial.path}"):
        files = {file_name(position): part.file for position, part in enumerate(parts)}
        index = make_index(tensors=plan.stored_tensors([part.frozen for part in parts]), files=files)
        with open(partial.path / INDEX, "w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        done = partial.finish()
    if keep is not None:
        folder.keep_last(done, keep)
    return done
