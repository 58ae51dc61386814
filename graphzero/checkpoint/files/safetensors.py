"""The header of a safetensors file: names, dtypes, shapes and byte ranges of what follows it.

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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # names of files of a whole model
_METADATA = "__metadata__"
_LONGEST = 100_000_000  # bytes of a header, as the format's own reader takes


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a file.  start: of its first byte, in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def make_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[SafetensorsEntry]]:
    """The header of a file with these tensors, one after the other, and the entry of each."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    tensors = list(tensors)
    end, starts = 0, []
    for name, dtype, shape in tensors:
        while name in header:
            name += "'"
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        starts.append(start)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entries = [
        SafetensorsEntry(dtype, shape, 8 + len(text) + start)
        for (_, dtype, shape), start in zip(tensors, starts, strict=True)
    ]
    return len(text).to_bytes(8, "little") + text, entries


def read_entries(path: Path) -> dict[str, SafetensorsEntry]:
    """Entries of a file by name.  Raises CheckpointError for another kind of file, or one that is cut short."""
    size = file_size(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise CheckpointError(f"{path} is not a safetensors file, or is cut short: it has {size} bytes")
            header = parse_json(file.read(length))
        entries = {name: _parse_entry(x, 8 + length) for name, x in header.items() if name != _METADATA}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is {type(error).__name__}: {error}"
        ) from error
    _check_contiguous(entries, 8 + length, size, path)
    return entries


def _parse_entry(x: Any, begin: int) -> SafetensorsEntry:
    (start, end), shape = x["data_offsets"], x["shape"]
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"{shape!r:.40} at {start!r:.40} to {end!r:.40} are not counts")
    entry = SafetensorsEntry(DTYPES[x["dtype"]], tuple(shape), begin + start)
    if entry.nbytes != end - start:
        raise ValueError(f"{entry.nbytes} bytes of {x['dtype']} {shape} in {end - start}")
    return entry


def _check_contiguous(entries: Mapping[str, SafetensorsEntry], begin: int, size: int, path: Path) -> None:
    """Raise CheckpointError unless each byte of the file's values belongs to one tensor, as the format has it."""
    at = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != at:
            raise CheckpointError(
                f"{path} is not a safetensors file: '{name}' begins at byte {entry.start}, not at {at}"
            )
        at += entry.nbytes
        if at > size:
            raise CheckpointError(f"{path} is cut short: '{name}' ends at byte {at}, the file at {size}")
    if at != size:
        raise CheckpointError(f"{path} is not a safetensors file: its tensors end at byte {at}, it has {size}")
