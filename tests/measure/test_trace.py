"""A traced step: what its events say, that it is a step like any other, and the file that Perfetto reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.cli import main
from graphzero.ir.transfer import awaited, transfer_of
from graphzero.plan.timeline import COMPUTE, Event, Timeline
from graphzero.plugins.profiler.compare import EXPOSED, HOST, exact, shares
from graphzero.plugins.profiler.data import RankTrace
from graphzero.plugins.profiler.recorder import DeviceClock
from graphzero.plugins.profiler.tracing import offsets_of
from graphzero.runtime.world.world import Sent

sys.path.insert(0, str(Path(__file__).parent))
from trace_form import problems  # noqa: E402
from traced_steps import clipped_graph  # noqa: E402

STEPS = str(Path(__file__).parent / "traced_steps.py")


def virtual(ranks: int) -> gz.Placement:
    return gz.placement("cpu", range(ranks), virtual=True)


@pytest.fixture(scope="module")
def found() -> gz.Trace:
    return gz.trace(clipped_graph(virtual(2), 3), torch.randn(8, 64), steps=3)


def test_every_line_of_the_program_is_an_event_of_every_rank_within_the_call(found: gz.Trace) -> None:
    nodes = list(found.program.nodes)
    transfers = [node for node in nodes if transfer_of(node) is not None]
    for rank in found.ranks:
        compute = [event for event in rank.events if event.stream == COMPUTE]
        assert {"forward", "backward", "update"} <= {event.phase for event in compute}
        assert {"addmm", "launch", "await", "pack", "unpack"} <= {event.kind for event in compute}
        for one, other in zip(compute, compute[1:], strict=False):
            assert one.begin <= one.end <= other.begin  # one after the other
        assert rank.begin <= rank.program[0] <= compute[0].begin and compute[-1].end <= rank.program[1] <= rank.end
        sent = [event for event in rank.events if event.stream == "communication dp"]
        assert [event.name for event in sent] == [node.name for node in transfers]
    assert {rank.rank for rank in found.ranks} == {0, 1}


def test_a_collective_lasts_from_its_launch_to_its_await_and_has_the_bytes_that_were_sent(found: gz.Trace) -> None:
    launches = {node.args[0].name: node.name for node in found.program.nodes if awaited(node) is not None}
    assert launches
    for rank in found.ranks:
        by_name = {(event.name, event.kind): event for event in rank.events}
        for event in rank.events:
            if event.stream == "communication dp" and event.name in launches:
                assert event.begin == by_name[event.name, "launch"].begin
                awaits = by_name[launches[event.name], "await"]
                assert event.end == awaits.end
        sent = [event.nbytes for event in rank.events if event.stream == "communication dp"]
        assert sorted(sent) == sorted(one.bytes for one in found.plan.collectives)


def test_virtual_ranks_take_turns(found: gz.Trace) -> None:
    first, second = (
        [e for e in rank.events if e.stream == COMPUTE and e.kind not in ("launch", "await", "write back")]
        for rank in found.ranks
    )
    assert not any(a.begin < b.end and b.begin < a.end for a in first for b in second)
    assert found.is_virtual and "other virtual ranks" in str(found)


def test_what_must_be_as_planned_is(found: gz.Trace) -> None:
    assert found.broken() == [] and found.peak == found.plan.memory.peak
    assert "as planned: " in str(found) and "not traced" in str(found)


def test_each_micro_batch_has_its_events() -> None:
    found = gz.trace(clipped_graph(virtual(1), 0, parts=3), torch.randn(6, 64), steps=1)
    forward = [event.name for event in found.first.events if event.kind == "addmm"]
    assert len(forward) == 6  # of two layers
    assert max(map(forward.count, forward)) == 2  # what is repeated stands in the program once


def test_traced_calls_are_steps_like_any_other() -> None:
    plain, traced = clipped_graph(virtual(2), 2), clipped_graph(virtual(2), 2)
    x = torch.randn(8, 64)
    gz.trace(traced, x, steps=1)
    for _ in range(6):  # three to warm up, one traced, one not, one for the memory
        plain(x)
    for one, other in zip(plain.model.parameters(), traced.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain(x), traced(x))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_peaks_of_virtual_ranks_are_as_planned_to_the_byte(stage: int) -> None:
    graph, x = clipped_graph(virtual(5), stage), torch.randn(10, 64)
    graph(x)
    graph(x)
    assert gz.testing.measure_step(graph, x).peak == graph.plan.memory.peak


def test_the_file_is_as_the_trace_event_format_asks(found: gz.Trace, tmp_path: Path) -> None:
    path = found.write(tmp_path / "trace.json")
    assert problems(path.read_text()) == []
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert {"rank 0", "rank 1", "call", "compute", "communication dp"} <= names
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == 2 * sum(awaited(node) is not None for node in found.program.nodes) > 0
    slices = [event for event in events if event["ph"] == "X" and event["name"] == "all_gather"]
    assert slices and all(event["args"]["bytes sent"] > 0 for event in slices)


def broken_file(events: list[dict[str, Any]]) -> list[str]:
    return problems(json.dumps({"traceEvents": events}))


def test_the_check_of_the_format_sees_what_it_is_to_find() -> None:
    def names(tid: int) -> list[dict[str, Any]]:
        process = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "p"}}
        return [process, {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": "t"}}]

    def at(ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": "a", "cat": "c", "ts": ts, "dur": dur, "pid": 0, "tid": 0, "args": {}}

    assert broken_file([*names(0), at(0, 4), at(1, 2), at(4, 1)]) == []
    assert "overlaps" in broken_file([*names(0), at(0, 4), at(2, 3)])[0]
    assert broken_file([*names(0), at(0, 4) | {"dur": -1}])[0].endswith("time below 0")
    assert "named 0 times" in broken_file([*names(1), at(0, 4)])[0]
    arrow = {"ph": "s", "name": "a", "cat": "c", "ts": 9, "pid": 0, "tid": 0, "id": 1}
    assert len(broken_file([*names(0), at(0, 4), arrow])) == 2  # no end, no slice
    end = arrow | {"ph": "f", "bp": "e", "ts": 3}
    assert broken_file([*names(0), at(0, 4), arrow | {"ts": 2}, end]) == []
    texts = [one | {"id": "0.1"} for one in (arrow | {"ts": 2}, end)]  # Perfetto reads it as a number, or not at all
    assert [line.rpartition(": ")[2] for line in broken_file([*names(0), at(0, 4), *texts])] == ["id", "id"]
    assert len(broken_file([*names(0), at(0, 4), arrow | {"ts": 2}, end | {"name": "b"}])) == 2  # one arrow each


def test_collectives_under_way_at_once_stand_on_threads_of_their_own(found: gz.Trace) -> None:
    rank = found.first
    events = (Event("a", "communication dp", "all_gather", "forward", 0.0, 3.0, 8.0, 0.0),
              Event("b", "communication dp", "all_gather", "forward", 1.0, 2.0, 8.0, 0.0),
              Event("c", "communication dp", "all_gather", "forward", 2.5, 4.0, 8.0, 0.0))  # fmt: skip
    made = type(rank)(0, 0.0, 5.0, (0.0, 5.0), events)
    document = type(found)(**{**vars(found), "ranks": (made,)}).to_chrome()
    assert problems(json.dumps(document)) == []
    threads = {event["tid"] for event in document["traceEvents"] if event["ph"] == "X" and event["name"] != "call"}
    assert len(threads) == 2


def test_data_of_a_timeline_begins_at_the_call(found: gz.Trace) -> None:
    held = found.to_timeline()["measured"]
    assert set(held[0]) == {"name", "stream", "kind", "phase", "begin", "end"}
    assert 0 <= min(event["begin"] for event in held) < max(event["end"] for event in held) <= found.first.seconds


# ---- clocks


def test_clocks_are_compared_at_barriers_and_one_late_rank_does_not_count() -> None:
    left = [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.1, 13.0, 14.0, 15.0]]
    found = offsets_of(left)
    assert found.ahead == (0.0, 10.0) and found.error == 0.0
    assert offsets_of([[1.0, 2.0, 3.0], [1.1, 2.2, 3.3]]).error == pytest.approx(0.1)


def test_a_devices_clock_tells_the_seconds_of_its_queue() -> None:
    """With a stand-in for torch.cuda, whose events come a millisecond after each other."""

    class Module:
        count = 0

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                Module.count += 1
                self.at = float(Module.count)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        @staticmethod
        def synchronize(device: torch.device) -> None: ...

    clock = DeviceClock(torch.device("cuda", 0), Module)
    first, second = clock.seconds([clock.read_time(), clock.read_time()])
    assert second - first == pytest.approx(1e-3)


# ---- planned beside measured


def test_another_number_of_calls_bytes_or_peak_is_a_difference(found: gz.Trace) -> None:
    plan, sent = found.plan, list(found.sent)
    assert exact(plan, sent, plan.memory.peak) == []
    (less, fewer) = exact(plan, sent[1:], plan.memory.peak)
    assert less.unit == "calls" and less.measured == less.planned - 1 and fewer.unit == "bytes"
    (other,) = exact(plan, [*sent, Sent("all_to_all", "tp", 0.0)], None)
    assert other.what == "all_to_all tp: calls" and (other.planned, other.measured) == (0, 1)
    (peak,) = exact(plan, sent, plan.memory.peak + 1)
    assert peak.what.startswith("peak of memory")


def op(name: str, kind: str, begin: float, end: float, stream: str = COMPUTE) -> Event:
    return Event(name, stream, kind, "forward", begin, end, 0.0, 0.0)


def test_ops_whose_part_of_the_program_is_another_are_listed_the_largest_difference_first() -> None:
    planned = Timeline((op("a", "mm", 0, 4), op("b", "add", 4, 5), op("c", "relu", 5, 6)), 10.0, 6.0, 2.0, 3.0, 1.0)
    events = (
        op("a", "addmm", 0, 5.2), op("b", "add", 5.2, 5.5), op("l", "launch", 5.5, 6), op("c", "relu", 6, 7),
        op("w", "await", 7, 9.5), op("w", "unpack", 9.5, 10), op("l", "all_gather", 5.5, 9.5, "communication dp"),
    )  # fmt: skip
    measured = RankTrace(0, -6.0, 14.0, (0.0, 12.0), events)  # 8 around the program, 2 of another rank
    assert (measured.around, measured.own) == (pytest.approx(8.0), pytest.approx(18.0))
    rows = {row.what: (row.planned, pytest.approx(row.measured)) for row in shares(planned, measured, 0.1)}
    assert rows == {HOST: (1.0, 8.0), EXPOSED: (3.0, 3.0), "forward mm": (4, 5.2)}
    assert list(rows) == [HOST, EXPOSED, "forward mm"]
    all_rows = {row.what: row for row in shares(planned, measured, -1.0)}
    assert set(all_rows) == {*rows, "forward add", "forward relu", "forward copy_"}
    assert sum(row.part for row in all_rows.values()) == pytest.approx(0.0)


def test_a_plan_in_seconds_stands_beside_what_was_measured(tmp_path: Path) -> None:
    found = gz.trace(clipped_graph(virtual(2), 2), torch.randn(8, 64), steps=1, device="h100")
    assert found.planned is not None and found.differences() and "planned for h100" in str(found)
    text = found.write(tmp_path / "t.json").read_text()
    assert problems(text) == []
    events = json.loads(text)["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == names["planned for rank 0 (h100)"]]
    assert len(slices) == len(found.planned.events)
    timeline = found.to_timeline()
    assert set(timeline) == {"planned", "measured"} and timeline["planned"][0].keys() == timeline["measured"][0].keys()


# ---- the command


def test_the_command_writes_a_trace_and_says_where_the_seconds_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, timeline = tmp_path / "t.json", tmp_path / "timeline.json"
    arguments = ["--ranks", "2", "--stage", "2", "--steps", "1", "--output", str(path), "--timeline", str(timeline)]
    assert main(["trace", f"{STEPS}:make", *arguments]) == 0
    assert {event["phase"] for event in json.loads(timeline.read_text())["measured"]} >= {"forward", "update"}
    said = capsys.readouterr().out
    assert "a step of Train on 2 ranks" in said and "as planned: " in said and str(path) in said
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere.py:make"], "no file 'nowhere.py'"),
        ([f"{STEPS}:make", "--stage", "7"], "unknown stage '7'"),
        ([f"{STEPS}:make", "--stage", "1,2"], "one stage"),
        ([f"{STEPS}:make", "--steps", "0"], "at least 1"),
        ([f"{STEPS}:make", "--threshold", "-1"], "--threshold"),
        ([f"{STEPS}:make", "--steps", "1", "--output", "/nowhere/t.json"], "no folder /nowhere"),
        ([f"{STEPS}:make", "--device", "abacus"], "no device 'abacus'"),
    ],
)
def test_a_wrong_command_says_what_to_write(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_step_that_is_not_as_planned_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphzero.plugins.profiler.compare.peak_of", lambda *call: (1, ""))
    assert main(["trace", f"{STEPS}:make", "--steps", "1", "--output", str(tmp_path / "t.json")]) == 1
    assert "NOT as planned" in capsys.readouterr().out


def test_a_step_whose_program_changes_while_it_is_traced_is_refused() -> None:
    class Changing(TrainGraph):
        width = 0.0

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return super().build(x * self.width)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.width += 1.0
            return super().__call__(x)

    with pytest.raises(gz.ConfigError, match="another program|has not run yet"):
        gz.trace(Changing(nn.Linear(64, 8), mean_square, placement=1), torch.randn(4, 64), steps=1)


def test_a_fake_world_is_refused() -> None:
    with gz.testing.fake_world(2), pytest.raises(gz.ConfigError, match="fake world"):
        gz.trace(clipped_graph(None, 0), torch.randn(4, 64))
