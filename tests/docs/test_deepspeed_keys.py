"""docs/from_deepspeed.md has the table of keys as it is."""

import importlib.util

import pytest
from doc_blocks import ROOT

spec = importlib.util.spec_from_file_location("deepspeed_keys", ROOT / "docs" / "deepspeed_keys.py")
assert spec is not None and spec.loader is not None
deepspeed_keys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(deepspeed_keys)


def test_the_table_of_keys_is_up_to_date(request: pytest.FixtureRequest) -> None:
    page = deepspeed_keys.PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--accept", default=False):
        page = deepspeed_keys.refreshed(page)
        deepspeed_keys.PAGE.write_text(page, encoding="utf-8")
    assert page == deepspeed_keys.refreshed(page), "run `python docs/deepspeed_keys.py`"
    assert "| `zero_optimization.stage` | honoured |" in page
