"""Reading the header of a safetensors file that any tool may have written; ``checkpoint.files.safetensors`` has the
format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphzero.checkpoint.files.blocks import file_size
from graphzero.checkpoint.files.json_values import MALFORMED
from graphzero.checkpoint.files.safetensors import METADATA, NAMES, SafetensorsEntry
from graphzero.errors import CheckpointError
from graphzero.runtime.json_file import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # names of files of a whole model
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_LONGEST = 100_000_000  # bytes of a header, as the format's own reader takes


def read_entries(path: Path) -> dict[str, SafetensorsEntry]:
    """Entries of a file by name.  Raises CheckpointError for another kind of file, or one that is cut short."""
    size = file_size(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise CheckpointError(f"{path} is not a safetensors file, or is cut short: it has {size} bytes")
            header = parse_json(file.read(length))
        entries = {name: _parse_entry(x, 8 + length) for name, x in header.items() if name != METADATA}
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
    entry = SafetensorsEntry(_DTYPES[x["dtype"]], tuple(shape), begin + start)
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
