"""Public models and optimizers, as they are published, a few steps each on virtual ranks, against eager.

    python bench/zoo/run.py --save RESULTS.jsonl              # goes on where it was
    python bench/zoo/run.py --only 'transformers/llama' --save RESULTS.jsonl
    python bench/zoo/run.py --only '^optimizers/' --save RESULTS.jsonl
    python bench/zoo/run.py --again refused,crashed,wrong --save RESULTS.jsonl
    python bench/zoo/run.py --summary --save RESULTS.jsonl    # the tables; with --page they are put in their pages

Packages are those of ``requirements.txt`` and the extra ``optimizers``; what is not installed is left out.
docs/models.md says what a trial is, and what its outcomes are; of an optimizer, skipped is one that plain PyTorch does
not step with a plain ``optimizer.step()``.  One process a model, forked from one that has loaded the packages.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import pickle
import re
import resource
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import command_parser, format_table, parse_options

from zoo.optimizers import list_optimizers
from zoo.transformers_models import list_adapters, list_architectures
from zoo.trial import Record, ZooCase, describe_error, load_packages

PHASES = ("graph", "export")
ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("equal", "refused", "crashed", "wrong", "skipped")
SECONDS, WALL, BYTES = 120, 600, 6 << 30


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--save", default="zoo.jsonl", help="where results are kept, a line for each model")
    parser.add_argument("--only", default="", help="models whose name matches this regular expression")
    parser.add_argument("--again", default="", help="outcomes to try again, joined by commas")
    parser.add_argument("--summary", action="store_true", help="print the tables of what is kept, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the tables of what is kept into their pages")
    options = parse_options(parser)
    path = Path(options.save)
    records = read_records(path)
    if options.summary:
        print(format_summary(list(records.values())))
        return 0
    if options.page:
        write_pages(list(records.values()))
        return 0
    load_packages()
    gc.freeze()  # what is loaded is not looked through in every child
    again = set(filter(None, options.again.split(",")))
    names = [name for name in list_cases() if re.search(options.only, name)]
    for name in names:
        before = records.get(name, {})
        due = [p for p in PHASES if before.get("outcome") in again or not is_done(before, p)]
        if due:
            records[name] = record = try_case(name, due, before)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(format_record(record), flush=True)
    return int(any(records[name]["outcome"] in ("wrong", "crashed") for name in names if name in records))


def read_records(path: Path) -> dict[str, Record]:
    """The last record of each name in a file of a JSON record a line."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


@functools.cache
def list_cases() -> dict[str, ZooCase]:
    """Cases of the packages that are installed, by name."""
    cases: dict[str, ZooCase] = {}
    for list_kind in (list_architectures, list_adapters, list_optimizers):
        try:
            cases |= list_kind()
        except ImportError as error:
            print(f"without {list_kind.__name__}: {error}")
    return cases


def is_done(record: Mapping[str, Any], phase: str) -> bool:
    if record.get("outcome") == "skipped" or (record and phase == "export" and is_optimizer(record)):
        return True
    return ("outcome" if phase == "graph" else phase) in record


def try_case(name: str, phases: Sequence[str], before: Mapping[str, Any]) -> Record:
    case = list_cases()[name]
    known = {key: value for key, value in before.items() if "graph" not in phases or key.startswith("export")}
    record: Record = {**known, "name": name, "family": case.family}
    if "graph" in phases:
        record |= run_in_child(case.judge)
    if "export" in phases and record.get("outcome") != "skipped" and case.try_export is not None:
        exported = run_in_child(case.try_export)
        if "export" not in exported:
            exported |= {"export": "failed", "export_cause": exported.get("cause", "")}
        record |= {key: value for key, value in exported.items() if key.startswith("export")}
    return record


def run_in_child(function: Callable[[], Record]) -> Record:
    """Result of ``function`` in a process that is forked from this one, with the resources used; or how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            _limit_child()
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(_try_function(function)))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        result = pipe.read()
    _, status, used = os.wait4(child, 0)
    resources = {"cpu_s": round(used.ru_utime + used.ru_stime, 2), "peak_mb": used.ru_maxrss >> 10}
    if not status:
        return pickle.loads(result) | resources
    number = os.WTERMSIG(status)
    ends = {signal.SIGALRM: f"more than {WALL} s", signal.SIGXCPU: f"more than {SECONDS} s of processor time"}
    cause = ends.get(number, f"killed by {signal.Signals(number).name}") if number else "no result"
    return {"outcome": "crashed", "cause": cause, "message": "", **resources}


def _limit_child() -> None:
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(WALL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, -1))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, -1))
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)


def _try_function(function: Callable[[], Record]) -> Record:
    try:
        return function()
    except BaseException as error:
        return {"outcome": "crashed", **describe_error(error)}


# ---- lines and tables of what is kept


def format_record(record: Record) -> str:
    cause = record.get("cause") or f"loss {record.get('loss', 0):.0e}, state {record.get('state', 0):.0e}"
    peer = f"export: {record['export']}" if "export" in record else ""
    return f"{record['outcome']:8} {record.get('cpu_s', 0):5.1f} s  {record['name']}  {cause[:150]}  {peer}"


def is_optimizer(record: Mapping[str, Any]) -> bool:
    return record["name"].startswith("optimizers/")


def format_summary(records: Sequence[Record]) -> str:
    """Counts by family, what torch.export takes, and what was not equal by cause."""
    return "\n\n".join(format_tables(records).values())


def format_tables(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """By the page and the name that a table has there."""
    tables = {}
    for (page, name), format_records in TABLES.items():
        of_optimizers = page != "docs/models.md"
        if chosen := [record for record in records if is_optimizer(record) == of_optimizers]:
            tables[page, name] = format_records(chosen)
    return tables


def write_pages(records: Sequence[Record]) -> None:
    """Put each table between the line that names it and the end line after that, in its page."""
    for (page, name), table in format_tables(records).items():
        before, rest = (ROOT / page).read_text().split(begin := f"<!-- bench/zoo/run.py writes: {name} -->\n")
        (ROOT / page).write_text(f"{before}{begin}{table}\n{END}{rest.split(END, 1)[1]}")


def format_families(records: Sequence[Record]) -> str:
    counts = Counter((row, record["outcome"]) for record in records for row in (record["family"], "all"))
    families = sorted({record["family"] for record in records})
    rows = [[family, *(counts[family, outcome] for outcome in OUTCOMES)] for family in (*families, "all")]
    return format_table(["family", *OUTCOMES], rows)


def format_shares(records: Sequence[Record]) -> str:
    """Of the models whose forward torch.export takes, how many train here; and the other way round."""
    counts = Counter(
        (record["export"] == "taken", record["outcome"] == "equal")
        for record in records
        if record["outcome"] != "skipped" and "export" in record
    )
    taken = counts[True, True] + counts[True, False]
    share = f"{100 * counts[True, True] / taken:.1f} %" if taken else "-"
    head = ["models asked", "torch.export takes", "of these equal here", "share", "equal here, not taken"]
    return format_table(head, [[counts.total(), taken, counts[True, True], share, counts[False, True]]])


def format_causes(records: Sequence[Record]) -> str:
    """Models refused, crashed or wrong, by cause, with torch.export's outcome for the same models."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["outcome"] in ("refused", "crashed", "wrong"):
            groups[record["outcome"], record.get("cause", "")].append(record)
    rows = []
    for (outcome, cause), members in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        taken = f"{sum(m.get('export') == 'taken' for m in members)} of {sum('export' in m for m in members)}"
        rows.append([_format_cell(cause), outcome, len(members), taken, _list_names(members)])
    return format_table(["cause", "outcome", "models", "torch.export takes", "which"], rows)


def format_outcomes(records: Sequence[Record]) -> str:
    """Each optimizer, with its cause or how far it is from plain PyTorch."""
    ordered = sorted(records, key=lambda record: (OUTCOMES.index(record["outcome"]), record["name"]))
    rows = [[r["name"].removeprefix("optimizers/"), r["outcome"], _format_cell(r["cause"])] for r in ordered]
    return format_table(["optimizer", "outcome", "cause, or distance"], rows)


def _format_cell(text: str) -> str:
    return text.replace("|", "/")[:140]


def _list_names(members: Sequence[Record], limit: int = 6) -> str:
    names = [member["name"].removeprefix("transformers/") for member in members]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


TABLES: dict[tuple[str, str], Callable[[Sequence[Record]], str]] = {
    ("docs/models.md", "families"): format_families,
    ("docs/models.md", "shares"): format_shares,
    ("docs/models.md", "causes"): format_causes,
    ("docs/optimizers.md", "optimizers"): format_families,
    ("bench/results/optimizers.md", "outcomes"): format_outcomes,
}
END = "<!-- up to here -->\n"


if __name__ == "__main__":
    sys.exit(main())
