"""The structured log and the lines of progress: what they say, when, on whom, and that they cost nothing when off."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.logs import progress, records
from graphzero.logs.progress import phase, working


def linear_graph(dtype: torch.dtype | None = None) -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    graph = TrainGraph(model, mean_square, torch.optim.AdamW(model.parameters()))
    if dtype is not None:
        graph.config.enable_amp(dtype=dtype, init_scale=2.0**10)
    return graph


@pytest.fixture(autouse=True)
def as_if_nothing_was_set() -> Iterator[None]:
    was = records.OPTIONS.progress
    gz.set_logs()
    yield
    gz.set_logs(progress=was)
    records.note_rank(0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only in ``sleep``, which shows the work when the thread would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.due, self.work = 0.0, float("inf"), None
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(progress, "ProgressThread", self.ticker)

    def ticker(self, work: progress.LongTask) -> Any:
        self.work, self.due = work, self.now + progress.QUIET
        over = SimpleNamespace(set=lambda: setattr(self, "due", float("inf")))
        return SimpleNamespace(start=lambda: None, is_alive=lambda: True, over=over, join=lambda: None)

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due <= end:
            self.now = self.due
            self.work.show()
            self.due += progress.EVERY[progress._on_terminal()]
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the log


def test_a_file_has_an_event_for_each_program_that_is_made_and_for_each_return_to_one(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    gz.set_logs(file=path)
    graph = linear_graph()
    for rows in (4, 4, 8, 4):
        graph(torch.randn(rows, 8))
    found = lines_of(path)
    assert [line["event"] for line in found] == [
        "compile_begun", "compile_done", "compile_begun", "compile_done", "program_reused",
    ]  # fmt: skip
    assert all(line["graph"] == "Train" and line["rank"] == 0 and line["level"] == "INFO" for line in found)
    assert found[2]["changed"] == ["input x"] and found[2]["inputs"] == {"x": "float32[8, 8] S(0)"}
    assert found[4]["changed"] == ["input x"] and found[4]["programs"] == 2
    phases, seconds = found[1]["phases"], found[1]["seconds"]
    assert {"capture", "propagate", "insert_boxing", "bucket", "plan"} <= set(phases)
    assert 0.5 * seconds < sum(phases.values()) <= seconds
    assert "capture" in found[3]["phases"]


def test_a_compile_that_fails_is_an_event_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    gz.set_logs(file=path)
    graph = linear_graph()
    graph.build = lambda x: x if x.sum() > 0 else -x  # type: ignore[method-assign]
    with pytest.raises(gz.CaptureError):
        graph(torch.randn(4, 8))
    last = lines_of(path)[-1]
    assert last["event"] == "compile_failed" and "CaptureError" in last["error"]


def test_records_of_the_logger_carry_the_event_and_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphzero"):
        linear_graph()(torch.randn(4, 8))
    (done,) = [record for record in caplog.records if getattr(record, "event", "") == "compile_done"]
    assert done.fields["graph"] == "Train" and "compiled in" in done.getMessage()  # type: ignore[attr-defined]


def test_steps_and_skipped_steps_are_events_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    gz.set_logs(file=path, steps=True)
    graph = linear_graph(torch.float16)
    graph(torch.randn(4, 8))
    graph(torch.full((4, 8), float("inf")))
    found = [line for line in lines_of(path) if line["event"].startswith("step")]
    assert [line["event"] for line in found] == ["step", "step_skipped", "step"]
    assert found[1]["step"] == 2 and found[1]["loss_scale"] == 2.0**9 and 0 < found[2]["seconds"] < 60
    gz.set_logs(file=path)
    graph(torch.randn(4, 8))
    assert [line["event"] for line in lines_of(path)][-1] == "step"  # that of before


def test_checkpoints_are_events(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    graph = linear_graph()
    graph(torch.randn(4, 8))
    gz.set_logs(file=path)
    saved = gz.save(graph, tmp_path / "run")
    gz.load(graph, tmp_path / "run")
    first, second = lines_of(path)
    assert first["event"] == "checkpoint_saved" and first["bytes"] == saved.nbytes and first["step"] == 1
    assert second["event"] == "checkpoint_loaded" and second["path"] == str(saved.path)


def test_rank_0_alone_writes_unless_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    with gz.testing.fake_world(4, rank=2):
        for name in ("one.jsonl", "of-{rank}.jsonl"):
            gz.set_logs(file=tmp_path / name)
            gz.Graph(name="G")
            records.event("something", "has happened", count=1)
    assert [path.name for path in tmp_path.iterdir() if path.stat().st_size] == ["of-2.jsonl"]
    assert lines_of(tmp_path / "of-2.jsonl")[0]["rank"] == 2


def test_a_file_that_cannot_be_written_is_refused_at_once_and_later_only_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(gz.ConfigError, match="cannot be written"):
        gz.set_logs(file=tmp_path / "file" / "log.jsonl")
    gz.set_logs(file=tmp_path / "log.jsonl")
    records.OPTIONS.close()
    records.OPTIONS.file = str(tmp_path / "file" / "log.jsonl")
    with pytest.warns(UserWarning, match="cannot be written, and ends here"):
        records.event("something", "has happened")
    records.event("something", "else")  # says nothing any more


def test_an_unknown_kind_of_progress_is_refused() -> None:
    with pytest.raises(gz.ConfigError, match="'auto', 'lines', 'off'"):
        gz.set_logs(progress="bar")


def test_the_environment_says_the_same(tmp_path: Path) -> None:
    code = (
        "from graphzero.logs import records; o = records.OPTIONS\n"
        "records.event('something', 'has happened'); print(o.steps, o.progress, o.rank)"
    )
    named = {"GRAPHZERO_LOG": str(tmp_path / "log.jsonl"), "GRAPHZERO_LOG_STEPS": "1", "GRAPHZERO_PROGRESS": "0"}
    parent = records.__file__.rsplit("/", 3)[0]
    run = subprocess.run(
        [sys.executable, "-c", code], env={**named, "PYTHONPATH": parent}, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["True", "off", "0"]
    assert lines_of(tmp_path / "log.jsonl")[0]["event"] == "something"


# ---- progress


def work(clock: Clock, parts: dict[str, float], speaks: bool | None = None) -> None:
    with working("compiling Large", speaks):
        for name, seconds in parts.items():
            with phase(name):
                clock.sleep(seconds)


def test_a_short_compile_says_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    linear_graph()(torch.randn(4, 8))
    work(clock, {"capture": 1.4, "propagate": 0.5})
    assert out.getvalue() == ""


def test_elsewhere_than_on_a_terminal_long_parts_have_a_line_each(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    work(clock, {"capture": 12.3, "pin": 0.0, "propagate": 8.1})
    assert out.getvalue().splitlines() == [
        "graphzero: compiling Large: capture (part 1), 2 s so far",
        "graphzero: compiling Large: capture (part 1), 7 s so far",
        "graphzero: compiling Large: capture (part 1), 12 s so far",
        "graphzero: compiling Large: capture took 12.3 s",
        "graphzero: compiling Large: propagate (part 3), 17 s so far",
        "graphzero: compiling Large: propagate took 8.1 s",
        "graphzero: compiling Large took 20.4 s: capture 12.3 s, propagate 8.1 s, pin 0.0 s",
    ]


def test_what_has_no_parts_says_how_long_it_takes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    with working("compiling a region"):
        clock.sleep(2.2)
    first, last = out.getvalue().splitlines()
    assert first == "graphzero: compiling a region: 2 s so far" and last == "graphzero: compiling a region took 2.2 s"


def test_on_a_terminal_one_line_is_updated(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := Terminal())
    before = set(threading.enumerate())
    work(clock, {"capture": 3.1})
    *updates, last = out.getvalue().split("\r")
    assert sum("capture (part 1)" in update for update in updates) > 2
    assert not any("\n" in update for update in updates)
    assert last.startswith("graphzero: compiling Large took 3.1 s") and last.endswith("\n")
    assert not {thread for thread in set(threading.enumerate()) - before if type(thread).__name__ == "TMonitor"}


def test_on_a_terminal_without_tqdm_there_are_plain_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := Terminal())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    work(clock, {"capture": 3.1})
    assert out.getvalue().splitlines() == [
        "graphzero: compiling Large: capture (part 1), 2 s so far",
        "graphzero: compiling Large: capture took 3.1 s",
        "graphzero: compiling Large took 3.1 s: capture 3.1 s",
    ]


@pytest.mark.parametrize("why", ["another rank", "set_logs", "logger"])
def test_who_is_not_to_speak_says_nothing(why: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    if why == "set_logs":
        gz.set_logs(progress="off")
    if why == "logger":
        monkeypatch.setattr(records.LOG, "level", logging.ERROR)
    work(clock, {"capture": 10.0}, speaks=False if why == "another rank" else None)
    assert out.getvalue() == ""


def test_the_passes_of_a_compile_are_shown_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the user's that is slow is named while it runs, and the thread that says so ends with the compile."""
    monkeypatch.setattr(progress, "QUIET", 0.05)
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    shown: list[str] = []

    def slow_pass(graph: gz.StepGraph) -> gz.StepGraph:
        began = time.perf_counter()
        while "slow_pass (part" not in out.getvalue() and time.perf_counter() - began < 30:
            time.sleep(0.01)
        shown.append(out.getvalue())
        return graph

    monkeypatch.setattr(progress, "EVERY", {True: 0.02, False: 0.02})
    graph = linear_graph()
    graph.config.add_pass(slow_pass, after="zero")
    graph(torch.randn(4, 8))
    assert "compiling Train: slow_pass (part" in shown[0]
    assert not [one for one in threading.enumerate() if isinstance(one, progress.ProgressThread)]


def test_the_seconds_of_a_part_are_without_those_within_it(clock: Clock) -> None:
    with working("planning") as found, phase("outer"):
        clock.sleep(0.25)
        with phase("inner"):
            clock.sleep(0.5)
    assert found.seconds == {"outer": 0.25, "inner": 0.5}
