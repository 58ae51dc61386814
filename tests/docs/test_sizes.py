"""docs/design.md says how large the packages are, to the nearest hundreds of lines."""

import importlib.util

import pytest
from doc_blocks import ROOT

spec = importlib.util.spec_from_file_location("sizes", ROOT / "docs" / "sizes.py")
assert spec is not None and spec.loader is not None
sizes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sizes)

NEAR = 250  # lines, or a tenth


def test_the_table_of_sizes_is_near_to_the_truth(request: pytest.FixtureRequest) -> None:
    page = sizes.PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--accept", default=False):
        page = sizes.TABLE.sub(sizes.text(), page)
        sizes.PAGE.write_text(page, encoding="utf-8")
    now, on_page = sizes.shown(f"<!-- lines -->\n{sizes.text()}<!-- end of lines -->"), sizes.shown(page)
    assert now.keys() == on_page.keys(), "run `python docs/sizes.py`"
    far = [name for name, count in now.items() if abs(on_page[name] - count) > max(NEAR, count / 10)]
    assert not far, "run `python docs/sizes.py`"
