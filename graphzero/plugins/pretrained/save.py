"""``gz.save_pretrained``: weights of a checkpoint as other tools read them, whole tensors in safetensors files.

It is written tensor by tensor, by one process, from the files of a checkpoint; no Graph and no other rank is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from graphzero.checkpoint.files import blocks, folder, safetensors
from graphzero.checkpoint.files.folder import absolute_path
from graphzero.checkpoint.files.index import CheckpointIndex, StoredTensor, read_index
from graphzero.checkpoint.files.read_chunks import TensorRead, read_tensors
from graphzero.errors import CheckpointError, ConfigError
from graphzero.plugins.pretrained.safetensors_header import INDEX, SINGLE
from graphzero.sbp.placement import placement


def save_pretrained(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, module: str | None = None,
    dtype: torch.dtype | None = None, config: Any = None, shard_bytes: int = 5_000_000_000,
) -> list[Path]:  # fmt: skip
    """Write the weights of a checkpoint as safetensors files that ``from_pretrained`` and ``load_pretrained`` read.

    One process calls it, at any time.  It reads ``checkpoint``, which ``gz.save`` wrote (or the newest one in a
    folder), one tensor at a time, and needs no Graph.

    module: the attribute whose weights to write, if there are several.  dtype: the dtype of floating tensors.
    config: an object with a method ``save_pretrained(path)``, such as ``model.config`` of transformers.
    shard_bytes: the size of the largest file.  Of tied tensors the first is written, as those readers expect.

    Returns the files.  Raises CheckpointError for a checkpoint that was altered.
    """
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ConfigError(f"gz.save_pretrained(shard_bytes={shard_bytes!r}): give the bytes of the largest file")
    caller = "gz.save_pretrained"
    out = absolute_path(path, caller)
    files = _export(absolute_path(checkpoint, caller), out, module, dtype, shard_bytes)
    if config is not None:
        config.save_pretrained(out)
    return files


def _export(
    checkpoint: Path, path: Path, module: str | None, dtype: torch.dtype | None, shard_bytes: int
) -> list[Path]:
    """Write the files; returns them in order."""
    where = folder.find_checkpoint(checkpoint)
    index = read_index(where)
    for name, checksums in index.files.items():
        blocks.check_file_size(where / name, checksums)
    tensors = _tensors_of_module(index, module, where)
    shards = list(_split_into_shards(tensors, dtype, shard_bytes))
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = [SINGLE] if count == 1 else names
    total = sum(_nbytes(stored, dtype) for stored in tensors.values())
    with folder.explain_write_errors(f"{path}", total):
        folder.make_folder(path)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(path / name, {key: tensors[key] for key in shard}, dtype, where, index)
        if count > 1:
            weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
            hidden = path / f"{INDEX}.part"
            hidden.write_text(text, encoding="utf-8")
            os.replace(hidden, path / INDEX)
        blocks.sync_folder(path)
    return [path / name for name in names]


def _tensors_of_module(index: CheckpointIndex, module: str | None, where: Path) -> dict[str, StoredTensor]:
    """Tensors by their names in the module; of tied ones the first alone, as readers of such files expect."""
    modules = sorted(index.state["modules"])
    if module is None and len(modules) == 1:
        module = modules[0]
    if module not in modules:
        raise CheckpointError(
            f"gz.save_pretrained(module={module!r}): say which module of {where} to write; it has {', '.join(modules)}"
        )
    prefix = f"modules.{module}."
    stored_by_name = {name: stored for name, stored in index.tensors.items() if name.startswith(prefix)}
    hashed = [name for name, stored in stored_by_name.items() if stored.hashes]
    if hashed:
        raise CheckpointError(
            f"{where} has only hashes of frozen parameters, {hashed[0]} first: frozen='hash' saved it"
        )
    return {
        name.removeprefix(prefix): stored
        for name, stored in stored_by_name.items()
        if not stored.same_as.startswith(prefix)
    }


def _nbytes(stored: StoredTensor, dtype: torch.dtype | None) -> int:
    return prod(stored.shape) * _written_dtype(stored, dtype).itemsize


def _written_dtype(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    written = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    if written not in safetensors.NAMES:
        raise CheckpointError(f"safetensors files hold no {written}; give dtype=, to which floating tensors are cast")
    return written


def _split_into_shards(
    tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, most: int
) -> Iterator[list[str]]:  # fmt: skip
    """Names of the tensors of each file, in order, none larger than ``most`` bytes unless one tensor is."""
    shard: list[str] = []
    size = 0
    for name, stored in tensors.items():
        nbytes = _nbytes(stored, dtype)
        if shard and size + nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += nbytes
    yield shard


def _write_shard(
    path: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, where: Path, index: CheckpointIndex
) -> None:  # fmt: skip
    header, _ = safetensors.make_header((name, _written_dtype(x, dtype), x.shape) for name, x in tensors.items())
    one_process = placement("cpu", range(1), virtual=True)

    def parts() -> Iterator[memoryview]:
        yield memoryview(header)
        for name, stored in tensors.items():
            whole = torch.empty(stored.shape, dtype=_written_dtype(stored, dtype))
            read_tensors([TensorRead(name, stored, whole)], where, index.files, one_process)
            yield from blocks.iterate_bytes(whole)
            del whole  # before the next one is allocated

    hidden = path.with_suffix(".part")
    blocks.write_blocks(hidden, parts())
    os.replace(hidden, path)
