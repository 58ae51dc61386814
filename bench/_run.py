"""Helpers of the benchmark commands: markdown tables, fresh processes, gloo worlds, peak memory, options."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import start, start_as_torchrun

from graphzero import _compat


def format_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table; all columns but the first to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in cells]
    lines = ["| " + " | ".join(row) + " |" for row in aligned]
    rule = "|" + "|".join("-" * (width + 1) + "-:"[i > 0] for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def run_on_gloo(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Result of ``function(rank, *args)`` on rank 0, in ``ranks`` new processes of one gloo world.

    ``function`` is one of a module; its result is pickled.  The processes are forked from one that has loaded torch
    and graphzero, and done nothing: that takes seconds in each world, and no measurement counts it.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        start_as_torchrun(_run_in_world, (result, function, args), ranks)
        return pickle.loads(result.read_bytes())


def _run_in_world(rank: int, result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compat.inductor_folder()  # other systems' too
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names FSDP2 calls
    dist.init_process_group("gloo")
    _save_result(rank, result, partial(function, rank), args)
    dist.barrier()
    dist.destroy_process_group()


def run_in_fresh_process(function: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
    """Result of ``function(*args)`` in a process that has loaded nothing before, so that its memory is its own.

    seconds: after which it is ended, with TimeoutError.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        start(_save_result, (result, function, args), 1, "spawn", seconds)
        return pickle.loads(result.read_bytes())


def _save_result(rank: int, result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    value = function(*args)
    if rank == 0:
        result.write_bytes(pickle.dumps(value))


def average_over_ranks(numbers: Any) -> Any:
    """Numbers in nested lists, each its mean over the ranks; every rank calls it."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def gather_over_ranks(value: Any) -> list[Any]:
    """The object of each rank; every rank calls it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- resident memory, as Linux counts it


def reset_peak_memory() -> int:
    """Give back what is free and begin the high-water mark again; the resident bytes."""
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return read_peak_memory()


def release_memory() -> None:
    """Give freed memory back to the kernel."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def read_peak_memory() -> int:
    """The most bytes of this process that were resident since the mark was reset (VmHWM)."""
    (kilobytes,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


# ---- options


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser of a command whose help begins with ``description``, as it is laid out."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_options(parser: argparse.ArgumentParser) -> Any:
    """Options of the command line; torch then has one thread, so that figures are those of one core a rank."""
    torch.set_num_threads(1)
    return parser.parse_args()
