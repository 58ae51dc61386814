"""Two real processes: one trace of both, and who of them logs what."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import start_as_torchrun

import graphzero as gz
from graphzero.cli import main
from graphzero.logs import progress

sys.path.insert(0, str(Path(__file__).parent))
from trace_form import problems  # noqa: E402

STEPS = str(Path(__file__).parent / "traced_steps.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    progress.QUIET = 0.01
    gz.set_logs(file=f"{folder}/log.jsonl")
    code = main(["trace", f"{STEPS}:make", "--stage", "2", "--steps", "3", "--output", f"{folder}/t.json"])
    sys.stdout.flush()
    Path(f"{folder}/code-{rank}.txt").write_text(str(code))
    gz.set_logs(file=f"{folder}/log-{{rank}}.jsonl", steps=True, progress="off")
    from traced_steps import make

    graph, x = make(gz.placement("cpu", [1, 0]), 1)
    found = gz.trace(graph, x, steps=1)
    Path(f"{folder}/broken-{rank}.txt").write_text(
        str([found.broken(), [one.rank for one in found.ranks], found.is_virtual])
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    start_as_torchrun(_work, (str(made),), 2)
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_file_holds_both_ranks_and_the_first_alone_speaks(folder: Path) -> None:
    text = (folder / "t.json").read_text()
    assert problems(text) == []
    events = json.loads(text)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert "a step of Train on 2 ranks" in (folder / "out-0.txt").read_text()
    assert (folder / "out-1.txt").read_text() == ""
    assert [(folder / f"code-{rank}.txt").read_text() for rank in (0, 1)] == ["0", "0"]


def test_clocks_of_the_ranks_are_brought_together(folder: Path) -> None:
    """No rank is done awaiting a collective before the other one has launched it."""
    document = json.loads((folder / "t.json").read_text())
    assert 0 <= document["otherData"]["clocks of ranks differ by at most, seconds"] < 1
    of: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    threads = {
        (e["pid"], e["tid"]) for e in document["traceEvents"]
        if e["name"] == "thread_name" and e["args"]["name"].startswith("communication")
    }  # fmt: skip
    for e in document["traceEvents"]:
        if e["ph"] == "X" and (e["pid"], e["tid"]) in threads:
            of[e["pid"]].append((e["ts"], e["ts"] + e["dur"]))
    slack = 1e3 + 1e6 * document["otherData"]["clocks of ranks differ by at most, seconds"]  # microseconds
    assert of[0] and len(of[0]) == len(of[1])
    for (begin, end), (other_begin, other_end) in zip(sorted(of[0]), sorted(of[1]), strict=True):
        assert begin <= other_end + slack and other_begin <= end + slack


def test_every_rank_gets_the_trace_of_all(folder: Path) -> None:
    assert [(folder / f"broken-{rank}.txt").read_text() for rank in (0, 1)] == ["[[], [1, 0], False]"] * 2


def test_the_first_rank_alone_writes_the_log_and_says_what_it_compiles(folder: Path) -> None:
    assert {line["rank"] for line in lines(folder / "log.jsonl")} == {0}
    assert "compile_done" in {line["event"] for line in lines(folder / "log.jsonl")}
    assert "compiling Train" in (folder / "err-0.txt").read_text()
    assert "graphzero" not in (folder / "err-1.txt").read_text()


def test_each_rank_may_have_a_log_of_its_own(folder: Path) -> None:
    for rank in (0, 1):
        found = lines(folder / f"log-{rank}.jsonl")
        assert {line["rank"] for line in found} == {rank} and "step" in {line["event"] for line in found}
