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
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import filled, in_child, keep_line, kept_lines, markdown

from zoo import transformers_models, trial

PHASES = ("graph", "export")
PARTS = (transformers_models.cases, transformers_models.adapters)
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
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
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
    trial.load_packages()
    gc.freeze()  # what is loaded is not looked through in every child
    again = set(filter(None, options.again.split(",")))
    names = [name for name in cases() if re.search(options.only, name)][:: options.sample]
    for name in names:
        before = found.get(name)
        due = [p for p in options.phases if before is None or before["outcome"] in again or not done(before, p)]
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
        try:
            found |= part()
        except ImportError as error:
            print(f"without {part.__name__}: {error}")
    return found


def done(record: dict[str, Any], phase: str) -> bool:
    if record["outcome"] == "skipped":
        return True
    return "outcome" in record if phase == "graph" else phase in record


def tried(name: str, phases: Sequence[str], before: dict[str, Any]) -> dict[str, Any]:
    family, make = cases()[name]
    known = {key: value for key, value in before.items() if "graph" not in phases or key.startswith("export")}
    record: dict[str, Any] = {**known, "name": name, "family": family}
    if "graph" in phases:
        record |= forked(lambda: trial.judged(make))
    if "export" in phases and record.get("outcome") != "skipped":
        got = forked(lambda: trial.exported(make))
        record |= {key: value for key, value in got.items() if key.startswith("export")}
        if "export" not in got:
            record |= {"export": "failed", "export_cause": got.get("cause", "")}
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
    peer = f"export: {record['export']}" if "export" in record else ""
    return f"{record['outcome']:8} {record.get('cpu_s', 0):5.1f} s  {record['name']}  {cause[:150]}  {peer}"


def summary(records: Sequence[Record]) -> str:
    """Counts by family, what torch.export takes, and what was not equal by cause."""
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
    """Of the models whose forward torch.export takes, how many train here; and the other way round."""
    asked = [record for record in records if record["outcome"] != "skipped" and "export" in record]
    taken = [record for record in asked if record["export"] == "taken"]
    equal = [record for record in taken if record["outcome"] == "equal"]
    more = [record for record in asked if record["export"] != "taken" and record["outcome"] == "equal"]
    share = f"{100 * len(equal) / len(taken):.1f} %" if taken else "-"
    head = ["models asked", "torch.export takes", "of these equal here", "share", "equal here, not taken"]
    return markdown(head, [[len(asked), len(taken), len(equal), share, len(more)]])


def causes(records: Sequence[Record]) -> str:
    """Models refused, crashed or wrong, by cause, with torch.export's outcome for the same models."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["outcome"] in ("refused", "crashed", "wrong"):
            groups[record["outcome"], record.get("cause", "")].append(record)
    rows = []
    for (outcome, cause), members in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        taken = f"{sum(m.get('export') == 'taken' for m in members)} of {sum('export' in m for m in members)}"
        rows.append([_cell(cause), outcome, len(members), taken, _names(members)])
    return markdown(["cause", "outcome", "models", "torch.export takes", "which"], rows)


def _cell(text: str) -> str:
    return text.replace("|", "/")[:140]


def _names(members: Sequence[Record], limit: int = 6) -> str:
    names = [member["name"].removeprefix("transformers/") for member in members]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


TABLES = {"families": families, "shares": shares, "causes": causes}


if __name__ == "__main__":
    sys.exit(main())
