"""graphzero plan: its numbers are those of a plan, its errors say what to write, its status is for scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import graphzero as gz
from graphzero.cli import factory, main
from graphzero.plan.device import Device
from graphzero.plugins.plan.command import peak_at, plan_at, size_of
from graphzero.plugins.plan.least_ranks import least_ranks

FILE = """
import torch
from torch import nn
import graphzero as gz

class Train(gz.Graph):
    def __init__(self, placement, stage):
        super().__init__(placement)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_zero(stage > 0, stage=stage or 2)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

def make(placement, stage):
    print("a word of the file's own")
    return Train(placement, stage), torch.zeros(2, 64)

def needs_values(placement, stage):
    graph = Train(placement, stage)
    graph.build = lambda x: x if x.sum() > 0 else -x
    return graph, torch.zeros(2, 64)

def raises(placement, stage):
    raise ValueError("a width of 3 heads")

def nothing(placement, stage):
    pass

def at_stage_0(placement, stage):
    return make(placement, 0)

def ends_its_process(placement, stage):
    import os
    os._exit(9)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(FILE)
    return str(tmp_path / "train.py")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["plan", *arguments, "--jobs", "1", "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_its_numbers_are_those_of_each_stages_plan(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, f"{file}:make", "--ranks", "4", "--device", "a100", "--stage", "0,3")
    assert (found["ranks"], found["axes"], found["device"]["name"]) == (4, {"dp": 4}, "a100")
    for one in found["stages"]:
        with gz.testing.fake_world(4):
            place = gz.placement("cuda", range(4))
            graph, args = factory.make(f"{file}:make", place, one["stage"])
            plan = graph.compile(*args).plan
        assert one["at_peak"] == plan.memory.at_peak and one["resident"] == plan.memory.resident
        assert one["peak"] == sum(one["at_peak"].values()) == plan.memory.peak
        assert sum(group["calls"] for group in one["traffic"]) == len(plan.collectives)
        assert sum(group["nbytes"] for group in one["traffic"]) == pytest.approx(plan.comm_bytes)
        assert sum(group["psi"] for group in one["traffic"]) == pytest.approx(plan.comm_volume)
        seconds = one["seconds"]
        assert seconds["communication"] == pytest.approx(sum(group["seconds"] for group in one["traffic"]))
        assert seconds["compute"] == pytest.approx(sum(seconds["phases"].values()))
        assert seconds["step"] == pytest.approx(seconds["compute"] + seconds["exposed"] + seconds["host"])
        assert one["fits"] and one["least_ranks"] is None and len(one["largest_at_peak"]) == 3


def test_it_prints_a_table_with_a_column_for_each_stage(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:make", "--axes", "dp=4,tp=2", "--stage", "3,0", "--jobs", "2"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "Psi = 18,696 parameters" in lines[0] and "8 ranks (dp=4, tp=2) of h100" in lines[1]
    rows = {line[:36].strip(): line.split()[-4:] for line in lines}
    assert any(line.split() == ["stage", "0", "stage", "3"] for line in lines)
    for name in ("parameters", "all", "dp all_reduce gradients", "compute", "not hidden behind compute", "step"):
        assert name in rows
    assert re.search(r"peak is at '\w+' in (forward|backward|update); what weighs most there:", printed.out)
    assert "train.py:14 in build" in printed.out
    assert "nothing travels along tp: its 2 ranks do the same work" in printed.out
    assert "data sheet" in printed.out and "assumed, not measured" in printed.out
    assert "own" not in printed.out.split()  # of what the file prints


@pytest.mark.parametrize(
    ("what", "more", "words"),
    [
        ("nowhere.py:make", ["--ranks", "4"], ["no file"]),
        ("{file}:other", ["--ranks", "4"], ["no callable 'other'", "it has make"]),
        ("{file}:raises", ["--ranks", "4"], ["ValueError: a width of 3 heads", "in raises"]),
        ("{file}:make", [], ["--ranks 64"]),
        ("{file}:make", ["--ranks", "4", "--stage", "5"], ["unknown stage '5'"]),
        ("{file}:make", ["--ranks", "4", "--device", "b9000"], ["no device 'b9000'", "h100"]),
        ("{file}:make", ["--ranks", "4", "--memory", "80 apples"], ["80GB"]),
        ("{file}:make", ["--ranks", "4", "--jobs", "0"], ["--jobs"]),
        ("{file}:make", ["--ranks", "-4"], ["--ranks -4", "from 1 up"]),
        ("{file}:make", ["--ranks", "4", "--memory", "0"], ["--memory 0", "at least one byte"]),
        ("{file}:nothing", ["--ranks", "4", "--json"], ["returned NoneType"]),
        ("{file}:raises", ["--ranks", "4", "--json"], ["ValueError: a width of 3 heads"]),
        ("{file}", ["--ranks", "4"], ["no callable is named"]),
    ],
)
def test_what_is_wrong_is_one_message_and_status_2(
    file: str, capsys: pytest.CaptureFixture[str], what: str, more: list[str], words: list[str]
) -> None:
    assert main(["plan", what.format(file=file), "--stage", "2", "--jobs", "1", *more]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("graphzero: ConfigError") and "Traceback" not in printed.err
    for word in words:
        assert word in printed.err


def test_a_factory_that_leaves_the_stage_out_of_account_is_told(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:at_stage_0", "--ranks", "4", "--stage", "0,3", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "stage 3: the FACTORY, which was given stage=3, made a graph of stage 0" in said
    assert "given stage=0" not in said
    zero, three = planned(capsys, f"{file}:at_stage_0", "--ranks", "4", "--stage", "0,3")["stages"]
    assert (zero["made_stage"], three["made_stage"]) == (0, 0)


def test_without_a_data_axis_it_says_why_no_number_of_ranks_is_searched(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{file}:make", "--axes", "tp=2", "--stage", "0", "--jobs", "1", "--memory", "1GB"]) == 0
    assert "no axis is a data axis" in capsys.readouterr().out


def test_a_process_that_is_ended_from_outside_is_one_message(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:ends_its_process", "--ranks", "2", "--stage", "0,3", "--jobs", "2"]) == 2
    assert "--jobs 1" in capsys.readouterr().err


def test_a_step_that_cannot_be_captured_is_status_1(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:needs_values", "--ranks", "2", "--stage", "0"]) == 1
    assert "CaptureError" in capsys.readouterr().err


def test_the_least_ranks_fit_and_one_rank_less_does_not(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    a100 = Device.named("a100")

    def peak(ranks: int, stage: int) -> int:
        return plan_at(f"{file}:make", gz.placement("cuda", range(ranks)), stage, a100).peak

    memory = peak(5, 2)
    zero, two = planned(capsys, f"{file}:make", "--ranks", "16", "--stage", "0,2", "--memory", f"{memory}")["stages"]
    least = two["least_ranks"]["ranks"]
    assert least <= 5 and peak(least, 2) <= memory < peak(least - 1, 2)
    assert zero["least_ranks"]["ranks"] is None and "does" in zero["least_ranks"]["why"]
    assert two["fits"] and not zero["fits"]
    planned(capsys, f"{file}:make", "--ranks", "16", "--stage", "0", "--memory", f"{memory}", status=1)


@pytest.mark.parametrize("here", [1, 3, 8, 1000])
@pytest.mark.parametrize(("rest", "split", "memory"), [(10, 1000, 110), (10, 1000, 1010), (5, 64000, 80), (0, 7, 7)])
def test_the_search_takes_few_plans(here: int, rest: int, split: int, memory: int) -> None:
    asked = []

    def peak(n: int) -> int:
        asked.append(n)
        return rest + -(-split // n)

    truth = next(n for n in range(1, 10_000) if rest + -(-split // n) <= memory)
    assert least_ranks(peak, here, rest + -(-split // here), memory).ranks == truth
    assert len(asked) == len(set(asked)) <= 16


@pytest.mark.parametrize("here", [3, 64, 1000])
def test_what_a_plan_says_of_its_pieces_leads_the_search_to_the_two_numbers_that_decide(here: int) -> None:
    asked = []

    def peak(n: int) -> int:
        asked.append(n)
        return 3_000 + -(-1_000_000 // n)

    assert least_ranks(peak, here, 3_000 + -(-1_000_000 // here), 13_000, -(-1_000_000 // here)).ranks == 100
    assert len(asked) <= 3 and {99, 100} <= {*asked, here}


@pytest.mark.parametrize("here", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("memory", [151, 190, 201, 229, 252])
def test_where_padding_makes_peaks_uneven_what_is_found_fits_and_one_rank_less_does_not(here: int, memory: int) -> None:
    peaks = {1: 301, 2: 228, 3: 251, 4: 151, 5: 213, 6: 201, 7: 195, 8: 114}
    found = least_ranks(
        lambda n: peaks.get(n, 110), here, peaks.get(here, 110), memory, peaks.get(here, 110) // 3
    ).ranks
    assert found is not None and peaks[found] <= memory < peaks.get(found - 1, 10**9)


def test_two_numbers_beside_each_other_do_not_say_that_nothing_shrinks() -> None:
    assert least_ranks(lambda n: 100_000 + 10_000_000 // n, 1000, 110_000, 109_800, 9_500).ranks == 1021


def test_a_peak_that_is_counted_alone_is_that_of_the_plan(file: str) -> None:
    for stage in (0, 3):
        where = gz.placement("cuda", range(4))
        assert peak_at(f"{file}:make", where, stage) == plan_at(f"{file}:make", where, stage, Device.named("a100")).peak


def test_the_search_says_why_there_is_none() -> None:
    found = least_ranks(lambda n: 100, 8, 100, 90)
    assert found.ranks is None and "does not shrink" in found.why
    found = least_ranks(lambda n: 100 + 1000 // n, 8, 225, 90)
    assert found.ranks is None and "with 16,384 ranks" in found.why


def test_sizes_have_units() -> None:
    assert [size_of(text) for text in ("80GB", "64GiB", "1.5e9", "10 MB")] == [80 * 10**9, 64 * 2**30, 1.5e9, 10**7]
    for text in ("", "GB", "-1GB", "1XB", "nan"):
        with pytest.raises(gz.ConfigError, match="--memory"):
            size_of(text)


def test_help_has_an_example_and_says_what_a_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "graphzero plan examples/plans/llama_70b.py:make" in said and "exit status" in said


@pytest.mark.slow
def test_the_examples_file_is_a_factory() -> None:
    pytest.importorskip("transformers")
    examples = Path(__file__).resolve().parents[2] / "examples" / "plans"
    with gz.testing.fake_world(2), torch.device("meta"):
        graph, (ids,) = factory.make(f"{examples / 'gpt2.py'}:make", gz.placement("cuda", range(2)), 3)
    assert graph.config.settings.zero.stage == 3 and ids.shape == (8, 1024)
