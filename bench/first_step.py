"""The first step: seconds from making the model to the first loss, beside DDP and DDP + torch.compile.

    python bench/first_step.py              # a GPT of 7.4 M parameters on two gloo ranks of one thread each
    python bench/first_step.py --model conv --starts 5

Every start has fresh processes.  *cold*: with an empty cache of compiled kernels (TORCHINDUCTOR_CACHE_DIR); *again*:
the same once more, with the cache that the cold start left.  Seconds are rank 0's, between two points at which all
ranks meet; *CPU* are user seconds of a rank and of the compilers that it ran, mean over ranks, which other work on the
machine disturbs less.  Loading Python modules is not in them, whenever it happens: it has a line of its own.  Systems
take turns; shown are medians over the starts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from _run import average, in_python, markdown, on_gloo, options_of, save
from systems import BASE, add_options, mean, named, names_of
from workloads import WORKLOADS

SHOWN = ["graphzero", "DDP", BASE]
KINDS = ("cold", "again")
LOADS = {  # what is loaded, on top of the line before it: statements
    "torch": "import torch, torch.distributed",
    "graphzero": "import graphzero; graphzero.Graph",
    "torch.compile": "import torch._dynamo, torch._inductor.compile_fx",
}


@dataclass(frozen=True)
class Start:
    """Seconds of one start without loading modules, by the clock and of the processor."""

    wall: float
    cpu: float


Starts = dict[str, list[Start]]  # by kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SHOWN)
    parser.add_argument("--starts", type=int, default=3, help="of every system, cold and again")
    parser.add_argument("--ranks", type=int, default=2)
    options = options_of(parser)
    names = names_of(options)
    found: dict[str, Starts] = {name: {kind: [] for kind in KINDS} for name in names}
    for _ in range(options.starts):
        for name, starts in found.items():
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                for kind in KINDS:
                    starts[kind].append(on_gloo(options.ranks, start, name, options.model))
            print(".", end="", file=sys.stderr, flush=True)
    about = f"{WORKLOADS[options.model].describe(options.ranks)}; medians of {options.starts} starts"
    text = f"{about}:\n\n{table(found)}\n\n{loading(options.starts)}"
    print(f"\n{text}")
    if options.save:
        save(options.save, f"{options.model}, {options.ranks} ranks", "first step", text)


def table(found: Mapping[str, Starts]) -> str:
    def middle(name: str, kind: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in found[name][kind])

    rows = []
    for name in found:
        row = [f"{middle(name, kind, what):.2f}" for kind in KINDS for what in ("wall", "cpu")]
        if BASE in found:
            row += [f"{middle(name, 'cold', what) / middle(BASE, 'cold', what):.2f}" for what in ("wall", "cpu")]
        rows.append([name, *row])
    head = ["", "cold, s", "CPU, s", "again, s", "CPU, s"]
    return markdown([*head, *([f"cold to {BASE}", "CPU to its"] if BASE in found else [])], rows)


def loading(repeat: int) -> str:
    clock = "print(time.perf_counter() - began); began = time.perf_counter()"
    script = "\n".join(["import time; began = time.perf_counter()", *(f"{line}; {clock}" for line in LOADS.values())])
    runs = [map(float, in_python(script).split()) for _ in range(repeat)]
    seconds = zip(LOADS, map(statistics.median, zip(*runs, strict=True)), strict=True)
    return f"Loading modules takes, in s: {', then '.join(f'{name} {spent:.2f}' for name, spent in seconds)}."


# ---- clocks that stand still while Python modules are loaded


def user_seconds() -> float:
    """User seconds of this process and of the processes that it ran to their end, such as compilers."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@dataclass
class Clocks:
    """Seconds, without those in which modules were loaded: by the wall, and of the processor in user code."""

    loading_wall: float = 0.0
    loading_user: float = 0.0

    def wall(self) -> float:
        return time.perf_counter() - self.loading_wall

    def user(self) -> float:
        return user_seconds() - self.loading_user


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Python finds and runs a module that is not there yet in one function, whoever imports it."""
    found, depth = Clocks(), 0
    machinery: Any = importlib._bootstrap  # type: ignore[attr-defined]
    original = machinery._find_and_load

    def load(*args: Any) -> Any:
        nonlocal depth
        depth += 1
        wall, user = time.perf_counter(), user_seconds()
        try:
            return original(*args)
        finally:
            depth -= 1
            if not depth:
                found.loading_wall += time.perf_counter() - wall
                found.loading_user += user_seconds() - user

    machinery._find_and_load = load
    try:
        yield found
    finally:
        machinery._find_and_load = original


# ---- on every rank


def start(rank: int, name: str, model: str) -> Start:
    """The first step of a system, from the model to the loss."""
    system, workload = named(name), WORKLOADS[model]
    batch = workload.part(0, rank, dist.get_world_size())
    with clocks() as clock:
        dist.barrier()
        wall, user = clock.wall(), clock.user()
        mean(system.begin(workload)(*batch))
        dist.barrier()
        return Start(clock.wall() - wall, average([clock.user() - user])[0])


if __name__ == "__main__":
    main()
