"""The notebook runs on virtual ranks alone and is stored with its present outputs; ``--accept`` stores them again."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: pip install -e '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e '.[dev]'")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "virtual_ranks.ipynb"


def printed(notebook) -> list[str]:
    """What each cell of code printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text", f"({output.output_type})") for output in cell.outputs) for cell in cells]


@pytest.mark.slow
def test_the_stored_outputs_are_those_of_a_run(request, tmp_path):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    before = printed(stored)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(stored, timeout=200, coalesce_streams=True, resources=where).execute()
    if request.config.getoption("--accept", default=False):
        for cell in stored.cells:
            cell.metadata.clear()  # times of the run
        nbformat.write(stored, NOTEBOOK)
        before = printed(stored)
    assert printed(stored) == before, "refresh it by `pytest tests/examples/test_notebook.py --accept`"
    assert sum(map(bool, before)) >= 5


def test_it_names_no_rank_but_virtual_ones_and_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    source = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert source.count("gz.placement(") == source.count("virtual=True)") == 2
    assert "cuda" not in source and "/home" not in text and "/tmp" not in text and "Warning" not in text
