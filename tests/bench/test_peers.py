"""The comparison with other systems: all train alike, and memory is that of the kernel."""

from __future__ import annotations

from importlib.util import find_spec
from shutil import which

import peak_memory
import pytest
import step_time
import torch
from _run import on_gloo
from systems import BASE, EARLY, SYSTEMS, System, chosen
from workloads import WORKLOADS

COMPILED = (BASE, "graphzero + inductor, stage 2")  # other stages: tests/runtime; what else compiles costs a minute
PLAIN = [
    s.name
    for s in chosen(None, [EARLY])
    if s.needs == "torch" and " + compile" not in s.name and " + inductor" not in s.name
]
TORCH = [*PLAIN, *(COMPILED if which("g++") else ())]
DEEPSPEED = [s.name for s in SYSTEMS if s.needs == "deepspeed"]


def train_alike(model: str, names: list[str]) -> None:
    found = on_gloo(2, step_time.work, model, names, 1, 3)
    wanted = found["graphzero, stage 0"].losses
    assert len(set(wanted)) > 1, "a model that does not train shows nothing"
    for name, one in found.items():
        assert one.losses == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch.compile in half of the systems
def test_every_system_of_torch_trains_to_the_same_losses():
    train_alike("toy", TORCH)


@pytest.mark.slow
def test_they_do_on_a_convolutional_network_too():
    train_alike("toy conv", ["graphzero, stage 0", "graphzero, stage 3", "DDP", "FSDP2"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_trains_to_the_same_losses():
    train_alike("toy", ["graphzero, stage 0", *DEEPSPEED])


def test_a_difference_of_losses_is_seen_and_the_base_is_ddp():
    found = {name: step_time.Timed([[1.0]], [[1.0]], [2.0, 1.0 + off]) for name, off in (("DDP", 0.0), ("FSDP2", 1e-3))}
    assert step_time.apart(found["DDP"], found) == "0e+00"
    assert step_time.apart(found["FSDP2"], found) == "1e-03"


def test_a_ratio_is_taken_round_by_round_so_that_a_slow_round_does_not_count():
    base = step_time.Timed([[1.0, 1.0], [9.0, 9.0], [1.0, 1.0]], [[1.0], [4.0], [1.0]], [])
    one = step_time.Timed([[1.2, 1.2], [10.8, 10.8], [1.2, 5.0, 1.2]], [[2.0], [8.0], [9.0]], [])
    assert one.to(base) == pytest.approx((1.2, 1.2, 1.2))
    assert one.cpu_to(base) == 2.0
    assert one.fastest == 1.2


def test_a_system_that_is_not_installed_is_left_out_with_a_word():
    assert "no module no_such_module" in (
        System("Other", 0, lambda workload: torch.clone, "no_such_module").missing or ""
    )
    assert SYSTEMS[0].missing is None


def test_a_name_without_a_stage_means_all_its_stages_and_nothing_else():
    assert [s.name for s in chosen(["graphzero", "DDP"])] == [*(f"graphzero, stage {i}" for i in range(4)), "DDP"]
    assert chosen(None) == [s for s in SYSTEMS if not s.special]
    assert [s.name for s in chosen(["DDP"], also=[EARLY])] == [f"{EARLY}, stage 2", f"{EARLY}, stage 3", "DDP"]


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


@pytest.mark.skipif(not peak_memory.CLEAR.exists(), reason="only Linux resets the high-water mark")
def test_the_high_water_mark_holds_what_was_freed_since_and_begins_anew():
    before = peak_memory.reset()
    x = torch.ones(8 * 2**20)
    del x
    grown = peak_memory.high_water() - before
    assert 31 * 2**20 <= grown < 40 * 2**20  # the kernel counts pages with a delay
    assert peak_memory.reset() - before < 8 * 2**20
