"""The page of the idea in 500 lines is made from the program, and from what the program prints."""

import importlib.util

import pytest
import torch
from doc_blocks import ROOT, printed_by

spec = importlib.util.spec_from_file_location("core_page", ROOT / "docs" / "core_page.py")
assert spec is not None and spec.loader is not None
core_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core_page)


def test_the_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    is_forked = not torch.cuda.is_available()  # where there are GPUs, what has run a backward cannot be forked
    page = core_page.page(printed_by(core_page.SOURCE) if is_forked else core_page.printed())
    if request.config.getoption("--accept", default=False):
        core_page.PAGE.write_text(page, encoding="utf-8")
    assert core_page.PAGE.read_text(encoding="utf-8") == page, "run `python docs/core_page.py`"


def test_the_program_has_at_most_500_lines_and_needs_torch_alone() -> None:
    lines = core_page.SOURCE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    imports = [line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))]
    assert not {"graphzero", "numpy"} & set(imports) and "torch" in imports


def test_output_without_a_part_of_its_name_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no part is called Elsewhere"):
        core_page.page("# Elsewhere\ntext\n")
