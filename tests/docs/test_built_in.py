"""The section of the built-in passes in docs/passes.md says what their docstrings say."""

import importlib.util

import pytest
from doc_blocks import ROOT

from graphzero.passes import NAMES

spec = importlib.util.spec_from_file_location("built_in", ROOT / "docs" / "built_in.py")
assert spec is not None and spec.loader is not None
built_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(built_in)


def test_the_section_is_up_to_date(request: pytest.FixtureRequest) -> None:
    page = built_in.PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--accept", default=False):
        page = built_in.refreshed(page)
        built_in.PAGE.write_text(page, encoding="utf-8")
    assert page == built_in.refreshed(page), "run `python docs/built_in.py`"


def test_every_pass_is_there_in_order() -> None:
    section = built_in.section()
    heads = [line.removeprefix("### ") for line in section.splitlines() if line.startswith("### ")]
    assert heads == list(NAMES)
    assert section.count("* Requires: ") == section.count("* Ensures: ") == section.count("```diff") == len(NAMES)


def test_a_stale_section_is_replaced_and_nothing_else() -> None:
    page = f"# Page\n\n{built_in.HEAD}\nold\n\n## After\n\ntext\n"
    assert built_in.refreshed(page) == f"# Page\n\n{built_in.section()}\n## After\n\ntext\n"
    assert built_in.refreshed(built_in.refreshed(page)) == built_in.refreshed(page)
