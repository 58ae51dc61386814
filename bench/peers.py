"""Step time and memory of graphzero beside other systems, on gloo ranks of one thread.

    python bench/peers.py data                      # ZeRO's stages, DDP, FSDP2, DeepSpeed; a GPT of 7.4 M parameters
    python bench/peers.py data --model B            # of 24 M; conv is a convolutional network
    python bench/peers.py data --what memory        # peak of resident memory
    python bench/peers.py data --micro-batches 4
    python bench/peers.py data --precision bfloat16 --also "graphzero + bfloat16 masters"
    python bench/peers.py stages                    # pipelines; torch.distributed.pipelining, DeepSpeed
    python bench/peers.py stages --model ragged --also "PyTorch, whole batch"    # micro-batches of other label counts
    python bench/peers.py sequences --model long    # split sequences; DeepSpeed's Ulysses
    python bench/peers.py experts                   # split experts of a small Qwen3-MoE; DDP
    python bench/peers.py documents                 # one JSON, read here and by DeepSpeed itself

All systems of a subject train the same model from the same weights on the same data with AdamW, fused for the peers.
DeepSpeed is there if it can be imported (``pip install deepspeed``).  ``GRAPHZERO_TRANSPORT=gloo`` in the environment
lets graphzero send through gloo, as between hosts.

How times and peaks of memory are measured, and what the columns are, is in bench/results/step_time.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import _run
import numpy as np
import split_systems
import systems
import torch
import torch.distributed as dist
import workloads
from systems import System
from workloads import Workload

BATCHES, QUARTILES = 8, (0.25, 0.5, 0.75)
# bytes from which glibc gives freed memory back at once; it reads them when a process starts
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Subject:
    """Systems that train the same workloads, the first of which is the usual one.

    bases: systems that others are compared with; "torch" is for each row the one of its kind, such as "torch, 1f1b".
    """

    workloads: Mapping[str, Workload]
    systems: Sequence[System]
    bases: Sequence[str]

    def system(self, name: str) -> System:
        return {system.name: system for system in self.systems}[name]

    def choose_systems(self, names: Sequence[str] | None, also: Sequence[str] = ()) -> list[System]:
        """The systems of these names, all kinds where a name says none; without names all that are not special.

        also: names of more.
        """

        def is_chosen(system: System) -> bool:
            named = [*(names or ()), *also]
            is_usual = names is None and not system.special
            return is_usual or any(system.name == name or system.name.startswith(f"{name},") for name in named)

        return list(filter(is_chosen, self.systems))


SUBJECTS = {
    "data": Subject(workloads.WORKLOADS, systems.SYSTEMS, ("DDP", "DDP + compile", "FSDP2")),
    "stages": Subject(workloads.PIPELINES, split_systems.PIPELINES, ("torch", "torch + compile", "DeepSpeed")),
    "sequences": Subject(workloads.SEQUENCES, split_systems.SEQUENCES, ("DeepSpeed",)),
    "experts": Subject(workloads.EXPERTS, systems.EXPERTS, ("DDP",)),
    "documents": Subject(workloads.REGRESSION, systems.DOCUMENTS, ("DeepSpeed",)),
}


def find_bases(measured: Mapping[str, Any], bases: Sequence[str]) -> dict[str, list[Any]]:
    """By base, what was measured of it for each system, or None; without bases that no system is compared with."""
    columns: dict[str, list[Any]] = {}
    for base in bases:
        kinds = [name.partition(", ")[2] for name in measured]
        columns[base] = [measured.get(base) or measured.get(f"{base}, {kind}") for kind in kinds]
    return {base: column for base, column in columns.items() if any(column)}


def gather_loss(loss: torch.Tensor | None) -> float:
    """The loss of the whole batch: a Graph returns it, others that of the rank's part or, on some ranks, nothing."""
    losses = _run.gather_over_ranks(None if loss is None else loss.item())
    return statistics.fmean(value for value in losses if value is not None)


# ---- times


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a system's counted steps by round, the processor's alike, and the losses of all its steps."""

    rounds: list[list[float]]
    cpu: list[list[float]]
    losses: list[float]

    def milliseconds(self) -> tuple[float, float, float]:
        """Of the fastest step, the median step, and the median step on the processor."""
        steps, cpu = list(chain(*self.rounds)), list(chain(*self.cpu))
        return min(steps) * 1e3, statistics.median(steps) * 1e3, statistics.median(cpu) * 1e3

    def ratio_to(self, base: StepTimes) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratio to a base: round by round, of the rounds' medians."""
        low, middle, high = np.quantile(divide_medians(self.rounds, base.rounds), QUARTILES, method="weibull")
        return low, middle, high

    def cpu_ratio_to(self, base: StepTimes) -> float:
        """The median of that ratio for the processor's seconds."""
        return statistics.median(divide_medians(self.cpu, base.cpu))

    def format_ratios(self, base: StepTimes) -> list[str]:
        low, middle, high = self.ratio_to(base)
        return [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{self.cpu_ratio_to(base):.2f}"]

    def loss_difference(self, base: StepTimes) -> float:
        """The largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, base.losses, strict=True))


def divide_medians(rounds: list[list[float]], others: list[list[float]]) -> list[float]:
    return [statistics.median(a) / statistics.median(b) for a, b in zip(rounds, others, strict=True)]


def format_times(times: Mapping[str, StepTimes], names: Sequence[str]) -> str:
    bases, rows = find_bases(times, names), []
    first = next(iter(times.values()))
    for (name, one), *compared in zip(times.items(), *bases.values(), strict=True):
        row = [name, *(f"{figure:.1f}" for figure in one.milliseconds())]
        for base in compared:
            row += one.format_ratios(base) if base else ["-", "-"]
        off = one.loss_difference(next(filter(None, compared), first))
        rows.append([*row, f"{one.losses[0]:.5f}", f"{off:.0e}"])
    head = [text for base in bases for text in (f"to {base} (quartiles)", f"CPU to {base}")]
    return _run.format_table(["", "fastest, ms", "median, ms", "CPU, ms", *head, "first loss", "losses apart"], rows)


def time_systems(
    rank: int, subject: str, workload: Workload, names: Sequence[str], rounds: int, count: int
) -> dict[str, StepTimes]:
    """Every rank: alternate rounds of ``count`` steps of each system, the first of which does not count."""
    warnings.simplefilter("ignore")
    batches = [workload.part(step, rank, dist.get_world_size()) for step in range(BATCHES)]
    steps = {name: SUBJECTS[subject].system(name).begin(workload) for name in names}
    times = {name: StepTimes([], [], [gather_loss(step(*batches[0]))]) for name, step in steps.items()}  # compiles
    for turn in range(rounds):
        first = turn * 5 % len(names)  # not always the same one before
        for name in [*names[first:], *names[:first]]:
            seconds, cpu = list[float](), list[float]()
            for i in range(count):
                batch = batches[(turn * count + i) % BATCHES]
                dist.barrier()
                used, started = time.process_time(), time.perf_counter()
                loss = steps[name](*batch)
                dist.barrier()
                seconds.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
                times[name].losses.append(gather_loss(loss))
            times[name].rounds.append(seconds[1:])
            times[name].cpu.append(cpu[1:])
    return {name: replace(one, cpu=_run.average_over_ranks(one.cpu)) for name, one in times.items()}


# ---- memory

MEASURED_STEPS = 6

Peak = tuple[int, list[int]]  # bytes above those before: of rank 0 until the first step's end, of each rank later


def format_peaks(peaks: Mapping[str, Peak], names: Sequence[str]) -> str:
    bases, rows = find_bases(peaks, names), []
    for (name, (first, later)), *compared in zip(peaks.items(), *bases.values(), strict=True):
        ratios = [f"{later[0] / base[1][0]:.2f}" if base else "-" for base in compared]
        own, *others = (f"{nbytes / 1e6:.1f}" for nbytes in later)
        rows.append([name, own, *ratios, f"{first / 1e6:.1f}", *others])
    ranks = [f"rank {rank}, MB" for rank in range(1, len(later))]
    return _run.format_table(["", "peak, MB", *(f"to {base}" for base in bases), "first step, MB", *ranks], rows)


def measure_memory(rank: int, subject: str, workload: Workload, name: str) -> Peak:
    """Every rank: train a toy, then the model."""
    system, ranks = SUBJECTS[subject].system(name), dist.get_world_size()
    toy = workload.small()
    step = system.begin(toy)
    for i in range(3):
        gather_loss(step(*toy.part(i, rank, ranks)))
    del step
    batches = [workload.part(i, rank, ranks) for i in range(MEASURED_STEPS)]
    dist.barrier()
    before = _run.reset_peak_memory()
    step = system.begin(workload)
    gather_loss(step(*batches[0]))
    first = _run.read_peak_memory() - before
    _run.reset_peak_memory()
    for batch in batches[1:]:
        gather_loss(step(*batch))
    return first, _run.gather_over_ranks(_run.read_peak_memory() - before)


# ---- the command


def print_times(subject: str, workload: Workload, names: Sequence[str], options: Any) -> None:
    times = _run.run_on_gloo(options.ranks, time_systems, subject, workload, names, options.rounds, options.steps)
    about = f"{options.rounds} rounds of {options.steps - 1} counted steps"
    print(f"{workload.describe(options.ranks)}; {about}\n\n{format_times(times, SUBJECTS[subject].bases)}")


def print_memory(subject: str, workload: Workload, names: Sequence[str], options: Any) -> None:
    os.environ.update(MALLOC)
    peaks = {}
    for name in names:
        peaks[name] = _run.run_on_gloo(options.ranks, measure_memory, subject, workload, name)
        print(".", end="", file=sys.stderr, flush=True)
    print(f"{workload.describe(options.ranks)}\n\n{format_peaks(peaks, SUBJECTS[subject].bases)}")


WHAT: dict[str, Callable[..., None]] = {"time": print_times, "memory": print_memory}


def main() -> None:
    parser = _run.command_parser(__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--what", choices=WHAT, default="time")
    parser.add_argument("--model", help="one of the subject's workloads, by default the first")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="only these; a name that there is not lists all")
    parser.add_argument("--also", nargs="+", metavar="NAME", default=[], help="systems that are measured where named")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--micro-batches", type=int, help="in which a share, or a pipeline's batch, is computed")
    parser.add_argument("--precision", choices=("bfloat16", "float16"), help="data: mixed precision, in all systems")
    options = _run.parse_options(parser)
    subject = SUBJECTS[options.subject]
    model = options.model or next(iter(subject.workloads))
    chosen = subject.choose_systems(options.systems, options.also)
    if model not in subject.workloads or not chosen:
        names = ", ".join(repr(s.name) for s in subject.systems)
        parser.error(f"{options.subject} has the models {', '.join(subject.workloads)}, and the systems {names}")
    for system in chosen:
        if system.missing:
            print(system.missing, file=sys.stderr)
    workload, precision = subject.workloads[model], getattr(torch, options.precision or "", None)
    workload = replace(workload, micro_batches=options.micro_batches or workload.micro_batches, precision=precision)
    WHAT[options.what](options.subject, workload, [s.name for s in chosen if not s.missing], options)


if __name__ == "__main__":
    main()
