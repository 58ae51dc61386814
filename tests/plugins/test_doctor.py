"""``graphzero doctor`` says what holds of a machine, and sees a link that alters what it carries."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from _ranks import start_as_torchrun

from graphzero.cli import main
from graphzero.plugins.doctor import checks
from graphzero.runtime.world.virtual import VirtualWorld


def output_of(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["doctor", *arguments])
    return status, out.getvalue()


def test_virtual_ranks_are_compared_with_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = output_of("--axes", "dp=2,tp=2")
    assert status == 0
    assert text.count("equal to one rank") == 4 and "all 4 hold" in text and "nothing travelled" in text


def test_a_collective_that_alters_numbers_fails_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin = VirtualWorld._begin

    def altered(self, kind, received, sent, *more):
        handle = begin(self, kind, received, sent, *more)
        if kind == "reduce_scatter":
            received[1][0] += 1
        return handle

    monkeypatch.setattr(VirtualWorld, "_begin", altered)
    status, text = output_of()
    assert status == 1
    assert "ok    step at ZeRO stage 0" in text and "FAIL  step at ZeRO stage 2" in text
    assert "3 of 4 checks do not hold" in text


def test_a_collective_that_no_plan_counts_fails_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    trace_step = checks.trace_step

    def twice(*args):
        sent = trace_step(*args)
        return [*sent, sent[0]]

    monkeypatch.setattr(checks, "trace_step", twice)
    status, text = output_of()
    assert status == 1 and "was sent 2 times, and planned 1 times" in text


def examine(rank: int, folder: Path) -> None:
    """On two ranks: as it is, then with a rank that receives something else."""
    from graphzero.runtime.world.process import ProcessWorld

    (folder / f"as_it_is_{rank}").write_text(json.dumps(output_of("--json", "--device", str(folder / "none"))))
    begin = ProcessWorld.begin

    def altered(self, kind, received, sent, *more):
        handle = begin(self, kind, received, sent, *more)
        handle.wait()
        if kind == "all_to_all" and rank == 1:
            received[0][7] += 1
        return handle

    ProcessWorld.begin = altered
    (folder / f"altered_{rank}").write_text(json.dumps(output_of("--device", str(folder / "none"))))


def test_two_ranks_are_compared_with_virtual_ones_and_say_how_they_talk(tmp_path: Path) -> None:
    start_as_torchrun(examine, (tmp_path,), 2)
    status, text = json.loads((tmp_path / "as_it_is_0").read_text())
    findings = json.loads(text)
    assert status == 0
    assert len(findings["checks"]) == 9 and all(one["holds"] for one in findings["checks"])
    assert {one["facts"].split(";")[0] for one in findings["checks"]} == {"equal to virtual ranks, to the bit"}
    assert findings["transports"]["dp"] and findings["links"]["dp"]["bandwidth"] > 0
    assert json.loads((tmp_path / "as_it_is_1").read_text()) == [0, ""]  # one rank prints
    status, text = json.loads((tmp_path / "altered_0").read_text())
    (failed,) = (line for line in text.splitlines() if line.startswith("FAIL"))
    assert status == 1 and "all_to_all along dp" in failed and "rank 1: what arrives: differs" in failed
    assert json.loads((tmp_path / "altered_1").read_text())[0] == 1
