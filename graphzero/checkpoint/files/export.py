"""Weights of a checkpoint as other tools read them: safetensors files with whole tensors, and their index.

It is written tensor by tensor, by one process, from the files of a checkpoint; no Graph and no other rank is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from graphzero.checkpoint.files import blocks, folder, index, safetensors
from graphzero.checkpoint.files.index import CheckpointIndex, StoredTensor
from graphzero.checkpoint.files.read_chunks import TensorRead, read_tensors
from graphzero.errors import CheckpointError
from graphzero.sbp.placement import Placement, placement

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export(checkpoint: Path, path: Path, module: str | None, dtype: torch.dtype | None, shard_bytes: int) -> list[Path]:
    """See ``gz.save_pretrained``.  Returns the files, in order."""
    where = folder.chosen(checkpoint)
    found = index.read(where)
    for name, summed in found.files.items():
        blocks.check_file_size(where / name, summed)
    tensors = _of_module(found, module, where)
    shards = list(_shards(tensors, dtype, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else _numbered(len(shards))
    alone = placement("cpu", range(1), virtual=True)
    total = sum(_nbytes(tensors[name], dtype) for shard in shards for name in shard)
    with folder.explained(f"{path}", total):
        path.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write(path / name, {key: tensors[key] for key in shard}, dtype, where, found, alone)
        if len(shards) > 1:
            _write_index(path, dict(zip(names, shards, strict=True)), total)
        blocks.sync(path)
    return [path / name for name in names]


def _of_module(found: CheckpointIndex, module: str | None, where: Path) -> dict[str, StoredTensor]:
    """Name in the module -> tensor; of tied ones the first alone, as the files' readers expect."""
    modules = sorted(found.state["modules"])
    if module is None and len(modules) == 1:
        module = modules[0]
    if module not in modules:
        raise CheckpointError(
            f"gz.save_pretrained(module={module!r}): say which module of {where} to write; it has {', '.join(modules)}"
        )
    prefix = f"modules.{module}."
    hashed = [name for name, stored in found.tensors.items() if name.startswith(prefix) and stored.hashes]
    if hashed:
        raise CheckpointError(
            f"{where} has only hashes of frozen parameters, {hashed[0]} first: frozen='hash' saved it"
        )
    return {
        name.removeprefix(prefix): stored
        for name, stored in found.tensors.items()
        if name.startswith(prefix) and not stored.same_as.startswith(prefix)
    }  # fmt: skip


def _nbytes(stored: StoredTensor, dtype: torch.dtype | None) -> int:
    count = 1
    for size in stored.shape:
        count *= size
    return count * _written_as(stored, dtype).itemsize


def _written_as(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    made = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    if made not in safetensors.NAMES:
        raise CheckpointError(f"safetensors files hold no {made}; give dtype=, to which floating tensors are cast")
    return made


def _shards(tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, most: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order, none larger than ``most`` bytes unless one tensor is."""
    current: list[str] = []
    size = 0
    for name, stored in tensors.items():
        now = _nbytes(stored, dtype)
        if current and size + now > most:
            yield current
            current, size = [], 0
        current.append(name)
        size += now
    yield current


def _numbered(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write(
    path: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, where: Path, found: CheckpointIndex, alone: Placement
) -> None:  # fmt: skip
    head, _ = safetensors.head((name, _written_as(held, dtype), held.shape) for name, held in tensors.items())

    def parts() -> Iterator[memoryview]:
        yield memoryview(head)
        for name, held in tensors.items():
            whole = torch.empty(held.shape, dtype=_written_as(held, dtype))
            read_tensors([TensorRead(name, held, whole)], where, found.files, alone)
            if whole.numel():
                yield from blocks.iterate_bytes(whole)

    hidden = path.with_suffix(".part")
    blocks.write(hidden, parts())
    os.replace(hidden, path)


def _write_index(path: Path, shards: Mapping[str, Sequence[str]], total: int) -> None:
    names = {name: file for file, held in shards.items() for name in held}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True)
    hidden = path / f"{INDEX}.part"
    hidden.write_text(text, encoding="utf-8")
    os.replace(hidden, path / INDEX)
