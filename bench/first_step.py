"""The first step: seconds from making the model to the first loss, beside DDP and DDP + torch.compile.

    python bench/first_step.py              # a GPT of 7.4 M parameters on two gloo ranks of one thread each
    python bench/first_step.py --model conv --starts 5

Every start has fresh processes.  *cold*: with an empty cache of compiled kernels (TORCHINDUCTOR_CACHE_DIR); *again*:
the same once more, with the cache that the cold start left.  Seconds are rank 0's, between two points at which all
ranks meet; *CPU* are user seconds of a rank and of the compilers that it ran, mean over ranks, which other work on the
machine disturbs less.  Loading Python modules is not in them, whenever it happens: it has a line of its own.  Systems
take turns; shown are medians over the starts.

A second table says where a Graph's first step goes: capture, passes, verification, plan, the first run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from _run import average, in_python, markdown, on_gloo, options_of, save
from compile_time import CompileClock, clocks
from parity import TrainGraph
from systems import BASE, add_options, mean, named, names_of
from workloads import WORKLOADS

SHOWN = ["graphzero", "DDP", BASE]
KINDS = ("cold", "again")
LATER = "a later step"
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
    parts = {name: on_gloo(options.ranks, dissect, name, options.model) for name in names if "graphzero" in name}
    about = f"{WORKLOADS[options.model].describe(options.ranks)}; medians of {options.starts} starts"
    text = f"{about}:\n\n{table(found)}\n\n{dissected(parts)}\n\n{loading(options.starts)}"
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


def dissected(found: Mapping[str, Mapping[str, float]]) -> str:
    """CPU seconds by part; a column for each system."""
    parts = list(max(found.values(), key=len))  # stage 0 has no pass "zero"
    rows = [[part, *(f"{one.get(part, 0.0):.2f}" for one in found.values())] for part in parts]
    rows.insert(-1, ["all", *(f"{sum(one.values()) - one[LATER]:.2f}" for one in found.values())])
    return markdown(["CPU s", *found], rows)


def loading(repeat: int) -> str:
    clock = "print(time.perf_counter() - began); began = time.perf_counter()"
    script = "\n".join(["import time; began = time.perf_counter()", *(f"{line}; {clock}" for line in LOADS.values())])
    runs = [map(float, in_python(script).split()) for _ in range(repeat)]
    seconds = zip(LOADS, map(statistics.median, zip(*runs, strict=True)), strict=True)
    return f"Loading modules takes, in s: {', then '.join(f'{name} {spent:.2f}' for name, spent in seconds)}."


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


def dissect(rank: int, name: str, model: str) -> dict[str, float]:
    """The same of a Graph, compiled apart from its first call: user seconds of rank 0 by part."""
    system, workload = named(name), WORKLOADS[model]
    batch = workload.part(0, rank, dist.get_world_size())
    with clocks() as clock:
        compiling, marks = CompileClock(clock.user), [clock.user()]
        step = system.begin(workload)
        assert isinstance(step, TrainGraph)
        marks.append(clock.user())
        step.compile(*batch)
        marks.append(clock.user())
        for _ in range(2):
            mean(step(*batch))
            marks.append(clock.user())
    begin, compiled, first, second = (after - before for before, after in zip(marks, marks[1:], strict=False))
    parts = {"model, optimizer, Graph": begin, **compiling.parts(step, compiled)}
    return {**parts, "binding, first run": first, LATER: second}


if __name__ == "__main__":
    main()
