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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import filled, in_child, keep_line, kept_lines, markdown

from zoo import packages, trial

PEER_FACTS = tuple(f"{peer}{what}" for peer in ("export", "compile") for what in ("", "_cause", "_cpu_s"))
PARTS = ("diffusers_models.cases", "transformers_models.cases", "transformers_models.adapters", "image_models.cases")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
Record = dict[str, Any]
OUTCOMES = ("equal", "refused", "crashed", "wrong", "skipped")
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
        print(summary(list(found.values())))
        return 0
    if options.page:
        write_page(list(found.values()))
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
            print(line_of(record), flush=True)
    bad = [record for name, record in found.items() if name in names and record["outcome"] in ("wrong", "crashed")]
    return 1 if bad else 0


@functools.cache
def cases() -> dict[str, tuple[str, Callable[[], trial.Trial]]]:
    """name -> family, and how the trial is made; of the packages that are installed."""
    found: dict[str, tuple[str, Callable[[], trial.Trial]]] = {}
    for part in PARTS:
        module, function = part.split(".")
        try:
            found |= getattr(importlib.import_module(f"zoo.{module}"), function)()
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


# ---- lines and tables of what is kept


def line_of(record: Record) -> str:
    cause = record.get("cause") or f"loss {record.get('loss', 0):.0e}, state {record.get('state', 0):.0e}"
    peers = " ".join(f"{peer}: {record[peer]}" for peer in ("export", "compile") if peer in record)
    return f"{record['outcome']:8} {record.get('cpu_s', 0):5.1f} s  {record['name']}  {cause[:150]}  {peers}"


def summary(records: Sequence[Record]) -> str:
    """Counts by family, what the peers take, what was not equal by cause, and the slowest captures."""
    return "\n\n".join(table(records) for table in TABLES.values())


def write_page(records: Sequence[Record], page: Path = PAGE) -> None:
    """Put each table between its two lines of the page."""
    text = page.read_text()
    for name, table in TABLES.items():
        text = filled(text, "zoo/run.py", name, table(records))
    page.write_text(text)


def families(records: Sequence[Record]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for row in (record["family"], "all"):
            counts[row][record["outcome"]] += 1
    rows = [
        [family, *(counts[family][outcome] for outcome in OUTCOMES)] for family in sorted(counts) if family != "all"
    ]
    return markdown(["family", *OUTCOMES], [*rows, ["all", *(counts["all"][outcome] for outcome in OUTCOMES)]])


def shares(records: Sequence[Record]) -> str:
    """Of the models that a peer takes the forward of, how many train here; and the other way round."""
    ran = [record for record in records if record["outcome"] != "skipped"]
    rows = []
    for peer, says in (("export", "torch.export"), ("compile", "torch.compile")):
        asked = [record for record in ran if peer in record]
        taken = [record for record in asked if record[peer] == "taken"]
        equal = [record for record in taken if record["outcome"] == "equal"]
        more = [record for record in asked if record[peer] != "taken" and record["outcome"] == "equal"]
        share = f"{100 * len(equal) / len(taken):.1f} %" if taken else "-"
        rows.append([says, len(asked), len(taken), len(equal), share, len(more)])
    return markdown(["peer", "models asked", "taken", "of these equal here", "share", "equal here, not taken"], rows)


def causes(records: Sequence[Record]) -> str:
    """Models refused, crashed or wrong, by cause, with the peers' outcomes for the same models."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["outcome"] in ("refused", "crashed", "wrong"):
            groups[record["outcome"], record.get("cause", "")].append(record)
    rows = []
    for (outcome, cause), members in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        peers = [
            f"{sum(m.get(peer) == 'taken' for m in members)} of {sum(peer in m for m in members)}"
            for peer in ("export", "compile")
        ]
        rows.append([_cell(cause), outcome, len(members), *peers, _names(members)])
    return markdown(["cause", "outcome", "models", "torch.export takes", "torch.compile takes", "which"], rows)


def skipped(records: Sequence[Record]) -> str:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["outcome"] == "skipped":
            groups[record.get("cause", "")].append(record)
    rows = [[_cell(cause), len(members), _names(members)] for cause, members in sorted(groups.items(), key=_size)]
    return markdown(["skipped: what plain PyTorch says", "models", "which"], rows)


def _size(group: tuple[str, list[Record]]) -> int:
    return -len(group[1])


def slowest(records: Sequence[Record], count: int = 10) -> str:
    timed = sorted((r for r in records if "compile_s" in r), key=lambda r: -r["compile_s"])[:count]
    rows = [[r["name"], r["ops"], f"{r['compile_s']:.1f}", f"{r['eager_s']:.1f}"] for r in timed]
    return markdown(["processor seconds", "nodes", "capture and passes", "three steps in eager"], rows)


def _cell(text: str) -> str:
    return text.replace("|", "/")[:140]


def _names(members: Sequence[Record], limit: int = 6) -> str:
    names = [member["name"].removeprefix("transformers/") for member in members]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


TABLES = {"families": families, "shares": shares, "causes": causes, "slowest": slowest, "skipped": skipped}


if __name__ == "__main__":
    sys.exit(main())
