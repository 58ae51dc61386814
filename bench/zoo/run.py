"""Public models and optimizers, as they are published, a few steps each on virtual ranks, against eager.

    python bench/zoo/run.py --save RESULTS.jsonl              # goes on where it was
    python bench/zoo/run.py --only 'transformers/llama' --save RESULTS.jsonl
    python bench/zoo/run.py --only '^optimizers/' --save RESULTS.jsonl
    python bench/zoo/run.py --again refused,crashed,wrong --save RESULTS.jsonl
    python bench/zoo/run.py --summary --save RESULTS.jsonl    # the tables; with --page they are put in their pages

Models are tiny, and trained by AdamW; optimizers train a small model.  Packages are those of ``requirements.txt`` and
the extra ``optimizers``; what is not installed is left out.  Outcomes: equal; skipped, where plain PyTorch does not run
the tiny model, or step with a plain ``optimizer.step()``; refused, by a GraphZeroError; crashed, by any other error or
a limit; wrong.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import filled, in_child, keep_line, kept_lines, markdown

from zoo import optimizers, transformers_models, trial

PHASES = ("graph", "export")
MODELS = (transformers_models.cases, transformers_models.adapters)
ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
OUTCOMES = ("equal", "refused", "crashed", "wrong", "skipped")
SECONDS, WALL, BYTES = 120, 600, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", default="zoo.jsonl", help="where results are kept, a line for each model")
    parser.add_argument("--only", default="", help="models whose name matches this regular expression")
    parser.add_argument("--again", default="", help="outcomes to try again, joined by commas")
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--summary", action="store_true", help="print the tables of what is kept, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the tables of what is kept into their pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = kept_lines(options.save)
    if options.summary:
        print(summary(list(found.values())))
        return 0
    if options.page:
        write_pages(list(found.values()))
        return 0
    trial.load_packages()
    gc.freeze()  # what is loaded is not looked through in every child
    again = set(filter(None, options.again.split(",")))
    names = [name for name in cases() if re.search(options.only, name)]
    for name in names:
        before = found.get(name)
        due = [p for p in options.phases if before is None or before["outcome"] in again or not done(before, p)]
        if due:
            found[name] = record = tried(name, due, {} if before is None else before)
            keep_line(options.save, record)
            print(line_of(record), flush=True)
    bad = [record for name, record in found.items() if name in names and record["outcome"] in ("wrong", "crashed")]
    return 1 if bad else 0


@dataclass(frozen=True)
class Case:
    """judged, exported: what gives the outcome here, and torch.export's."""

    family: str
    judged: Callable[[], Record]
    exported: Callable[[], Record] | None = None


@functools.cache
def cases() -> dict[str, Case]:
    """Those of the packages that are installed, by name."""
    found: dict[str, Case] = {}
    for part in MODELS:
        try:
            for name, (family, make) in part().items():
                found[name] = Case(family, partial(trial.judged, make), partial(trial.exported, make))
        except ImportError as error:
            print(f"without {part.__name__}: {error}")
    return found | {name: Case(*facts) for name, facts in optimizers.cases().items()}


def done(record: dict[str, Any], phase: str) -> bool:
    if record["outcome"] == "skipped" or (phase == "export" and is_optimizer(record)):
        return True
    return "outcome" in record if phase == "graph" else phase in record


def tried(name: str, phases: Sequence[str], before: dict[str, Any]) -> dict[str, Any]:
    case = cases()[name]
    known = {key: value for key, value in before.items() if "graph" not in phases or key.startswith("export")}
    record: dict[str, Any] = {**known, "name": name, "family": case.family}
    if "graph" in phases:
        record |= forked(case.judged)
    if "export" in phases and record.get("outcome") != "skipped" and case.exported is not None:
        got = forked(case.exported)
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


def is_optimizer(record: Record) -> bool:
    return record["name"].startswith("optimizers/")


def summary(records: Sequence[Record]) -> str:
    """Counts by family, what torch.export takes, and what was not equal by cause."""
    return "\n\n".join(tables_of(records).values())


def tables_of(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """By the page and the name that a table has there."""
    models = [record for record in records if not is_optimizer(record)]
    ours = [record for record in records if is_optimizer(record)]
    tables = (
        {("docs/models.md", table.__name__): table(models) for table in (families, shares, causes)} if models else {}
    )
    pages = {("docs/optimizers.md", "optimizers"): families, ("bench/results/optimizers.md", "outcomes"): outcomes}
    return tables | ({key: table(ours) for key, table in pages.items()} if ours else {})


def write_pages(records: Sequence[Record]) -> None:
    """Put each table between its two lines of its page."""
    for (page, name), table in tables_of(records).items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), "zoo/run.py", name, table))


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


def outcomes(records: Sequence[Record]) -> str:
    """Each optimizer, with its cause or how far it is from plain PyTorch."""
    rows = [(record["outcome"], record["name"].removeprefix("optimizers/"), record["cause"]) for record in records]
    rows.sort(key=lambda row: (OUTCOMES.index(row[0]), row[1]))
    return markdown(
        ["optimizer", "outcome", "cause, or distance"], [(name, one, _cell(cause)) for one, name, cause in rows]
    )


def _cell(text: str) -> str:
    return text.replace("|", "/")[:140]


def _names(members: Sequence[Record], limit: int = 6) -> str:
    names = [member["name"].removeprefix("transformers/") for member in members]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


if __name__ == "__main__":
    sys.exit(main())
