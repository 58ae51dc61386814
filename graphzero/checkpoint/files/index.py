"""The index of a checkpoint: its tensors and where their pieces are, and all values that are not tensors.

It is one JSON text, with the checksums of the files, by which a reader can tell whether they belong to it.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from graphzero.checkpoint.files.blocks import BLOCK, FileChecksums, has_checksum_per_block
from graphzero.checkpoint.files.chunks import Chunk, cover_exactly_once
from graphzero.checkpoint.files.json_values import DTYPES, MALFORMED, STORED, tensor_names
from graphzero.errors import CheckpointError
from graphzero.runtime.json_file import parse_json

NAME = "index.json"
FORMAT, VERSION = "graphzero checkpoint", 2
_MOST = 1 << 63  # bytes and elements
_MOST_DIMS = 64  # that torch's operations take
_DIGITS = set("0123456789abcdef")


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor, row by row in a file from byte ``start`` on."""

    file: str
    start: int
    chunk: Chunk


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    same_as: the name of the one whose values it shares, as tied parameters do.
    hashes: if its values are not there: sha256 of each of its chunks, row by row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredChunk, ...] = ()
    same_as: str = ""
    hashes: tuple[tuple[str, Chunk], ...] = ()

    def to_json(self) -> dict[str, Any]:
        if self.same_as:
            return {"same as": self.same_as}
        entry = {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}
        if self.hashes:
            return {**entry, "sha256": [[text, list(chunk.offsets), list(chunk.sizes)] for text, chunk in self.hashes]}
        pieces = [[p.file, p.start, list(p.chunk.offsets), list(p.chunk.sizes)] for p in self.pieces]
        return {**entry, "pieces": pieces}


@dataclass(frozen=True)
class CheckpointIndex:
    """Contents of a checkpoint.

    step: how many steps had been taken.  tensors: by name.  files: by name.  state, extra: see ``json_values``.
    made_by: versions and ranks, for people.  sha256: of the text that was read.
    """

    step: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileChecksums]
    state: Any
    extra: Any
    made_by: Mapping[str, Any]
    sha256: str = ""

    def to_json(self) -> str:
        tensors = {name: stored.to_json() for name, stored in self.tensors.items()}
        files = {name: {"bytes": file.nbytes, "sums": list(file.blocks)} for name, file in self.files.items()}
        body = {
            "format": FORMAT, "version": VERSION, "made by": self.made_by, "step": self.step, "block": BLOCK,
            "files": files, "state": self.state, "extra": self.extra, "tensors": tensors,
        }  # fmt: skip
        return json.dumps({**body, "sha256": _hash(body)}, indent=1)


def _hash(body: Mapping[str, Any]) -> str:
    """sha256 of everything in an index, however its text is laid out."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a complete checkpoint.  Raises CheckpointError for a folder that is not one."""
    path = folder / NAME
    try:
        body = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a JSON text: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the index of a graphzero checkpoint")
    if body.get("version") != VERSION or body.get("block") != BLOCK:
        raise CheckpointError(
            f"{path} is of version {body.get('version')}, in blocks of {body.get('block')} bytes; this graphzero "
            f"reads version {VERSION}, in blocks of {BLOCK}"
        )
    sha256 = body.pop("sha256", None)
    try:
        if sha256 != _hash(body):
            raise ValueError("it is not what was saved")
        return _parse_index(body, sha256)
    except MALFORMED as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} has been altered: {kind}{error}") from error


def _parse_index(body: Mapping[str, Any], sha256: str) -> CheckpointIndex:
    """Raises one of ``MALFORMED``, mostly a ValueError that says where, for an index that was not written here."""
    file_entries = _check_dict(body["files"], "files")
    files = {_check_file_name(name): _parse_file(entry, f"files.{name}") for name, entry in file_entries.items()}
    entries = _check_dict(body["tensors"], "tensors")
    tensors = {name: _parse_tensor(f"tensors.{name}", entry, entries, files) for name, entry in entries.items()}
    _check_named_once([body["state"], body["extra"]], tensors)
    made_by, step = _check_dict(body["made by"], "made by"), _check_count(body["step"], "step")
    return CheckpointIndex(step, tensors, files, body["state"], body["extra"], made_by, sha256)


def _check_named_once(state: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that every tensor has one place in state and extra, and that only tensors of modules are given as
    hashes."""
    names = collections.Counter(tensor_names(state))
    for name in names.keys() | tensors.keys():
        if name not in tensors or names[name] != 1:
            times = f"{names[name]} times, tensors {name in tensors:d}"
            raise ValueError(f"state and extra name the tensor {name!r:.80} {times}")
        if tensors[name].hashes and not name.startswith("modules."):
            raise ValueError(f"tensors.{name} has hashes for values, and is not a parameter")


def _check_dict(x: Any, where: str) -> dict[str, Any]:
    if not isinstance(x, dict):
        raise ValueError(f"{where} is a {type(x).__name__}, not an object")
    return x


def _check_list(x: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(x, list) or length not in (None, len(x)):
        raise ValueError(f"{where} is {x!r:.40}, not a list" + ("" if length is None else f" of {length}"))
    return x


def _check_count(x: Any, where: str) -> int:
    if type(x) is not int or not 0 <= x < _MOST:
        raise ValueError(f"{where} is {x!r:.40}, not a number from 0 to 2^63")
    return x


def _check_digits(x: Any, where: str, count: int) -> str:
    if not isinstance(x, str) or len(x) != count or set(x) - _DIGITS:
        raise ValueError(f"{where} is {x!r:.80}, not {count} hexadecimal digits")
    return x


def _check_counts(x: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    return tuple(_check_count(count, where) for count in _check_list(x, where, length))


def _check_file_name(name: str) -> str:
    if name in ("", ".", "..", NAME) or set(name) & set("/\\\0"):
        raise ValueError(f"files.{name!r:.80} is not a file of it")
    return name


def _parse_file(entry: Any, where: str) -> FileChecksums:
    nbytes = _check_count(_check_dict(entry, where)["bytes"], f"{where}.bytes")
    texts = _check_list(entry["sums"], f"{where}.sums")
    checksums = FileChecksums(nbytes, tuple(_check_digits(text, f"{where}.sums", 32) for text in texts))
    if not has_checksum_per_block(checksums):
        raise ValueError(f"{where}.sums are {len(texts)}, of {nbytes} bytes")
    return checksums


def _parse_tensor(
    where: str, entry: Any, entries: Mapping[str, Any], files: Mapping[str, FileChecksums]
) -> StoredTensor:  # fmt: skip
    same_as = _check_dict(entry, where).get("same as", "")
    if same_as:
        entry = _check_dict(entries.get(same_as), f"the tensor that {where} is the same as")
    name, shape = entry["dtype"], _check_counts(entry["shape"], f"{where}.shape")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype not in STORED:
        raise ValueError(f"{where}.dtype is {name!r:.40}, of which no tensor is saved")
    if len(shape) > _MOST_DIMS or prod(size or 1 for size in shape) * dtype.itemsize >= _MOST:
        raise ValueError(f"{where}.shape is {list(shape)!r:.80}, which no tensor can have")
    if "sha256" in entry:
        where = f"{where}.sha256"
        parts = [_check_list(part, where, 3) for part in _check_list(entry["sha256"], where)]
        hashes = tuple((_check_digits(text, where, 64), _parse_chunk(chunk, shape, where)) for text, *chunk in parts)
        _check_covered(shape, [chunk for _, chunk in hashes], where)
        return StoredTensor(dtype, shape, (), same_as, hashes)
    where = f"{where}.pieces"
    parts = [_check_list(part, where, 4) for part in _check_list(entry["pieces"], where)]
    pieces = tuple(
        StoredChunk(file, _check_count(start, where), _parse_chunk(chunk, shape, where))
        for file, start, *chunk in parts
    )
    for piece in pieces:
        if piece.file not in files or piece.start + piece.chunk.numel * dtype.itemsize > files[piece.file].nbytes:
            raise ValueError(f"{where} lie outside of {piece.file!r:.80}")
    _check_covered(shape, [piece.chunk for piece in pieces], where)
    return StoredTensor(dtype, shape, pieces, same_as)


def _parse_chunk(parts: Sequence[Any], shape: tuple[int, ...], where: str) -> Chunk:
    offsets, sizes = (_check_counts(part, where, len(shape)) for part in parts)
    return Chunk(offsets, sizes)


def _check_covered(shape: tuple[int, ...], chunks: list[Chunk], where: str) -> None:
    if not cover_exactly_once(shape, chunks):
        raise ValueError(f"{where} are not all of the tensor, once")
