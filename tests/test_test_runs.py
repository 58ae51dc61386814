"""A run of the tests ends, whatever one of them does to its process."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import start
from order_of_files import LONGEST

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
import processes  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
WAITS_IN_C = """
import itertools

def test_that_hangs():
    max(itertools.repeat(1))  # holds the interpreter, and looks at no signal

def test_after_it():
    pass
"""
ENDS_WHILE_RANKS_WAIT = """
import os, threading, time
from pathlib import Path
from _ranks import start

def wait(rank, folder):
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)

def leave(folder):
    while len(list(folder.glob("*.pid"))) < 2:
        time.sleep(0.1)
    os._exit(1)

def test_that_ends_its_process():
    folder = Path(__file__).parent
    threading.Thread(target=leave, args=(folder,)).start()
    start(wait, (str(folder),), 2)

def test_after_it():
    pass
"""

CHECKS = """
import os, signal
import torch.distributed as dist

def check_first(): dist.barrier()

def check_that_one_rank_fails():
    assert dist.get_rank() == 0, "rank 1 is not rank 0"
    dist.barrier()

def check_between(): dist.barrier()

def check_that_ends_a_process():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def check_last(): dist.barrier()
"""


def run(text: str, folder: Path, *options: str) -> str:
    """What pytest prints, as this project sets it up, with the test in a process of its own."""
    (folder / "test_given.py").write_text(text)
    words = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(folder), "-n", "1", *options]
    words += ["-p", "no:cacheprovider", "-p", "no:graphzero", "-o", "filterwarnings="]  # whose classes load torch
    paths = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder / "test_given.py")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=200,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_test_that_hangs_in_c_is_ended_and_shows_where(tmp_path: Path) -> None:
    said = run(WAITS_IN_C, tmp_path, "-o", "timeout=1", "-o", "faulthandler_timeout=3")
    assert "Timeout (0:00:03)!" in said and "in test_that_hangs" in said


@pytest.mark.slow
def test_a_process_that_ends_in_a_test_takes_its_ranks_with_it(tmp_path: Path) -> None:
    run(ENDS_WHILE_RANKS_WAIT, tmp_path)
    ranks = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    until = time.monotonic() + 20
    while any(map(_is_there, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(ranks) == 2 and not any(map(_is_there, ranks))


@pytest.mark.slow
def test_each_check_of_a_set_of_processes_fails_for_its_own_reason(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "checks_that_fail.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    results = processes.run(("checks_that_fail",), 2, tmp_path)
    for name in ("first", "between", "last"):
        processes.assert_passed(results, name, 2)
    for name, text in (("that_one_rank_fails", "rank 1 is not rank 0"), ("that_ends_a_process", "signal SIGKILL")):
        with pytest.raises(AssertionError, match=rf"rank 1: [\s\S]*{text}"):
            processes.assert_passed(results, name, 2)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA cannot be forked after a backward")
def test_ranks_are_forked_from_a_process_that_has_taken_steps() -> None:
    """A module that it cannot import is left out without a word."""
    start(_look_for_first_steps, (), 1)


def _look_for_first_steps(rank: int) -> None:
    assert "tests.first_steps" in sys.modules


def _is_there(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_files_that_are_put_first_are_there() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONGEST) <= there, "tests/order_of_files.py names files that are not there"


def test_no_two_files_of_tests_are_modules_of_one_name():
    """Their folders all go onto the path, so the second one would be given the first."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
