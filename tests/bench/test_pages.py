"""What was measured gets into the pages with the command that made it; what was not measured, or is there, stays."""

from __future__ import annotations

import json
from pathlib import Path

import everything
import pytest
import tables
from _run import command, save
from peers import BASE

FILE = ["bench/step_time.py", "--model", "A", "--save", "build/bench.json"]


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, whats in tables.PAGES.items():
        text = "".join(f"{tables.begin(what)}old {what}\n{tables.END}prose on {what}\n" for what in whats)
        (tmp_path / name).write_text(f"# Title\n{text}")
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    return tmp_path


def write(docs: Path, monkeypatch: pytest.MonkeyPatch, run: str = "A, 2 ranks") -> str:
    """Figures of one run, and the pages; the page of benchmarks."""
    file = str(docs / "bench.json")
    monkeypatch.setattr("sys.argv", FILE)
    each = ((BASE, 0.2), ("FSDP2", 0.3))
    steps = {name: {"rounds": [[s, s], [2 * s] * 2], "cpu": [[s], [s]], "losses": [2.0, 1.0]} for name, s in each}
    save(file, run, "times", {"about": "a GPT", **steps})
    save(file, run, "profile", "| where |")
    save(file, run, "peaks", {BASE: {"first": 9, "later": 2 * 10**6, "planned": None}})
    monkeypatch.setattr("sys.argv", ["tables.py", file])
    tables.main()
    return (docs / "benchmarks.md").read_text()


def test_the_pages_get_the_figures_with_their_command_and_keep_the_rest(docs, monkeypatch):
    page = write(docs, monkeypatch)
    assert "old times" not in page and "old machine" not in page
    assert "old scaling" in page and "prose on times" in page and page.startswith("# Title\n")
    assert "`python bench/step_time.py --model A`" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| FSDP2"))
    assert [cell.strip() for cell in row.split("|")[2:8]] == ["300.0", "450.0", "1.50", "1.50 to 1.50", "300.0", "1.50"]
    assert "| where |" in (docs / "performance.md").read_text()
    assert "DDP + compile" in (docs / "time_against_memory.svg").read_text()


def test_the_pages_of_the_project_have_a_place_for_every_table():
    docs = Path(tables.__file__).resolve().parents[1] / "docs"
    for name, whats in tables.PAGES.items():
        page = (docs / name).read_text()
        assert all(tables.filled(page, what, "new").count("\nnew\n") == 1 for what in whats)


def test_what_was_measured_by_the_same_command_is_not_measured_again(tmp_path, monkeypatch):
    file = str(tmp_path / "bench.json")
    part = everything.Part("A, 2 ranks", "times", 1, ("step_time.py", "--model", "A"))
    assert not part.is_there(file)
    monkeypatch.setattr("sys.argv", FILE)
    save(file, "A, 2 ranks", "times", {})
    assert part.is_there(file)
    assert not everything.Part("A, 2 ranks", "times", 1, ("step_time.py", "--model", "A", "--full")).is_there(file)
    assert not everything.Part("A, 4 ranks", "times", 1, part.words).is_there(file)


def test_every_part_names_a_script_that_keeps_its_figures():
    for part in [*everything.full_parts(["A", "B", "conv"], 2), *everything.toy_parts(["toy"], 2)]:
        assert "--save" in (everything.HERE / part.words[0]).read_text(), part.words


def test_a_command_is_shown_as_one_types_it():
    assert command(["/x/bench/peak.py", "--systems", "DDP + compile", "--save", "f"]) == (
        "python bench/peak.py --systems 'DDP + compile'"
    )
    assert json.loads(json.dumps(command(FILE))) == "python bench/step_time.py --model A"
