"""The pages as a site, as ``make docs`` builds it: a warning ends it, and a broken link is one."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sphinx", "myst_parser", "furo"))),
    reason="the extra `docs` is not installed: pip install -e '.[docs]'",
)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    strict = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *strict, "--conf-dir", str(ROOT / "docs"), str(source), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    contents = (tmp_path / "docs" / "index.html").read_text(encoding="utf-8")
    for page in PAGES:
        if page.name != "index.md":
            assert (tmp_path / page.relative_to(ROOT).with_suffix(".html")).exists()
            assert f'{page.stem}.html"' in contents, f"docs/index.md has no link to {page.name}"
    assert "docs/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    pictures = re.findall(
        r'(?:src|srcset)="([^":]*\.(?:png|svg))', (tmp_path / "README.html").read_text(encoding="utf-8")
    )
    assert len(pictures) == 2 and all((tmp_path / picture).exists() for picture in pictures), pictures


@pytest.mark.slow
def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs" / "index.md").write_text("# Pages\n\n## First\n\n* [a](a.md)\n", encoding="utf-8")
    (source / "docs" / "a.md").write_text(
        "# A\n\n## Here\n\n[good](#here) [section](#nowhere) [page](b.md)\n", encoding="utf-8"
    )
    done = build(source, tmp_path / "site")
    assert done.returncode != 0
    assert re.findall(r"target not found: '(.+?)'|source document '.*/(\w+)'", done.stderr), done.stderr
    assert "nowhere" in done.stderr and "b.md" in done.stderr and "#here" not in done.stderr


def test_the_makefile_builds_it_as_these_tests_do() -> None:
    recipe = re.search(r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    assert "-m sphinx --builder html --fail-on-warning --keep-going --quiet --conf-dir docs . docs/site" in recipe[1]
