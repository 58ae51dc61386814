"""The zoo's results as lines and as the tables of docs/models.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _run import filled, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
Record = dict[str, Any]
OUTCOMES = ("equal", "refused", "crashed", "wrong", "skipped")


def line(record: Record) -> str:
    cause = record.get("cause") or f"loss {record.get('loss', 0):.0e}, state {record.get('state', 0):.0e}"
    peers = " ".join(f"{peer}: {record[peer]}" for peer in ("export", "compile") if peer in record)
    return f"{record['outcome']:8} {record.get('cpu_s', 0):5.1f} s  {record['name']}  {cause[:150]}  {peers}"


def summary(records: Sequence[Record]) -> str:
    """Counts by family, what the peers take, what was not equal by cause, and the slowest captures."""
    return "\n\n".join(table(records) for table in TABLES.values())


def write(records: Sequence[Record], page: Path = PAGE) -> None:
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
