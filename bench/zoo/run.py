"""Public models, as they are published and tiny, three AdamW steps each at stage 3 on 4 virtual ranks, against eager.

    python bench/zoo/run.py --save RESULTS.jsonl              # goes on where it was
    python bench/zoo/run.py --only 'transformers/llama' --save RESULTS.jsonl
    python bench/zoo/run.py --again refused,crashed,wrong --save RESULTS.jsonl
    python bench/zoo/run.py --summary --save RESULTS.jsonl    # the tables; with --page they are put in docs/models.md

Packages are those of ``requirements.txt``; what is not installed is left out.  Outcomes: equal; skipped, where plain
PyTorch does not run the tiny model; refused, by a GraphZeroError; crashed, by any other error or a limit; wrong.
One process a model, forked from one that has loaded the packages, with limits of processor time and memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import in_child, keep_line, kept_lines

from zoo import packages, tables, trial

PEER_FACTS = tuple(f"{peer}{what}" for peer in ("export", "compile") for what in ("", "_cause", "_cpu_s"))
PARTS = ("zoo.peft_models", "zoo.diffusers_models", "zoo.transformers_models", "zoo.image_models")
SECONDS, WALL, BYTES = 120, 600, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", default="zoo.jsonl", help="where results are kept, a line for each model")
    parser.add_argument("--only", default="", help="models whose name matches this regular expression")
    parser.add_argument("--again", default="", help="outcomes to try again, joined by commas")
    parser.add_argument("--sample", type=int, default=1, help="every n-th model only")
    parser.add_argument("--phases", default="graph,export", help="of graph, export, compile")
    parser.add_argument("--summary", action="store_true", help="print the tables of what is kept, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the tables of what is kept into docs/models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = kept_lines(options.save)
    if options.summary:
        print(tables.summary(list(found.values())))
        return 0
    if options.page:
        tables.write(list(found.values()))
        return 0
    packages.load()
    gc.freeze()  # what is loaded is not looked through in every child
    again = set(filter(None, options.again.split(",")))
    phases = options.phases.split(",")
    names = [name for name in cases() if re.search(options.only, name)][:: options.sample]
    for name in names:
        before = found.get(name)
        due = [p for p in phases if before is None or before["outcome"] in again or not done(before, p)]
        if due:
            found[name] = record = tried(name, due, {} if before is None else before)
            keep_line(options.save, record)
            print(tables.line(record), flush=True)
    bad = [record for name, record in found.items() if name in names and record["outcome"] in ("wrong", "crashed")]
    return 1 if bad else 0


@functools.cache
def cases() -> dict[str, tuple[str, Callable[[], trial.Trial]]]:
    """name -> family, and how the trial is made; of the packages that are installed."""
    found: dict[str, tuple[str, Callable[[], trial.Trial]]] = {}
    for part in PARTS:
        try:
            found |= importlib.import_module(part).cases()
        except ImportError as error:
            print(f"without {part}: {error}")
    return found


def done(record: dict[str, Any], phase: str) -> bool:
    if record["outcome"] == "skipped":
        return True
    return "outcome" in record if phase == "graph" else phase in record


def tried(name: str, phases: list[str], before: dict[str, Any]) -> dict[str, Any]:
    family, make = cases()[name]
    record: dict[str, Any] = {"name": name, "family": family} | {k: v for k, v in before.items() if k in PEER_FACTS}
    if "graph" not in phases:
        record = dict(before)
    for phase in phases:
        if phase in ("export", "compile"):
            if record.get("outcome") == "skipped":
                break
            got = forked(lambda phase=phase: trial.peer(make, phase))
            if phase not in got:
                got |= {phase: "failed", f"{phase}_cause": got.get("cause", "")}
            record |= {key: value for key, value in got.items() if key.startswith(phase)}
            record[f"{phase}_cpu_s"] = got["cpu_s"]
        else:
            record |= forked(lambda: trial.judged(make))
    return record


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of ``work`` in a process of its own, with the resources used; or how the process ended."""

    def attempt() -> dict[str, Any]:
        try:
            return work()
        except BaseException as error:
            return {"outcome": "crashed", **trial.described(error)}

    got, end, used = in_child(attempt, WALL, SECONDS, BYTES)
    got = got or {"outcome": "crashed", "cause": end, "message": ""}
    return got | {"cpu_s": round(used.ru_utime + used.ru_stime, 2), "peak_mb": used.ru_maxrss >> 10}


if __name__ == "__main__":
    sys.exit(main())
