"""Step time of graphzero's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed on gloo ranks of one thread.

    python bench/step_time.py               # a GPT of 7.4 M parameters
    python bench/step_time.py --model B     # one of 24 M; conv is a convolutional network
    python bench/step_time.py --micro-batches 4
    python bench/step_time.py --precision bfloat16 --also "graphzero + bfloat16 masters"

All train the same model on the same data in the same processes, with AdamW, fused for the peers.  Rounds alternate, in
another order each, so that whatever else the machine does meets all of them; a round's first step does not count.
Seconds are of rank 0's steps.  A ratio is taken round by round, of the rounds' medians; shown are its median over the
rounds and its quartiles.  *CPU* are the processor's seconds in a step, of all threads of a rank, mean over ranks: a
rank that sleeps until another has come uses none, and other work on the machine changes them less.  The last column is
how far losses are from DDP's over all steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from _run import average, markdown, on_gloo, options_of
from systems import BASE, add_options, mean, named, names_of
from workloads import PLAIN, WORKLOADS, Variant

from graphzero.runtime.transport.shared_memory_connect import SWITCH

BASES = (BASE, "DDP", "FSDP2")
BATCHES = 8
# the environment of processes that keep what they free; glibc reads it when a process starts
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
SENT, KEPT = ", which send through gloo", ", freed memory kept in all"


@dataclass(frozen=True)
class Timed:
    """Seconds of a system's counted steps by round, the processor's alike, and the losses of all its steps."""

    rounds: list[list[float]]
    cpu: list[list[float]]
    losses: list[float]

    @property
    def median(self) -> float:
        return statistics.median(second for one in self.rounds for second in one)

    @property
    def fastest(self) -> float:
        return min(map(min, self.rounds))

    @property
    def median_cpu(self) -> float:
        return statistics.median(second for one in self.cpu for second in one)

    def to(self, base: Timed) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratio to a base: round by round, of the rounds' medians."""
        ratios = _ratios(self.rounds, base.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return low, middle, high

    def cpu_to(self, base: Timed) -> float:
        """The median of that ratio for the processor's seconds."""
        return statistics.median(_ratios(self.cpu, base.cpu))


def _ratios(mine: list[list[float]], its: list[list[float]]) -> list[float]:
    return [statistics.median(a) / statistics.median(b) for a, b in zip(mine, its, strict=True)]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--ranks", type=int, default=2)
    Variant.add_options(parser)
    parser.add_argument("--gloo", action="store_true", help="graphzero sends through gloo, as between hosts")
    parser.add_argument("--keep-memory", action="store_true", help="processes keep what is freed, for all systems")
    return options_of(parser)


def main() -> None:
    options = read_options()
    if options.keep_memory:
        os.environ.update(KEPT_MEMORY)
    if options.gloo:
        os.environ[SWITCH] = "gloo"
    names, variant = names_of(options), Variant.from_options(options)
    found = on_gloo(options.ranks, work, options.model, names, options.rounds, options.steps, variant)
    about = variant.apply(WORKLOADS[options.model]).describe(options.ranks)
    about += SENT * options.gloo + KEPT * options.keep_memory
    about += f"; {options.rounds} rounds of {options.steps - 1} counted steps"
    print(f"{about}\n\n{table(found)}")


def table(found: Mapping[str, Timed]) -> str:
    bases = [base for base in BASES if base in found]
    rows = []
    for name, one in found.items():
        low, _, high = one.to(found[bases[0]]) if bases else (1.0, 1.0, 1.0)
        ratios = [f"{one.to(found[base])[1]:.2f}" for base in bases]
        row = [name, ms(one.fastest), ms(one.median), *ratios[:1], f"{low:.2f} to {high:.2f}", *ratios[1:]]
        cpu = [ms(one.median_cpu), *(f"{one.cpu_to(found[base]):.2f}" for base in bases[:1])]
        rows.append([*row, *cpu, f"{one.losses[-1]:.5f}", apart(one, found)])
    to = [f"to {base}" for base in bases]
    head = ["", "fastest, ms", "median, ms", *to[:1], "quartiles", *to[1:], "CPU, ms", *to[:1]]
    return markdown([*head, "last loss", "losses apart"], rows)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def apart(one: Timed, found: Mapping[str, Timed]) -> str:
    """The largest relative difference of a loss from that of DDP, or of the first system."""
    base = found.get("DDP") or next(iter(found.values()))
    return f"{max(abs(a - b) / abs(b) for a, b in zip(one.losses, base.losses, strict=True)):.0e}"


def work(
    rank: int, model: str, names: list[str], rounds: int, steps: int, variant: Variant = PLAIN
) -> dict[str, Timed]:  # fmt: skip
    """Every rank: alternate rounds of all systems."""
    ranks = dist.get_world_size()
    workload = variant.apply(WORKLOADS[model])
    batches = [workload.part(step, rank, ranks) for step in range(BATCHES)]
    running = {name: named(name).begin(workload) for name in names}
    return time_in_turn(running, batches, rounds, steps, mean)


def time_in_turn(
    steps: Mapping[str, Callable[..., Any]],
    batches: Sequence[Any],
    rounds: int,
    count: int,
    loss_of: Callable[[Any], float],
    between_barriers: bool = False,
) -> dict[str, Timed]:
    """Every rank: alternate rounds of ``count`` steps of each system, the first of which does not count.

    batches: arguments of a step, in turn.  loss_of: the loss from what a step returns, the same on all ranks.
    between_barriers: a step is timed until all ranks have ended it, so that it is the slowest rank's.
    """
    losses = {name: [loss_of(step(*batches[0]))] for name, step in steps.items()}  # compiles
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    cpu: dict[str, list[list[float]]] = defaultdict(list)
    names = list(steps)
    for turn in range(rounds):
        first = turn * 5 % len(names)  # not always the same one before
        for name in [*names[first:], *names[:first]]:
            dist.barrier()
            seconds[name].append([])
            cpu[name].append([])
            for i in range(count):
                if between_barriers:
                    dist.barrier()
                used, started = time.process_time(), time.perf_counter()
                result = steps[name](*batches[(turn * count + i) % len(batches)])
                if between_barriers:
                    dist.barrier()
                if i:
                    seconds[name][-1].append(time.perf_counter() - started)
                    cpu[name][-1].append(time.process_time() - used)
                losses[name].append(loss_of(result))
    return {name: Timed(seconds[name], average(cpu[name]), losses[name]) for name in names}


if __name__ == "__main__":
    main()
