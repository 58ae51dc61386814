"""Pages of results begin with the command that makes them, and the page of benchmarks leads to all of them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tables_begin_with_their_command_and_the_page_of_benchmarks_leads_to_all_of_them():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(page.splitlines()) <= 200
    for path in (ROOT / "bench" / "results").glob("*.md"):
        assert f"(../bench/results/{path.name})" in page
        title, command, _ = path.read_text().split("```", 2)
        assert title.startswith("# ") and title.count("\n") == 2 and command.startswith("bash\n"), path
        scripts = [word for word in command.split() if word.startswith("bench/")]
        assert all((ROOT / script).exists() for script in scripts), path
