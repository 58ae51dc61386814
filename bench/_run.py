"""Helpers of the benchmark commands: markdown tables, fresh processes, gloo worlds, kept records."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from _ranks import start_as_torchrun

from graphzero import _compat

Found = TypeVar("Found")
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples"))  # measure.py is shared with the examples


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table; all columns but the first to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(_fit(i, cell, widths[i]) for i, cell in enumerate(row)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _fit(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def on_gloo(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work(rank, *args)`` in ``ranks`` new processes of one gloo world; rank 0's result.

    ``work`` is a function of a module; its result is pickled.  The processes are forked from one that has loaded torch
    and graphzero, and done nothing: that takes seconds in each world, and no measurement counts it.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        start_as_torchrun(_enter, (result, work, args), ranks)
        return pickle.loads(result.read_bytes())


def _enter(rank: int, result: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compat.inductor_folder()  # other systems' too
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names FSDP2 calls
    dist.init_process_group("gloo")
    found = work(rank, *args)
    if rank == 0:
        result.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_fresh_process(script: str, *args: Any, seconds: float | None = None) -> Any:
    """Run ``python bench/SCRIPT ARGS``, which prints one line of JSON last; that line, read.

    A measurement of memory or of seconds is then not that of what ran before.  seconds: after which it is ended, with
    subprocess.TimeoutExpired.
    """
    words = [str(HERE / script), *map(str, args)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def in_child(find: Callable[[], Found], wall: int, cpu: int = -1, nbytes: int = -1) -> tuple[Found | None, str, Any]:
    """Result of ``find`` in a process that is forked from this one, or None and how it ended; what it has used.

    wall, cpu: seconds, by the clock and of the processor, after which it is ended.  nbytes: of data that it may have.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(wall)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, -1))
            resource.setrlimit(resource.RLIMIT_DATA, (nbytes, -1))
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            try:
                result = pickle.dumps((find(), ""))
            except Exception:
                result = pickle.dumps((None, traceback.format_exc()))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(result)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    _, status, used = os.wait4(child, 0)
    if not status:
        found, text = pickle.loads(result)
        return found, text, used
    ends = {signal.SIGALRM: f"more than {wall} s", signal.SIGXCPU: f"more than {cpu} s of processor time"}
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return None, ends.get(number, f"killed by {signal.Signals(number).name}") if number else "no result", used  # type: ignore[call-overload]


def average(numbers: Any) -> Any:
    """Numbers in nested lists, each its mean over the ranks; every rank calls it."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


# ---- resident memory, as Linux counts it


def reset_high_water() -> int:
    """Give back what is free and begin the high-water mark again; the resident bytes."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def give_back() -> None:
    """Give freed memory back to the kernel."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def high_water() -> int:
    """The most bytes of this process that were resident since the mark was reset."""
    (kilobytes,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


# ---- pages and records


END = "<!-- up to here -->\n"


def filled(page: str, script: str, what: str, text: str) -> str:
    """The page with ``text`` between the line that names a script's table ``what`` and the end."""
    begin = f"<!-- bench/{script} writes: {what} -->\n"
    before, rest = page.split(begin)
    return f"{before}{begin}{text}\n{END}{rest.split(END, 1)[1]}"


def kept_lines(file: str) -> dict[str, dict[str, Any]]:
    """The last record of each name in a file of a JSON record a line."""
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def keep_line(file: str, record: Mapping[str, Any]) -> None:
    with open(file, "a", encoding="utf-8") as kept:
        kept.write(json.dumps(record) + "\n")


def options_of(parser: Any) -> Any:
    """Parse the command line; one thread, so that figures are those of one core a rank."""
    torch.set_num_threads(1)
    return parser.parse_args()
