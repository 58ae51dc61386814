"""The index of a checkpoint: which tensors there are, where their pieces stand, and all that is no tensor.

It is one JSON text.  It has the sums of files, so whoever has the index can tell whether the files are those of it.
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
    """A box of a tensor, row by row in a file from byte ``start`` on."""

    file: str
    start: int
    chunk: Chunk


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    same_as: the name of the one whose values it shares, as tied parameters do.
    hashes: if its values are not there: sha256 of each of its boxes, row by row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredChunk, ...] = ()
    same_as: str = ""
    hashes: tuple[tuple[str, Chunk], ...] = ()


@dataclass(frozen=True)
class CheckpointIndex:
    """step: how many steps had been taken.  tensors: by name.  files: by name.  state, extra: see ``json_values``.

    made_by: versions and ranks, for people.  sha256: of what was read.
    """

    step: int
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileChecksums]
    state: Any
    extra: Any
    made_by: Mapping[str, Any]
    sha256: str = ""

    def text(self) -> str:
        tensors = {name: _stored_to_json(held) for name, held in self.tensors.items()}
        files = {name: {"bytes": held.nbytes, "sums": list(held.blocks)} for name, held in self.files.items()}
        body = {
            "format": FORMAT, "version": VERSION, "made by": self.made_by, "step": self.step, "block": BLOCK,
            "files": files, "state": self.state, "extra": self.extra, "tensors": tensors,
        }  # fmt: skip
        return json.dumps({**body, "sha256": _hash(body)}, indent=1)


def _hash(body: Mapping[str, Any]) -> str:
    """Of everything in an index, however its text is laid out."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _stored_to_json(held: StoredTensor) -> dict[str, Any]:
    if held.same_as:
        return {"same as": held.same_as}
    made = {"dtype": str(held.dtype).removeprefix("torch."), "shape": list(held.shape)}
    if held.hashes:
        return {**made, "sha256": [[text, list(chunk.start), list(chunk.sizes)] for text, chunk in held.hashes]}
    pieces = [[piece.file, piece.start, list(piece.chunk.start), list(piece.chunk.sizes)] for piece in held.pieces]
    return {**made, "pieces": pieces}


def read(folder: Path) -> CheckpointIndex:
    """The index of a complete checkpoint.  Raises CheckpointError for a folder that is none."""
    path = folder / NAME
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON text: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the index of a graphzero checkpoint")
    if found.get("version") != VERSION or found.get("block") != BLOCK:
        raise CheckpointError(
            f"{path} is of version {found.get('version')}, in blocks of {found.get('block')} bytes; this graphzero "
            f"reads version {VERSION}, in blocks of {BLOCK}"
        )
    hashed = found.pop("sha256", None)
    try:
        if hashed != _hash(found):
            raise ValueError("it is not what was saved")
        return _from_json(found, hashed)
    except MALFORMED as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} has been altered: {kind}{error}") from error


def _from_json(found: Mapping[str, Any], sha256: str) -> CheckpointIndex:
    """Raises one of ``MALFORMED``, mostly a ValueError that says where, for an index that this module has not written."""
    listed = _dict(found["files"], "files")
    files = {_file_name(name): _summed(held, f"files.{name}") for name, held in listed.items()}
    everything = _dict(found["tensors"], "tensors")
    tensors = {name: _stored(f"tensors.{name}", held, everything, files) for name, held in everything.items()}
    _check_named_once([found["state"], found["extra"]], tensors)
    made_by, step = _dict(found["made by"], "made by"), _count(found["step"], "step")
    return CheckpointIndex(step, tensors, files, found["state"], found["extra"], made_by, sha256)


def _check_named_once(state: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Every tensor stands in one place of state and extra; only those of modules may be there as hashes."""
    names = collections.Counter(tensor_names(state))
    for name in names.keys() | tensors.keys():
        if name not in tensors or names[name] != 1:
            times = f"{names[name]} times, tensors {name in tensors:d}"
            raise ValueError(f"state and extra name the tensor {name!r:.80} {times}")
        if tensors[name].hashes and not name.startswith("modules."):
            raise ValueError(f"tensors.{name} has hashes for values, and is no parameter")


def _dict(x: Any, where: str) -> dict[str, Any]:
    if not isinstance(x, dict):
        raise ValueError(f"{where} is a {type(x).__name__}, not an object")
    return x


def _list(x: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(x, list) or length not in (None, len(x)):
        raise ValueError(f"{where} is {x!r:.40}, not a list" + ("" if length is None else f" of {length}"))
    return x


def _count(x: Any, where: str) -> int:
    if type(x) is not int or not 0 <= x < _MOST:
        raise ValueError(f"{where} is {x!r:.40}, not a number from 0 to 2^63")
    return x


def _text(x: Any, where: str, digits: int) -> str:
    if not isinstance(x, str) or len(x) != digits or set(x) - _DIGITS:
        raise ValueError(f"{where} is {x!r:.80}, not {digits} hexadecimal digits")
    return x


def _counts(x: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    return tuple(_count(one, where) for one in _list(x, where, length))


def _file_name(name: str) -> str:
    if name in ("", ".", "..", NAME) or set(name) & set("/\\\0"):
        raise ValueError(f"files.{name!r:.80} is no file of it")
    return name


def _summed(held: Any, where: str) -> FileChecksums:
    nbytes = _count(_dict(held, where)["bytes"], f"{where}.bytes")
    blocks = tuple(_text(text, f"{where}.sums", 32) for text in _list(held["sums"], f"{where}.sums"))
    if not has_checksum_per_block(FileChecksums(nbytes, blocks)):
        raise ValueError(f"{where}.sums are {len(blocks)}, of {nbytes} bytes")
    return FileChecksums(nbytes, blocks)


def _stored(where: str, held: Any, everything: Mapping[str, Any], files: Mapping[str, FileChecksums]) -> StoredTensor:
    same_as = _dict(held, where).get("same as", "")
    if same_as:
        held = _dict(everything.get(same_as), f"what {where} is the same as")
    name, shape = held["dtype"], _counts(held["shape"], f"{where}.shape")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype not in STORED:
        raise ValueError(f"{where}.dtype is {name!r:.40}, of which no tensor is saved")
    if len(shape) > _MOST_DIMS or prod(size or 1 for size in shape) * dtype.itemsize >= _MOST:
        raise ValueError(f"{where}.shape is {list(shape)!r:.80}, which no tensor can have")
    if "sha256" in held:
        parts = [_list(one, f"{where}.sha256", 3) for one in _list(held["sha256"], f"{where}.sha256")]
        hashes = tuple((_text(text, f"{where}.sha256", 64), _box(chunk, shape, where)) for text, *chunk in parts)
        _check_covered(shape, [chunk for _, chunk in hashes], f"{where}.sha256")
        return StoredTensor(dtype, shape, (), same_as, hashes)
    parts = [_list(one, f"{where}.pieces", 4) for one in _list(held["pieces"], f"{where}.pieces")]
    pieces = tuple(
        StoredChunk(file, _count(at, f"{where}.pieces"), _box(chunk, shape, f"{where}.pieces"))
        for file, at, *chunk in parts
    )
    for piece in pieces:
        if piece.file not in files or piece.start + piece.chunk.numel * dtype.itemsize > files[piece.file].nbytes:
            raise ValueError(f"{where}.pieces lie outside of {piece.file!r:.80}")
    _check_covered(shape, [piece.chunk for piece in pieces], f"{where}.pieces")
    return StoredTensor(dtype, shape, pieces, same_as)


def _box(parts: Sequence[Any], shape: tuple[int, ...], where: str) -> Chunk:
    start, sizes = (_counts(part, where, len(shape)) for part in parts)
    return Chunk(start, sizes)


def _check_covered(shape: tuple[int, ...], chunks: list[Chunk], where: str) -> None:
    if not cover_exactly_once(shape, chunks):
        raise ValueError(f"{where} are not all of the tensor, once")
