"""What was measured gets into the pages with the command that made it; what was not measured, or is there, stays."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import tables
from _run import END, begin, command, filled, save
from systems import BASE

FILE = ["bench/step_time.py", "--model", "A", "--save", "build/bench.json"]


ROOT = Path(tables.__file__).resolve().parents[1]


def test_the_page_gets_the_figures_with_their_command_and_keeps_the_rest(tmp_path, monkeypatch, capsys):
    text = "".join(f"{begin('tables.py', what)}old {what}\n{END}prose on {what}\n" for what in ("machine", "times"))
    (tmp_path / "step_time.md").write_text(f"# Title\n{text}")
    file = str(tmp_path / "build" / "bench.json")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGE", "step_time.md")
    monkeypatch.setattr("sys.argv", FILE)
    each = ((BASE, 0.2), ("FSDP2", 0.3))
    steps = {name: {"rounds": [[s, s], [2 * s] * 2], "cpu": [[s], [s]], "losses": [2.0, 1.0]} for name, s in each}
    save(file, "A, 2 ranks", "times", {"about": "a GPT", **steps})
    save(file, "A, 2 ranks", "peaks", {BASE: {"first": 9, "later": 2 * 10**6}})
    monkeypatch.setattr("sys.argv", ["tables.py", "--write"])
    tables.main()
    page = (tmp_path / "step_time.md").read_text()
    assert "old times" not in page and "old machine" not in page
    assert "prose on times" in page and page.startswith("# Title\n")
    assert "`python bench/step_time.py --model A`" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| FSDP2"))
    assert [cell.strip() for cell in row.split("|")[2:8]] == ["300.0", "450.0", "1.50", "1.50 to 1.50", "300.0", "1.50"]
    assert "docs/benchmarks.md" in capsys.readouterr().out  # whose figures nothing writes


def test_the_page_of_the_project_has_a_place_for_every_table():
    page = (ROOT / tables.PAGE).read_text()
    assert all(filled(page, "tables.py", what, "new").count("\nnew\n") == 1 for what in ("machine", "times"))


def test_tables_begin_with_their_command_and_the_page_of_benchmarks_leads_to_all_of_them():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "bench/tables.py writes" not in page and len(page.splitlines()) <= 200
    for path in (ROOT / "bench" / "results").glob("*.md"):
        assert f"(../bench/results/{path.name})" in page
        title, command, _ = path.read_text().split("```", 2)
        assert title.startswith("# ") and title.count("\n") == 2 and command.startswith("bash\n"), path
        scripts = [word for word in command.split() if word.startswith("bench/")]
        assert all((ROOT / script).exists() for script in scripts), path


def test_what_the_pages_show_is_measured_by_their_commands_unless_it_was(tmp_path, monkeypatch):
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **options: ran.append(words[1:]))
    file, commands = str(tmp_path / "bench.json"), tables.commands()
    assert len(commands) == len(set(commands)) and len(commands) > 15
    tables.measure(file)
    assert [command(words) for words in ran] == commands
    for words in ran:
        assert words[-2:] == ["--save", file] and "save(options.save" in (ROOT / words[0]).read_text(), words
    ran.clear()
    monkeypatch.setattr("sys.argv", shlex.split(commands[0])[1:])
    save(file, "A, 2 ranks", "times", {})
    tables.measure(file)
    assert len(ran) == len(commands) - 1


def test_a_command_is_shown_as_one_types_it():
    assert command(["/x/bench/peak_memory.py", "--systems", "DDP + compile", "--save", "f"]) == (
        "python bench/peak_memory.py --systems 'DDP + compile'"
    )
    assert json.loads(json.dumps(command(FILE))) == "python bench/step_time.py --model A"
