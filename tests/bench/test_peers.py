"""The comparisons with other systems: all train alike, and memory is that of the kernel."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from shutil import which

import peers
import pytest
import torch
from _run import read_peak_memory, reset_peak_memory, run_on_gloo
from peers import SUBJECTS, StepTimes
from systems import BASE, EARLY, System
from workloads import WORKLOADS

COMPILED = (BASE, "graphzero + inductor, stage 2")  # other stages: tests/runtime; what else compiles costs a minute
PLAIN = [
    s.name
    for s in SUBJECTS["data"].choose_systems(None, [EARLY])
    if s.needs == "torch" and " + compile" not in s.name and " + inductor" not in s.name
]
TORCH = [*PLAIN, *(COMPILED if which("g++") else ())]


def train_alike(subject: str, model: str, names: list[str]) -> None:
    times = run_on_gloo(2, peers.time_systems, subject, SUBJECTS[subject].workloads[model], names, 1, 3)
    wanted = times[names[0]].losses
    assert len(set(wanted)) > 1, "a model that does not train shows nothing"
    assert list(times) == names
    for name, one in times.items():
        assert one.losses == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile in half of the systems
def test_every_system_of_torch_trains_to_the_same_losses():
    train_alike("data", "toy", TORCH)


@pytest.mark.slow
def test_they_do_on_a_convolutional_network_too():
    train_alike("data", "toy conv", ["graphzero, stage 0", "graphzero, stage 3", "DDP", "FSDP2"])


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["stages", "sequences", "experts"])
def test_they_do_on_pipelines_split_sequences_and_experts(subject):
    systems = SUBJECTS[subject].choose_systems(None)
    train_alike(subject, "toy", [s.name for s in systems if s.needs == "torch" and " + " not in s.name])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("subject", ["data", "stages", "sequences", "documents"])
def test_deepspeed_trains_to_the_same_losses(subject):
    systems = SUBJECTS[subject].choose_systems(None)
    train_alike(subject, "toy", [systems[0].name, *(s.name for s in systems if s.needs == "deepspeed")])


@pytest.mark.slow
def test_a_loss_is_the_mean_of_all_labels_where_micro_batches_have_other_numbers_of_them():
    names = ["PyTorch, whole batch", "graphzero, 1f1b", "torch, 1f1b"]
    times = run_on_gloo(2, peers.time_systems, "stages", SUBJECTS["stages"].workloads["ragged"], names, 1, 2)
    wanted, ours, others = (times[name].losses[0] for name in names)
    assert ours == pytest.approx(wanted, rel=1e-6)
    assert others != pytest.approx(wanted, rel=1e-5)


def test_a_row_is_compared_with_the_base_of_its_kind_and_else_losses_with_the_first_row():
    times = {
        name: StepTimes([[second]], [[second]], [2.0, 1.0 + off])
        for name, second, off in (("graphzero, a", 2.0, 1e-3), ("graphzero, b", 1.0, 0.0), ("torch, a", 1.0, 0.0))
    }
    first, second, _ = peers.format_times(times, ["torch", "DeepSpeed"]).splitlines()[2:]
    assert "2.00 (2.00 to 2.00)" in first and first.endswith("1e-03 |")
    assert " - |" in second and second.endswith("1e-03 |")


def test_a_ratio_is_taken_round_by_round_so_that_a_slow_round_does_not_count():
    base = StepTimes([[1.0, 1.0], [9.0, 9.0], [1.0, 1.0]], [[1.0], [4.0], [1.0]], [])
    one = StepTimes([[1.2, 1.2], [10.8, 10.8], [1.2, 5.0, 1.2]], [[2.0], [8.0], [9.0]], [])
    assert one.ratio_to(base) == pytest.approx((1.2, 1.2, 1.2))
    assert one.cpu_ratio_to(base) == 2.0
    assert one.milliseconds()[0] == 1200


def test_a_system_that_is_not_installed_is_left_out_with_a_word():
    assert "no module no_such_module" in (System("Other", lambda workload: torch.clone, "no_such_module").missing or "")
    assert SUBJECTS["data"].systems[0].missing is None


def test_a_name_without_a_stage_means_all_its_stages_and_nothing_else():
    choose = SUBJECTS["data"].choose_systems
    assert [s.name for s in choose(["graphzero", "DDP"])] == [*(f"graphzero, stage {i}" for i in range(4)), "DDP"]
    assert choose(None) == [s for s in SUBJECTS["data"].systems if not s.special]
    assert [s.name for s in choose(["DDP"], also=[EARLY])] == [f"{EARLY}, stage 2", f"{EARLY}, stage 3", "DDP"]


@pytest.mark.parametrize("model", ["toy", "toy conv"])
def test_ranks_share_one_batch_and_one_model(model):
    workload = WORKLOADS[model]
    parts = [workload.part(3, rank, ranks=2) for rank in range(2)]
    assert all(
        torch.equal(torch.cat(x), whole)
        for *x, whole in zip(*parts, workload.batch(3, 2 * workload.share), strict=True)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(workload.model().parameters(), workload.model().parameters(), strict=True)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the high-water mark")
def test_the_high_water_mark_holds_what_was_freed_since_and_begins_anew():
    before = reset_peak_memory()
    x = torch.ones(8 * 2**20)
    del x
    grown = read_peak_memory() - before
    assert 31 * 2**20 <= grown < 40 * 2**20  # the kernel counts pages with a delay
    assert reset_peak_memory() - before < 8 * 2**20
