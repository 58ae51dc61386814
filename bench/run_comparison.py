"""All benchmarks beside other systems, one after the other; then their tables and the plot: ``make bench``.

    python bench/run_comparison.py                  # models A, B, conv on 2 ranks, A and B on 4, overhead, scaling
    python bench/run_comparison.py --models toy     # whether all of it runs; tables go to build/toy

Wants idle cores.  Figures are kept in build/bench.json: what is there already, of the same command, is not measured
again, so that an interrupted run goes on where it was; delete the file to begin again, as after a change of the code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from _run import HERE, command, options_of, saved
from systems import BASE, EARLY, ROOMY, ROUNDED, SYSTEMS
from workloads import WORKLOADS, Variant

ROOT = HERE.parent
TOYS = ("toy", "toy conv")
SHORT = ("--systems", "graphzero, stage 3", BASE)
QUICK = {  # what a run of toys gives beside
    "step_time.py": ("--rounds", "1", "--steps", "3"), "peak_memory.py": SHORT,
    "first_step.py": ("--starts", "1", *SHORT),
    "overhead.py": ("--parameters", "10", "--calls", "20"),
    "scaling.py": ("--rounds", "1", "--steps", "2", "--ranks", "2", *SHORT),
}  # fmt: skip
FEW = ("graphzero, stage 1", "graphzero, stage 3", "graphzero + inductor, stage 1", "DDP", BASE)
MORE = ("A", "B")  # on 4 ranks too
HEAVIEST = "B"  # whose peaks on 4 ranks count


@dataclass(frozen=True)
class Part:
    """A command that keeps its figures as ``part`` of ``run``; seconds: about how many, on two idle cores."""

    run: str
    part: str
    seconds: int
    words: tuple[str, ...]

    def is_there(self, file: str) -> bool:
        kept = saved(file).get(self.run, {}).get(self.part, {})
        return isinstance(kept, dict) and kept.get("command") == command(self.words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["A", "B", "conv"], metavar="MODEL")
    parser.add_argument("--ranks", type=int, default=2)
    options = options_of(parser)
    is_toy = set(options.models) <= set(TOYS)
    folder = ROOT / "build" / ("toy" if is_toy else "")
    file = str(folder / "bench.json")
    for system in SYSTEMS:
        if system.missing:
            print(system.missing)
    parts = [*(toy_parts if is_toy else full_parts)(options.models, options.ranks)]
    left = [one for one in parts if not one.is_there(file)]
    for one in parts:
        print(f"{'to do' if one in left else 'there'}  {_minutes(one.seconds):>7}  {command(one.words)}")
    for i, one in enumerate(left):
        rest = sum(later.seconds for later in left[i:])
        print(f"\n{i + 1} of {len(left)}, {_minutes(rest)} left: {command(one.words)}", flush=True)
        began = time.perf_counter()
        subprocess.run([sys.executable, str(HERE / one.words[0]), *one.words[1:], "--save", file], check=True)
        print(f"took {_minutes(time.perf_counter() - began)}", flush=True)
    tables(file, folder if is_toy else ROOT)


def full_parts(models: list[str], ranks: int) -> Iterator[Part]:
    for model in models:
        also = ["--also", EARLY] if model == HEAVIEST else []
        yield _part("step_time.py", "times", 190, model, ranks, "--rounds", "8" if model in MORE else "6", *also)
        yield _part("peak_memory.py", "peaks", 150, model, ranks, *also)
        yield _part("step_time.py", "profile", 40, model, ranks, "--profile")
    for model in models:
        if model in MORE and ranks < 4:
            yield _part("step_time.py", "times", 200, model, 4, "--rounds", "3")
        if model == HEAVIEST and ranks < 4:
            yield _part("peak_memory.py", "peaks", 120, model, 4, "--systems", "graphzero", EARLY, BASE, "FSDP2")
    for model in models:
        if model in MORE:
            for what, option in (("through gloo", "--gloo"), ("memory kept", "--keep-memory")):
                words = ("step_time.py", "--model", model, "--ranks", str(ranks), option, "--rounds", "4")
                words += ("--systems", "graphzero", "DDP", BASE)
                yield Part(f"{model}, {ranks} ranks, {what}", "times", 60, words)
    for model, parts in (("A", 4), ("B", 2)):
        if model in models:
            yield from _in_another_way(model, ranks, Variant(precision="bfloat16"), "--precision", "bfloat16", ROUNDED)
            yield from _in_another_way(model, ranks, Variant(micro_batches=parts), "--micro-batches", str(parts), ROOMY)
    yield Part("overhead", "overhead", 60, ("overhead.py",))
    yield _part("first_step.py", "first step", 200, models[0], ranks, "--systems", *FEW)
    yield Part(f"{models[0]}, scaling", "scaling", 400, ("scaling.py", "--model", models[0], "--rounds", "3"))


def toy_parts(models: list[str], ranks: int) -> Iterator[Part]:
    """The same parts with so few rounds that they only show that all of it runs."""
    for one in full_parts(models, ranks):
        yield replace(one, seconds=min(one.seconds, 40), words=(*one.words, *QUICK[one.words[0]]))


def _part(script: str, part: str, seconds: int, model: str, ranks: int, *more: str) -> Part:
    return Part(f"{model}, {ranks} ranks", part, seconds, (script, "--model", model, "--ranks", str(ranks), *more))


def _in_another_way(model: str, ranks: int, variant: Variant, option: str, value: str, also: str) -> Iterator[Part]:
    words = ("--model", model, "--ranks", str(ranks), option, value)
    systems = ("--systems", "graphzero", also, "DDP", BASE, "FSDP2", "DeepSpeed")
    run = f"{model}, {ranks} ranks{variant.title}"
    yield Part(run, "times", 120, ("step_time.py", *words, "--rounds", "4", *systems))
    yield Part(run, "peaks", 150, ("peak_memory.py", *words, *systems))


def tables(file: str, to: Path) -> None:
    subprocess.run([sys.executable, str(HERE / "tables.py"), file, "--to", str(to)], check=True)
    print(f"\nwrote the tables and the plot below {to}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    main()
