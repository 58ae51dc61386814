"""Writing a checkpoint: who writes what, each rank's file, and what makes of all files a whole.

No rank needs another one's attention while it writes: see ``notes``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero._compat import is_dtensor, storage_id
from graphzero.checkpoint.files import blocks, folder, safetensors
from graphzero.checkpoint.files.chunks import Chunk, LocalChunk, assign_writers
from graphzero.checkpoint.files.index import NAME as INDEX
from graphzero.checkpoint.files.index import CheckpointIndex, StoredChunk, StoredTensor
from graphzero.checkpoint.files.json_values import STORED
from graphzero.checkpoint.files.markers import RankPart
from graphzero.checkpoint.files.partial_checkpoint import PartialCheckpoint
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.shards import local_of, position_of
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd

_WORD = 8  # bytes that are summed at once: what is no multiple of them stands last, so that the others begin at one


@dataclass(frozen=True)
class WriteItem:
    """A box of a tensor that one rank writes."""

    tensor: str
    held: LocalChunk
    dtype: torch.dtype
    whole: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of it in its file: the tensor's own, with its place if it is not all of it."""
        if self.held.chunk.sizes == self.whole:
            return self.tensor
        ranges = (f"{a}:{a + n}" for a, n in zip(self.held.chunk.start, self.held.chunk.sizes, strict=True))
        return f"{self.tensor}[{', '.join(ranges)}]"

    @property
    def nbytes(self) -> int:
        return self.held.chunk.numel * self.dtype.itemsize

    @property
    def as_stored(self) -> tuple[str, torch.dtype, tuple[int, ...]]:
        """Its head in a safetensors file; what that has no dtype for stands there as bytes."""
        if self.dtype in safetensors.NAMES:
            return self.name, self.dtype, self.held.chunk.sizes
        return self.name, torch.uint8, (*self.held.chunk.sizes, self.dtype.itemsize)


@dataclass(frozen=True)
class SavePlan:
    """What a checkpoint consists of, alike on all ranks.

    stored: every tensor, without its pieces.  files: by position, what that rank writes, in order; frozen: what it only
    hashes.
    """

    stored: Mapping[str, StoredTensor]
    files: Sequence[Sequence[WriteItem]]
    frozen: Sequence[Sequence[WriteItem]]

    def head(self, position: int) -> tuple[bytes, list[safetensors.Entry]]:
        return safetensors.head(written.as_stored for written in self.files[position])

    def tensors(self, hashes: Sequence[Sequence[str]]) -> dict[str, StoredTensor]:
        """Every tensor, with its pieces.  hashes: of what is frozen, by position."""
        chunks: dict[str, list[tuple[str, Chunk]]] = {name: [] for name in self.stored}
        for file, texts in zip(self.frozen, hashes, strict=True):
            for written, text in zip(file, texts, strict=True):
                chunks[written.tensor].append((text, written.held.chunk))
        pieces: dict[str, list[StoredChunk]] = {name: [] for name in self.stored}
        for position, file in enumerate(self.files):
            _, places = self.head(position)
            for written, place in zip(file, places, strict=True):
                if written.held.chunk.numel:
                    pieces[written.tensor].append(StoredChunk(file_name(position), place.start, written.held.chunk))
        return {
            name: StoredTensor(held.dtype, held.shape, tuple(pieces[name]), held.same_as, tuple(chunks[name]))
            for name, held in self.stored.items()
        }  # fmt: skip


def file_name(position: int) -> str:
    return f"rank-{position:05d}.safetensors"


def make_save_plan(
    tensors: Mapping[str, Tensor], placement: Placement, is_first_alone: Callable[[str], bool],
    is_frozen: Callable[[str], bool],
) -> SavePlan:  # fmt: skip
    """Who writes what of ``tensors``.

    is_first_alone: whether a plain tensor's values are those of the first rank, and others may not have them yet.
    is_frozen: whether it is to be hashed only.
    Raises CheckpointError for a tensor that no file can hold.
    """
    stored: dict[str, StoredTensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, x in tensors.items():
        check_savable(x, name)
        same_as = first.setdefault(_place(x), name) if x.numel() else name
        stored[name] = StoredTensor(x.dtype, tuple(x.shape), (), "" if same_as == name else same_as)
    own = {name: x for name, x in tensors.items() if not stored[name].same_as}

    def shared_out(names: Sequence[str]) -> list[list[WriteItem]]:
        files: list[list[WriteItem]] = [[] for _ in range(1 if placement.virtual else placement.size)]
        parts = assign_chunks([own[name] for name in names], placement, [is_first_alone(name) for name in names])
        for name, held in zip(names, parts, strict=True):
            for position, one in held:
                files[position].append(WriteItem(name, one, stored[name].dtype, stored[name].shape))
        return [sorted(file, key=lambda written: written.nbytes % _WORD != 0) for file in files]

    frozen = [name for name in own if is_frozen(name) and own[name].numel()]
    return SavePlan(stored, shared_out([name for name in own if name not in set(frozen)]), shared_out(frozen))


def assign_chunks(
    tensors: Sequence[Tensor], placement: Placement, alone: Sequence[bool]
) -> list[list[tuple[int, LocalChunk]]]:
    """Who writes what of each tensor: (position, box), all of it once.  alone: see ``make_save_plan``."""
    shapes = [
        (tuple(x.shape), () if placement.virtual else nd_of(x, placement, "a tensor"), first and not is_dtensor(x))
        for x, first in zip(tensors, alone, strict=True)
    ]
    return assign_writers(shapes, () if placement.virtual else placement.hierarchy)


def _place(x: Tensor) -> tuple[Any, ...]:
    local = local_of(x)
    return type(x) is DTensor, storage_id(local), local.storage_offset(), x.shape, local.stride(), x.dtype


def nd_of(x: Tensor, placement: Placement, what: str) -> Nd:
    """How ``x`` lies on a real placement."""
    return nd_on(x, placement, what) if isinstance(x, DTensor) else (B,) * len(placement.names)


def check_savable(x: Tensor, name: str) -> None:
    if x.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values to save")
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        raise CheckpointError(f"{name} is not a dense tensor ({kind}); a checkpoint holds dense ones")
    if x.dtype not in STORED:
        raise CheckpointError(f"{name} is of {x.dtype}, which torch cannot copy; save it in a view of another dtype")


def local_views(file: Sequence[WriteItem], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of what this rank writes, in order."""
    return [written.held.here.of(local_of(tensors[written.tensor])) for written in file]


def rank_position(placement: Placement) -> int:
    return 0 if placement.virtual else position_of(placement)


def nbytes(layout: SavePlan, position: int) -> int:
    return sum(written.nbytes for written in layout.files[position])


# ---- one rank


def write_file(
    partial: Path, layout: SavePlan, position: int, chunks: Sequence[Tensor], rest: Callable[[], None]
) -> blocks.FileChecksums:  # fmt: skip
    """This rank's file.  rest: see ``blocks.write``.  Raises CheckpointError if it cannot be written."""
    size = nbytes(layout, position)
    name = file_name(position)
    with folder.explained(f"{partial / name}", size):
        free = shutil.disk_usage(partial).free
        if free < size:
            raise CheckpointError(
                f"{partial / name} cannot be written: it takes {size} bytes, {free} are free. Nothing was saved; "
                "earlier checkpoints are as they were; keep=k has gz.save remove all but the last k"
            )
        return blocks.write(partial / name, _parts(layout.head(position)[0], chunks), rest)


def _parts(head: bytes, chunks: Sequence[Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for chunk in chunks:
        if chunk.numel():
            yield from blocks.iterate_bytes(chunk)


# ---- all of them


def complete(
    partial: PartialCheckpoint, layout: SavePlan, parts: Sequence[RankPart], make: Callable[..., CheckpointIndex], keep: int | None
) -> Path:  # fmt: skip
    """Write the index of what all ranks have written, and give the folder its name; earlier ones are removed then."""
    assert partial.path is not None
    with folder.explained(f"{partial.path}"):
        files = {file_name(position): note.file for position, note in enumerate(parts)}
        index = make(tensors=layout.tensors([note.frozen for note in parts]), files=files)
        with open(partial.path / INDEX, "w", encoding="utf-8") as file:
            file.write(index.text())
            file.flush()
            os.fsync(file.fileno())
        done = partial.finish()
    if keep is not None:
        folder.keep_last(done, keep)
    return done
