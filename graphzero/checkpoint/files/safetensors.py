"""The head of a safetensors file: names, dtypes, shapes and byte ranges of what follows it.

Eight bytes with the length of a JSON text (little-endian), the text, padded with spaces, and the values of all tensors
without gaps, row by row.  Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from graphzero.checkpoint.files.blocks import file_size
from graphzero.checkpoint.files.json_values import MALFORMED
from graphzero.errors import CheckpointError
from graphzero.runtime.json_file import parse_json

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_METADATA = "__metadata__"
_LONGEST = 100_000_000  # bytes of a head, as the format's own reader takes


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.  start: of its first byte, in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def head(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """The head of a file with these tensors, one after the other, and where each stands."""
    listed: dict[str, Any] = {_METADATA: {"format": "pt"}}
    given = list(tensors)
    at, offsets = 0, []
    for name, dtype, shape in given:
        while name in listed:
            name += "'"
        end = at + prod(shape) * dtype.itemsize
        listed[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        offsets.append(at)
        at = end
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = [Entry(dtype, shape, begin + at) for (_, dtype, shape), at in zip(given, offsets, strict=True)]
    return len(text).to_bytes(8, "little") + text, places


def entries(path: Path) -> dict[str, Entry]:
    """What a file holds.  Raises CheckpointError for one that is none, or is cut short."""
    size = file_size(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise CheckpointError(f"{path} is no safetensors file, or is cut short: it has {size} bytes")
            listed = parse_json(file.read(length))
        found = {name: _entry(held, 8 + length) for name, held in listed.items() if name != _METADATA}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise CheckpointError(f"{path} is no safetensors file: its head is {type(error).__name__}: {error}") from error
    _check_apart(found, 8 + length, size, path)
    return found


def _entry(held: Any, begin: int) -> Entry:
    (start, end), shape = held["data_offsets"], held["shape"]
    if not all(type(x) is int and x >= 0 for x in (start, end, *shape)):
        raise ValueError(f"{shape!r:.40} at {start!r:.40} to {end!r:.40} are no counts")
    entry = Entry(DTYPES[held["dtype"]], tuple(shape), begin + start)
    if entry.nbytes != end - start:
        raise ValueError(f"{entry.nbytes} bytes of {held['dtype']} {shape} in {end - start}")
    return entry


def _check_apart(found: Mapping[str, Entry], begin: int, size: int, path: Path) -> None:
    """Raise CheckpointError unless each byte of the file's values belongs to one tensor, as the format has it."""
    at = begin
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != at:
            raise CheckpointError(f"{path} is no safetensors file: '{name}' begins at byte {entry.start}, not at {at}")
        at += entry.nbytes
        if at > size:
            raise CheckpointError(f"{path} is cut short: '{name}' ends at byte {at}, the file at {size}")
    if at != size:
        raise CheckpointError(f"{path} is no safetensors file: its tensors end at byte {at}, it has {size}")
