"""Scaling measured on 1, 2 and 4 gloo ranks of this machine.

    python bench/scaling.py                 # a GPT of 7.4 M parameters beside DDP + compile and FSDP2
    python bench/scaling.py --strong        # also with one batch for all numbers of ranks

Each rank has one thread and its own share of the batch.  Ranks beyond the cores share them, so that efficiency falls
with the cores and not with the system: "of cores" counts cores in place of ranks, and the processor's seconds for a
sample show what is added.  What ``graphzero plan`` says of ranks that are not there stands beside measured steps in
plan_accuracy.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping

from _run import markdown, on_gloo, options_of, save
from step_time import Timed, ms, work
from systems import BASE, add_options, names_of
from workloads import WORKLOADS

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHOWN = ["graphzero", BASE, "FSDP2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, SHOWN)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="to measure, beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--strong", action="store_true", help="also one batch for all: that of the most ranks")
    options = options_of(parser)
    names = names_of(options)
    options.ranks = sorted({1, *options.ranks})
    parts = []

    def say(text: str) -> None:
        parts.append(text)
        print(text, end="\n\n", flush=True)

    weak = {n: on_gloo(n, work, options.model, names, options.rounds, options.steps) for n in options.ranks}
    share = WORKLOADS[options.model].share
    say(f"{WORKLOADS[options.model].describe(max(weak))}, {CORES} cores; {share} samples a rank:")
    say(measured(weak, lambda n: share * n))
    if options.strong:
        total = share * max(weak)
        strong = {n: on_gloo(n, work, options.model, names, options.rounds, options.steps, total // n) for n in weak}
        say(f"The same, {total} samples for all ranks together:")
        say(measured(strong, lambda n: total))
    if options.save:
        save(options.save, f"{options.model}, scaling", "scaling", "\n\n".join(parts))


def measured(found: Mapping[int, Mapping[str, Timed]], samples: Callable[[int], int]) -> str:
    """found: by ranks and system.  samples: of a step, by ranks."""
    base = min(found)
    more = [n for n in found if n != base]
    rows = []
    for name in found[base]:
        rate = {n: samples(n) / one[name].median for n, one in found.items()}
        cells = [f"{rate[n]:.1f}" for n in found]
        cells += [f"{rate[n] / rate[base] * base / n:.2f}" for n in more]
        cells += [f"{rate[n] / rate[base] * min(base, CORES) / min(n, CORES):.2f}" for n in more if n > CORES]
        cells += [ms(n * one[name].median_cpu / samples(n)) for n, one in found.items()]
        rows.append([name, *cells])
    head = [f"samples/s, {_ranks(n)}" for n in found] + [f"efficiency, {n}" for n in more]
    head += [f"of cores, {n}" for n in more if n > CORES] + [f"CPU ms a sample, {n}" for n in found]
    return markdown(["", *head], rows)


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


if __name__ == "__main__":
    main()
