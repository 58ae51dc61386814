"""What was measured gets into the pages with the command that made it; what was not measured, or is there, stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_comparison
import tables
from _run import END, begin, command, filled, save
from systems import BASE

FILE = ["bench/step_time.py", "--model", "A", "--save", "build/bench.json"]


ROOT = Path(tables.__file__).resolve().parents[1]
TIMES = "bench/results/step_time.md"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose pages hold old figures."""
    for name, whats in tables.PAGES.items():
        text = "".join(f"{begin('tables.py', what)}old {what}\n{END}prose on {what}\n" for what in whats)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# Title\n{text}")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def write(root: Path, monkeypatch: pytest.MonkeyPatch, *options: str, run: str = "A, 2 ranks") -> None:
    """Figures of one run, and the pages."""
    file = str(root / "bench.json")
    monkeypatch.setattr("sys.argv", FILE)
    each = ((BASE, 0.2), ("FSDP2", 0.3))
    steps = {name: {"rounds": [[s, s], [2 * s] * 2], "cpu": [[s], [s]], "losses": [2.0, 1.0]} for name, s in each}
    save(file, run, "times", {"about": "a GPT", **steps})
    save(file, run, "profile", "| where |")
    save(file, run, "peaks", {BASE: {"first": 9, "later": 2 * 10**6, "planned": None}})
    monkeypatch.setattr("sys.argv", ["tables.py", file, *options])
    tables.main()


def test_the_pages_get_the_figures_with_their_command_and_keep_the_rest(root, monkeypatch, capsys):
    write(root, monkeypatch)
    page = (root / TIMES).read_text()
    assert "old times" not in page and "old machine" not in page
    assert "prose on times" in page and page.startswith("# Title\n")
    assert "`python bench/step_time.py --model A`" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| FSDP2"))
    assert [cell.strip() for cell in row.split("|")[2:8]] == ["300.0", "450.0", "1.50", "1.50 to 1.50", "300.0", "1.50"]
    assert "| where |" in (root / "docs/performance.md").read_text()
    assert "DDP + compile" in (root / "docs/time_against_memory.svg").read_text()
    assert "docs/benchmarks.md" in capsys.readouterr().out  # whose figures nothing writes


def test_a_page_whose_figures_were_not_measured_keeps_its_machine(root, monkeypatch):
    write(root, monkeypatch)
    page = (root / "bench/results/scaling.md").read_text()
    assert "old scaling" in page and "old machine" in page


def test_pages_go_to_another_folder_where_one_is_named(root, monkeypatch, tmp_path, capsys):
    before = {name: (root / name).read_text() for name in tables.PAGES}
    write(root, monkeypatch, "--to", str(tmp_path / "build" / "toy"))
    assert {name: (root / name).read_text() for name in tables.PAGES} == before
    assert "old times" not in (tmp_path / "build" / "toy" / TIMES).read_text()
    assert (tmp_path / "build" / "toy" / tables.PLOT).exists() and not (root / tables.PLOT).exists()
    assert not capsys.readouterr().out


def test_a_run_of_toys_writes_beside_its_figures_and_a_full_one_into_the_repository(monkeypatch, capsys):
    monkeypatch.setattr(run_comparison.Part, "is_there", lambda self, file: True)
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: ran.append(words))
    for models in (["toy"], ["A"]):
        monkeypatch.setattr("sys.argv", ["run_comparison.py", "--models", *models])
        run_comparison.main()
    script, toy = str(ROOT / "bench" / "tables.py"), ROOT / "build" / "toy"
    assert ran == [
        [sys.executable, script, str(toy / "bench.json"), "--to", str(toy)],
        [sys.executable, script, str(ROOT / "build" / "bench.json"), "--to", str(ROOT)],
    ]


def test_the_pages_of_the_project_have_a_place_for_every_table():
    for name, whats in tables.PAGES.items():
        page = (ROOT / name).read_text()
        assert all(filled(page, "tables.py", what, "new").count("\nnew\n") == 1 for what in whats)


def test_tables_begin_with_their_command_and_the_page_of_benchmarks_leads_to_all_of_them():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "bench/tables.py writes" not in page and len(page.splitlines()) <= 200
    for path in (ROOT / "bench" / "results").glob("*.md"):
        assert f"(../bench/results/{path.name})" in page
        title, command, _ = path.read_text().split("```", 2)
        assert title.startswith("# ") and title.count("\n") == 2 and command.startswith("bash\n"), path
        scripts = [word for word in command.split() if word.startswith("bench/")]
        assert all((ROOT / script).exists() for script in scripts), path


def test_what_was_measured_by_the_same_command_is_not_measured_again(tmp_path, monkeypatch):
    file = str(tmp_path / "bench.json")
    part = run_comparison.Part("A, 2 ranks", "times", 1, ("step_time.py", "--model", "A"))
    assert not part.is_there(file)
    monkeypatch.setattr("sys.argv", FILE)
    save(file, "A, 2 ranks", "times", {})
    assert part.is_there(file)
    assert not run_comparison.Part("A, 2 ranks", "times", 1, ("step_time.py", "--model", "A", "--full")).is_there(file)
    assert not run_comparison.Part("A, 4 ranks", "times", 1, part.words).is_there(file)


def test_every_part_names_a_script_that_keeps_its_figures():
    for part in [*run_comparison.full_parts(["A", "B", "conv"], 2), *run_comparison.toy_parts(["toy"], 2)]:
        assert "save(options.save" in (run_comparison.HERE / part.words[0]).read_text(), part.words


def test_a_command_is_shown_as_one_types_it():
    assert command(["/x/bench/peak_memory.py", "--systems", "DDP + compile", "--save", "f"]) == (
        "python bench/peak_memory.py --systems 'DDP + compile'"
    )
    assert json.loads(json.dumps(command(FILE))) == "python bench/step_time.py --model A"
