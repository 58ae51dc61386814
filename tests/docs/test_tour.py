"""Every program on the page of the tour comes out of ``graphzero opt``, from the first program and a line of passes."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from doc_blocks import ROOT, blocks_of

from graphzero.cli import main

LINE = (
    "pin,zero{stage=2},expand,propagate,insert_boxing,lower_boxing,localize,fuse_cross_entropy,fuse_pieces,fuse_adam,"
    "bucket,launch,overlap,overlap_update,copy_old,assign,slots,dead_code,in_place,join_updates"
)


@dataclass(frozen=True)
class Printed:
    """A record of a pass, as far as texts tell."""

    before: str
    after: str
    changes: str

    def diff(self) -> str:
        return self.changes


def opt(file: Path, passes: list[str], *flags: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["opt", str(file), "--passes", ",".join(passes), *flags]) == 0
    return printed.getvalue()


def test_the_first_program_and_a_line_of_passes_give_every_later_one(tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))
    sources = [block.text for block in blocks if block.language == "python"]
    shown = {sources[block.follows]: block.text for block in blocks if block.follows is not None}
    first = next(text for text in shown.values() if text.startswith("graph "))
    file, passes, records = tmp_path / "step.txt", LINE.split(","), dict[str, Printed]()
    file.write_text(first)
    program = first
    for i, one in enumerate(passes):
        after = opt(file, passes[: i + 1])
        every = re.split(r"^(?=--- before )", opt(file, passes[: i + 1], "--diff"), flags=re.MULTILINE)
        changes = every[-1] if every[-1].startswith(f"--- before {one.split('{')[0]}\n") else ""
        records[one.split("{")[0]] = Printed(program, after, changes.rstrip("\n"))
        program = after
    names = {"passes": records, "graph": SimpleNamespace(program=program)}
    compared = 0
    for source in sources:
        if not re.search(r"passes\[|graph\.program", source) or "nn.Module" in source or "compile(" in source:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(source, names)
        lines = [line.rstrip() for line in printed.getvalue().rstrip("\n").splitlines()]
        assert lines == shown[source].rstrip("\n").splitlines(), source
        compared += 1
    assert compared >= 11
