"""``graphzero doctor`` says what holds of a machine, and sees a link that alters what it carries."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _ranks import start_as_torchrun

from graphzero.cli import main
from graphzero.plan.device import Device
from graphzero.plugins.doctor import checks, command
from graphzero.runtime.transport import peer_memory
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.link_costs import Link


def output_of(*arguments: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["doctor", *arguments])
    return status, out.getvalue()


def test_virtual_ranks_are_compared_with_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "SHARED_MEMORY", tmp_path / "none")
    status, text = output_of("--axes", "dp=2,tp=2")
    assert status == 0
    assert text.count("equal to one rank") == 4 and "all 4 hold" in text and "nothing travelled" in text
    assert "/dev/shm    missing; workers of a DataLoader and NCCL" in text


def test_a_collective_that_alters_numbers_fails_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin = VirtualWorld.begin_transfer

    def altered(self, kind, received, sent, *more):
        handle = begin(self, kind, received, sent, *more)
        if kind == "reduce_scatter":
            received[1][0] += 1
        return handle

    monkeypatch.setattr(VirtualWorld, "begin_transfer", altered)
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


def run_in_order(rank: int, folder: Path) -> None:
    (folder / f"in_order_{rank}").write_text(json.dumps(output_of("--json", "--device", str(folder / "none"))))


def run_in_disorder(rank: int, folder: Path) -> None:
    """Rank 1 has another torch, may not read other processes, receives other numbers and is slow, as are links."""
    file = folder / f"device_{rank}.json"
    file.write_text(json.dumps(replace(Device.named("h100"), links={"dp": Link(1e-6, 1e15)}).to_json()))
    begin, work = ProcessWorld.begin, checks.do_work

    def altered(self, kind, received, sent, *more):
        handle = begin(self, kind, received, sent, *more)
        handle.wait()
        if kind == "all_to_all":
            received[0][7] += 1
        return handle

    if rank == 1:
        ProcessWorld.begin = altered
        torch.__version__ = "2.9.0"
        checks.do_work = lambda device: (time.sleep(0.03), work(device))
        peer_memory._system_call = lambda: lambda *args: (ctypes.set_errno(errno.EPERM), -1)[1]
    (folder / f"in_disorder_{rank}").write_text(json.dumps(output_of("--device", str(file))))


def run_without_interface(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    with contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["doctor"])
        again = main(["doctor"])  # with the other rank, which may still be at its first try
    (folder / f"without_interface_{rank}").write_text(json.dumps([max(status, again), err.getvalue()]))


def results_of(work: Callable[[int, Path], None], ranks: int, folder: Path) -> list[tuple[int, str]]:
    """Status and output of each rank."""
    start_as_torchrun(work, (folder,), ranks)
    name = work.__name__.removeprefix("run_")
    return [tuple(json.loads((folder / f"{name}_{rank}").read_text())) for rank in range(ranks)]


def test_two_ranks_are_compared_with_virtual_ones_and_say_how_they_talk(tmp_path: Path) -> None:
    (status, text), other = results_of(run_in_order, 2, tmp_path)
    findings = json.loads(text)
    assert status == 0
    versions, *compared = findings["checks"]
    assert versions == {"about": "versions", "holds": True, "facts": "equal on 2 ranks"}
    assert len(compared) == 9 and all(one["holds"] for one in compared)
    assert {one["facts"].split(";")[0] for one in compared} == {"equal to virtual ranks, to the bit"}
    assert findings["transports"]["dp"] and findings["links"]["dp"]["bandwidth"] > 0 and findings["pace"]
    assert other == (0, "")  # one rank prints


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    for status, text in results_of(run_without_interface, 2, tmp_path):
        assert status == 2 and text.startswith("graphzero: PlacementError: gloo cannot connect this rank, on host ")
        assert "Unable to find address for: eth9" in text and re.search(r"it is eth9, and this host has .*\blo\b", text)
        assert re.search(r"first try .* failed: .*eth9\n .*restart all processes", text)


WRONG = [
    r"along dp +ranks 0, 1 send through gloo \(rank 1: \[Errno 1\] process \d+ cannot be read: .*\(ptrace is forbidden",
    r"FAIL  versions +rank 1 has torch 2\.9\.0, rank 0 \d",
    r"FAIL  all_to_all along dp +rank 1: what arrives: differs from virtual ranks by",
    r"FAIL  step at ZeRO stage 0 +rank 0: the ranks do not agree on the tensors of this call: .*rank 1",
    r"FAIL  speed along dp +[\d.]+ GB/s, \d+ us; calibrated were 1000000\.00 GB/s, 1 us: look for other work",
    r"pace +rank 1 is \d+ ms or more behind the others",
]


def test_all_that_is_wrong_with_ranks_and_links_is_said(tmp_path: Path) -> None:
    (status, text), (other, _) = results_of(run_in_disorder, 2, tmp_path)
    unsaid = [line for line in WRONG if not any(re.match(line, one) for one in text.splitlines())]
    assert (status, other) == (1, 1) and not unsaid, f"{unsaid}\n{text}"
    assert "4 of 11 checks do not hold" in text, text
