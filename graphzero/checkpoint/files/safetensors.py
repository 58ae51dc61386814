"""The header of a safetensors file: names, dtypes, shapes and byte ranges of what follows it.

Eight bytes with the length of a JSON text (little-endian), the text, padded with spaces, and the values of all tensors
without gaps, row by row.  Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
METADATA = "__metadata__"


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
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
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
