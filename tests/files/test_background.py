"""A thread that writes while steps are taken: what it takes of a core, and when it hurries."""

import threading
import time

import pytest

from graphzero.checkpoint.files import async_save
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.files.markers import Notes


class Thread:
    """A clock of the processor, and what a thread waits for."""

    def __init__(self, saved):
        self.saved, self.taken, self.rested = saved, 0.0, 0.0

    def wait(self, seconds):
        self.rested += seconds

    def writes(self, seconds, notes):
        self.taken += seconds
        self.saved.rest(notes)


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path, 0, 1)


@pytest.fixture
def thread(monkeypatch, tmp_path):
    made = Thread(Saved(tmp_path / "done", 1, 1000))
    monkeypatch.setattr(async_save.time, "thread_time", lambda: made.taken)
    monkeypatch.setattr(made.saved._hurry, "wait", made.wait)
    return made


def test_it_takes_a_sixteenth_of_a_core(thread, notes):
    for seconds in (0.004, 0.5, 0.0, 0.02):
        thread.writes(seconds, notes)
        assert thread.rested == pytest.approx(15 * thread.taken)
    assert not notes.is_hurried()


def test_it_hurries_when_somebody_waits_and_tells_the_other_ranks(thread, notes, tmp_path):
    thread.saved._over.set()
    thread.saved.join()
    thread.writes(0.5, notes)
    assert thread.rested == 0 and notes.is_hurried()
    other = Saved(tmp_path / "done", 1, 1000)
    other.rest(notes)  # all that this thread has taken so far, and no pause: it would be minutes


def test_one_that_rests_wakes_up_when_somebody_waits(notes, tmp_path):
    began, resting = time.perf_counter(), threading.Event()
    saved = Saved(tmp_path / "done", 1, 1000)

    def write():
        saved._taken = time.thread_time() - 100  # 1500 seconds of rest
        resting.set()
        saved.rest(notes)

    saved.start(write)
    assert resting.wait(20)
    saved.wait()
    assert saved.is_done and time.perf_counter() - began < 60


def test_one_that_rests_wakes_up_when_another_rank_hurries(notes, tmp_path):
    saved = Saved(tmp_path / "done", 1, 1000)
    notes.hurry()
    saved._taken = time.thread_time() - 100
    saved.rest(notes)
    assert not saved._hurry.is_set()
