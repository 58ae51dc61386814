"""docs/reference.md says what the docstrings say, and every public name has one."""

import importlib.util

import pytest
from doc_blocks import ROOT

from graphzero.config import Settings
from graphzero.config.plugin_settings import plugin_settings
from graphzero.config.setting import settings_of

spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def test_the_reference_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--accept", default=False):
        reference.PAGE.write_text(reference.text(), encoding="utf-8")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.text(), "run `python docs/reference.py`"


def test_every_public_name_has_a_docstring() -> None:
    assert reference.undocumented() == []


def test_a_docstring_becomes_markdown() -> None:
    doc = """Runs ``f``.

    placement: the ranks,
        all of them.
    name: what it is called.

    ===== =====
    a     b
    ===== =====

    Raises:
        ConfigError: for another
            ``dtype``.
    """
    assert reference.markdown(doc) == (
        "Runs `f`.\n\n* placement: the ranks,\n  all of them.\n* name: what it is called.\n\n"
        "```text\n===== =====\na     b\n===== =====\n```\n\n"
        "Raises:\n\n* ConfigError: for another\n  `dtype`."
    )


def test_the_reference_has_every_setting_and_the_method_that_makes_it() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    section = page.split("### gz.GraphConfig\n")[1].split("\n### ")[0]
    for one in (*settings_of(Settings).values(), *plugin_settings().values()):
        if one.name == "plugins":
            continue  # each of which is there by its own name
        assert f"\n* `{one.name}`: " in section
        assert not one.method or f"\n* `{one.method}(" in section
