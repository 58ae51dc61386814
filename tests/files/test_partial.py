"""Checkpoints that are being written: by several jobs, on hosts that see no locks of others, interrupted anywhere."""

import fcntl
import os
import shutil
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent)]
from file_toys import virtual  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero.checkpoint.files import folder, partial_checkpoint  # noqa: E402
from graphzero.checkpoint.files.partial_checkpoint import PartialCheckpoint  # noqa: E402


class Evaluate(gz.Graph):
    def __init__(self):
        super().__init__(virtual(1))
        self.model = torch.nn.Linear(3, 4)

    def build(self, x):
        return self.model(x)


def begun(path, step=1):
    made = PartialCheckpoint()
    where = folder.begin(made, path, step)
    (where / "index.json").write_text(str(os.getpid()))
    return made


@contextmanager
def other_host():
    """What is done within it is done on another host, which does not see the locks of this one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partial_checkpoint, "_host", lambda: "00000000")
        patched.setattr(fcntl, "flock", lambda *_: None)
        yield


def save_often(path, count):
    """In a process of its own; tells by its exit status whether each of them was there when it was finished."""
    status = 1
    try:
        for step in range(count):
            assert (begun(path, step % 3).finish() / "index.json").read_text() == str(os.getpid())
        status = 0
    finally:
        os._exit(status)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_jobs_that_save_to_one_folder_at_once_all_succeed_with_numbers_of_their_own(tmp_path):
    jobs, count = 4, 40
    children = []
    for _ in range(jobs):
        child = os.fork()
        if not child:
            save_often(tmp_path, count)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * jobs
    numbers = [int(made.name.partition(".")[0]) for made in folder.complete_checkpoints(tmp_path)]
    assert len(numbers) == len(set(numbers)) == jobs * count == len([*tmp_path.iterdir()])


def test_a_folder_that_a_job_has_locked_is_no_remains_while_it_is_empty(tmp_path, monkeypatch):
    """Of the moments between those in which a job makes the folder, its lock, and the folder of its files."""
    job = begun(tmp_path)
    numbered = job.path.parent
    (inner,) = (child for child in numbered.iterdir() if child.is_dir())
    with monkeypatch.context() as patched:  # looked at before the lock was made
        patched.setattr(os, "listdir", lambda _: [])
        partial_checkpoint.remove_abandoned(numbered)
    assert inner.is_dir() and (numbered / "lock").exists()
    (inner / "index.json").unlink()
    inner.rmdir()  # looked at before the folder of its files was made
    partial_checkpoint.remove_abandoned(numbered)
    assert (numbered / "lock").exists()


def test_a_job_on_a_host_that_sees_no_locks_leaves_others_alone(tmp_path):
    first = begun(tmp_path)
    with other_host():
        second = begun(tmp_path)
    assert [one.finish().name for one in (first, second)] == ["000001.step-1", "000002.step-1"]
    assert len([*tmp_path.iterdir()]) == 2


def test_what_another_host_left_is_removed_when_it_has_not_changed_for_long(tmp_path, monkeypatch):
    with other_host():
        abandoned = begun(tmp_path)
    now = [0.0]
    monkeypatch.setattr(partial_checkpoint.time, "monotonic", lambda: now[0])
    for size, is_there in ((1, True), (2, True), (2, True), (2, False)):
        (abandoned.path / "rank-00000.safetensors").write_bytes(b"x" * size)
        now[0] += 0.6 * partial_checkpoint.ABANDONED
        begun(tmp_path).discard()
        assert abandoned.path.exists() == is_there
    with pytest.raises(FileNotFoundError):
        abandoned.finish()
    assert not [*tmp_path.iterdir()]


def test_files_of_two_jobs_never_meet_even_where_one_has_been_taken_for_remains(tmp_path):
    first = begun(tmp_path)
    shutil.rmtree(first.path.parent)
    with other_host():
        second = begun(tmp_path)
    assert second.path.parent == first.path.parent and second.path != first.path
    with pytest.raises(FileNotFoundError):
        first.finish()
    first.discard()
    assert second.finish().name == "000001.step-1" and len([*tmp_path.iterdir()]) == 1


def test_keep_counts_checkpoints_of_other_jobs_and_never_removes_what_was_just_saved(tmp_path):
    slow, graph = begun(tmp_path), Evaluate()
    later = gz.save(graph, tmp_path).path
    done = slow.finish()
    folder.keep_last(done, 1)
    assert sorted(tmp_path.iterdir()) == [done, later]
    assert gz.save(graph, tmp_path, keep=1).path == gz.latest(tmp_path)
    assert len([*tmp_path.iterdir()]) == 1


def interrupted_at(line, call):
    """``call`` with Ctrl-C as so many lines of the modules that make and name folders are over; whether it came."""
    files = {folder.__file__, partial_checkpoint.__file__, sys.modules["graphzero.checkpoint.save_operation"].__file__}
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool traces")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_anywhere_leaves_a_whole_checkpoint_or_none_and_no_open_file(tmp_path, asynchronous):
    graph = Evaluate()
    gz.save(graph, tmp_path / "first")
    opened, line, whole = len(os.listdir("/proc/self/fd")), 0, 0
    while True:
        line += 1
        path = tmp_path / str(line)
        if not interrupted_at(line, lambda path=path: gz.save(graph, path, asynchronous=asynchronous).wait()):
            break
        for thread in threading.enumerate():
            if thread.name.startswith("saving"):
                thread.join()
        left = [*path.iterdir()] if path.exists() else []
        assert left == folder.complete_checkpoints(path), f"line {line}"
        whole += len(left)
        assert len(os.listdir("/proc/self/fd")) == opened, f"line {line}"
    assert line > 30 and whole < line / 2
