"""FILE:FACTORY: the ranks and stages that options name, and what is said of files that make no graph."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import graphzero as gz
from graphzero.cli.factory import add_arguments, make, placement_of, planned, stages_of

FILE = """
import torch
import graphzero as gz

class Twice(gz.Graph):
    def build(self, x):
        return x * 2

def good(placement, stage):
    return Twice(placement), torch.ones(4)

def elsewhere(placement, stage):
    return Twice(gz.placement("cpu", [0], virtual=True)), (torch.ones(4),)

def raises(placement, stage):
    width = {"small": 8}
    return width["large"]

def deep(placement, stage):
    return torch.ones(2).view(3)

def script(placement, stage):
    raise SystemExit("usage: train.py --data DIR")

def other(model):
    return None

def words(placement, stage):
    return "no graph"

def bare(placement, stage):
    return Twice(placement)

def named(placement, stage):
    return Twice(placement), {"x": torch.ones(4), "y": 2}, 3

def many(placement, stage):
    return Twice(placement), (torch.ones(4), 2)

def script_too(placement, stage):
    torch.distributed.destroy_process_group()
    return Twice(placement), torch.ones(4)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "steps.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def make(placement, stage)\n    pass\n")
    (tmp_path / "needy.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "inside.py").write_text("from .steps import good\n")
    (tmp_path / "empty.py").write_bytes(b"x = 1\0")
    (tmp_path / "notes.txt").write_text("make")
    return str(tmp_path / "steps.py")


TWO = gz.placement("cpu", range(2), virtual=True)
REAL = gz.placement("cpu", range(2))


def test_a_factory_gives_a_graph_and_its_arguments(file: str) -> None:
    four = gz.placement("cpu", range(4), virtual=True)
    graph, arguments = make(f"{file}:good", four, 0)
    assert graph.placement == four and len(arguments) == 1 and arguments[0].shape == (4,)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nowhere.py:make", ["there is no file", "nowhere.py", "train.py:make"]),
        ("make", ["FILE:FACTORY"]),
        ("notes.txt:make", ["not a Python file"]),
        ("steps.py:nothing", ["no callable 'nothing'", "it has good, elsewhere, raises"]),
        ("steps.py:other", ["placement and stage", "def other(placement, stage)"]),
        ("steps.py:raises", ["KeyError: 'large'", 'steps.py:17 in raises: return width["large"]']),
        ("steps.py:deep", ["RuntimeError", "steps.py:20 in deep"]),
        ("steps.py:script", ["SystemExit: usage: train.py", "if __name__ =="]),
        ("broken.py:make", ["SyntaxError", "broken.py:1: def make(placement, stage)"]),
        ("needy.py:make", ["nowhere_to_be_found", "needy.py:1"]),
        ("steps.py:words", ["returned str; return (graph, example_args)"]),
        ("steps.py:bare", ["a graph without arguments"]),
        ("steps.py:elsewhere", ["super().__init__(placement)"]),
        ("steps.py:named", ["returned a tuple of Twice, dict, int"]),
        ("steps.py:many", ["Twice.build cannot be called with", "too many positional", "they are Tensor, int"]),
        ("steps.py:", ["no callable is named"]),
        ("inside.py:make", ["relative import", "neighbours by name"]),
        ("empty.py:make", ["SyntaxError: source code"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(file: str, what: str, words: list[str]) -> None:
    with pytest.raises(gz.ConfigError) as error:
        make(str(Path(file).parent / what), TWO, 0) if ".py" in what or ".txt" in what else make(what, TWO, 0)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) <= 6


def test_a_factory_that_ends_the_process_group_is_told_of(file: str) -> None:
    with pytest.raises(gz.ConfigError, match="names 2 ranks"), planned("plan", f"{file}:script_too", REAL, 0):
        pass


def _ranks(*arguments: str) -> gz.sbp.Placement | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return placement_of(parser.parse_args(["steps.py:good", *arguments]), "cpu")


def test_ranks_are_named_by_their_number_their_axes_or_their_hierarchy() -> None:
    assert _ranks() is None
    assert _ranks("--ranks", "8") == gz.placement("cpu", range(8))
    assert _ranks("--axes", "dp=2, tp=2") == _ranks("--hierarchy", "2x2") == gz.placement("cpu", [[0, 1], [2, 3]])
    named = _ranks("--axes", "dp0=2,dp1=3", "--ranks", "6")
    assert named is not None and named.names == ("dp0", "dp1") and named.hierarchy == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ranks", "0"], "from 1 up"),
        (["--ranks", "100000000000"], "at most 1,048,576"),
        (["--axes", "dp=99999999999999999999"], "at most 1,048,576"),
        (["--axes", "dp4"], "dp=4,tp=2"),
        (["--axes", "dp=0"], "dp=4,tp=2"),
        (["--hierarchy", "8by8"], "8x8"),
        (["--hierarchy", "2x2x2"], "--axes"),
        (["--hierarchy", "2x2", "--ranks", "8"], "is 4 ranks, and --ranks says 8"),
        (["--hierarchy", "2x2", "--axes", "dp=4"], "one of them"),
    ],
)
def test_ranks_that_say_nothing_are_refused(arguments: list[str], word: str) -> None:
    with pytest.raises(gz.ConfigError, match=word):
        _ranks(*arguments)


def test_stages_are_a_list() -> None:
    assert stages_of("0,1,2,3") == (0, 1, 2, 3) and stages_of("3, 2,3") == (2, 3)
    with pytest.raises(gz.ConfigError, match="unknown stage '4'"):
        stages_of("0,4")
    with pytest.raises(gz.ConfigError, match="unknown stage ''"):
        stages_of("")


def test_a_file_that_trains_where_it_is_run_is_told_what_stands_under_main(tmp_path: Path) -> None:
    file = tmp_path / "trains.py"
    file.write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(2)).sum().item())\n")
    hint = r"(?s)put the training under `if __name__ == '__main__':`.*trains.py:2"
    with pytest.raises(gz.ConfigError, match=hint), planned("plan", f"{file}:make", TWO, 0):
        pass
