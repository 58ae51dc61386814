"""The index of a checkpoint: which tensors there are, where their pieces stand, and all that is no tensor.

It is one JSON text.  It has the sums of files, so whoever has the index can tell whether the files are those of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphzero.errors import CheckpointError
from graphzero.runtime.files.blocks import BLOCK, Summed, sizes_add_up
from graphzero.runtime.files.boxes import Box, covers
from graphzero.runtime.files.json_values import DTYPES, ODD, parsed

NAME = "index.json"
FORMAT, VERSION = "graphzero checkpoint", 2


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, row by row in a file from byte ``start`` on."""

    file: str
    start: int
    box: Box


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    same_as: the name of the one whose values it shares, as tied parameters do.
    hashes: if its values are not there: sha256 of each of its boxes, row by row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    same_as: str = ""
    hashes: tuple[tuple[str, Box], ...] = ()


@dataclass(frozen=True)
class Index:
    """step: how many steps had been taken.  tensors: by name.  files: by name.  state, extra: see ``json_values``.

    made_by: versions and ranks, for people.  sha256: of what was read.
    """

    step: int
    tensors: Mapping[str, Stored]
    files: Mapping[str, Summed]
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


def _stored_to_json(held: Stored) -> dict[str, Any]:
    if held.same_as:
        return {"same as": held.same_as}
    made = {"dtype": str(held.dtype).removeprefix("torch."), "shape": list(held.shape)}
    if held.hashes:
        return {**made, "sha256": [[text, list(box.start), list(box.sizes)] for text, box in held.hashes]}
    pieces = [[piece.file, piece.start, list(piece.box.start), list(piece.box.sizes)] for piece in held.pieces]
    return {**made, "pieces": pieces}


def read(folder: Path) -> Index:
    """The index of a complete checkpoint.  Raises CheckpointError for a folder that is none."""
    path = folder / NAME
    try:
        found = parsed(path.read_text(encoding="utf-8"))
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
    if hashed != _hash(found):
        raise CheckpointError(f"{path} has been altered: it is not what was saved")
    try:
        made = _from_json(found, hashed)
    except ODD as error:
        raise CheckpointError(f"{path} has been altered: {type(error).__name__}: {error}") from error
    return made


def _from_json(found: Mapping[str, Any], sha256: str) -> Index:
    """Raises one of ``ODD`` for an index that this module would not have written."""
    files = {_file_name(name): _summed(held) for name, held in found["files"].items()}
    tensors = {name: _stored(name, held, found["tensors"], files) for name, held in found["tensors"].items()}
    return Index(_count(found["step"]), tensors, files, found["state"], found["extra"], found["made by"], sha256)


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"'{name}' is no file of it")
    return name


def _summed(held: Mapping[str, Any]) -> Summed:
    made = Summed(_count(held["bytes"]), tuple(held["sums"]))
    if not sizes_add_up(made):
        raise ValueError(f"{len(made.blocks)} sums of {made.nbytes} bytes")
    return made


def _count(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"{x!r:.40} is no count")
    return x


def _counts(x: Any) -> tuple[int, ...]:
    return tuple(map(_count, x))


def _stored(name: str, held: Mapping[str, Any], everything: Mapping[str, Any], files: Mapping[str, Summed]) -> Stored:
    same_as = held.get("same as", "")
    held = everything[same_as] if same_as else held
    dtype, shape = DTYPES[held["dtype"]], _counts(held["shape"])
    if "sha256" in held:
        hashes = tuple((str(text), Box(_counts(begin), _counts(sizes))) for text, begin, sizes in held["sha256"])
        if not covers(shape, [box for _, box in hashes]):
            raise ValueError(f"the hashes of '{name}' are not of all of it, once")
        return Stored(dtype, shape, (), same_as, hashes)
    pieces = tuple(
        Piece(file, _count(start), Box(_counts(begin), _counts(sizes))) for file, start, begin, sizes in held["pieces"]
    )
    for piece in pieces:
        if piece.start + piece.box.numel * dtype.itemsize > files[piece.file].nbytes:
            raise ValueError(f"a piece of '{name}' lies outside of {piece.file}")
    if not covers(shape, [piece.box for piece in pieces]):
        raise ValueError(f"the pieces of '{name}' are not all of it, once")
    return Stored(dtype, shape, pieces, same_as)
