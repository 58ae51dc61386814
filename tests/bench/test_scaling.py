"""The model of a step's seconds: what hides behind what, and what a link between hosts carries."""

from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace

import pytest
import scaling
import torch
from compile_time import clocks
from step_model import Cluster, Compute, bounds, hierarchies, planned
from step_time import Timed
from workloads import WORKLOADS

import graphzero as gz
from graphzero.plan import Collective

CLUSTER = Cluster(per_host=4, inside=gz.Link(0.0, 1e9), between=gz.Link(0.0, 1e6))


def plan(*collectives: tuple[str, str, float], states: int = 100) -> SimpleNamespace:
    made = [Collective("all_gather", "dp", 0.0, phase, (), what, seconds) for phase, what, seconds in collectives]
    return SimpleNamespace(collectives=made, memory={"optimizer_states": states})


def test_gradients_hide_behind_backward_and_updated_parameters_behind_nothing():
    compute = Compute(forward=1.0, backward=2.0, update=0.5)
    found = bounds(plan(("update", "gradients", 1.5), ("update", "parameters", 0.25)), compute, states=100)
    assert (found.best, found.worst) == (3.75, 5.25)


def test_more_than_a_phase_lasts_does_not_hide_behind_it():
    compute = Compute(forward=1.0, backward=2.0, update=0.0)
    found = bounds(plan(("forward", "parameters", 1.5), ("backward", "gradients", 5.0)), compute, states=100)
    assert (found.best, found.worst) == (6.5, 9.5)


def test_a_rank_updates_its_share_only():
    found = bounds(plan(states=25), Compute(1.0, 1.0, 1.0), states=100)
    assert found.best == found.worst == found.compute == 2.25


def test_an_axis_that_leaves_a_host_is_as_slow_as_the_way_between_hosts():
    place = gz.placement("cpu", torch.arange(8).reshape(2, 4).tolist(), ("dp_replicate", "dp_shard"), virtual=True)
    assert CLUSTER.links(place) == {"dp_replicate": CLUSTER.between, "dp_shard": CLUSTER.inside}
    flat = gz.placement("cpu", range(8), virtual=True)
    assert CLUSTER.links(flat) == {"dp": CLUSTER.between}
    assert [*hierarchies(4, 4)] == [(4,)] and [*hierarchies(8, 4)] == [(8,), (2, 4)]


def test_a_plan_of_ranks_that_are_not_there_is_that_of_so_many_virtual_ones():
    workload = WORKLOADS["toy"]
    with torch.device("meta"):
        model = workload.model()
    share = tuple(x.to("meta") for x in workload.part(0, 0, 1))
    found = planned(model, share, (3,), CLUSTER, (2, 4))[3]
    sent = sum(one.bytes for one in found.collectives if one.axis == "dp_replicate" and one.what_for == "gradients")
    assert sent == pytest.approx(4 * found.parameters / 4, rel=0.05)  # an all_reduce of 1/4 of them over 2 ranks
    assert found.memory["parameters"] == pytest.approx(4 * found.parameters / 4, rel=0.05)
    assert found.comm_seconds > sent / 1e6


def test_efficiency_is_of_ranks_and_beyond_the_cores_of_cores(monkeypatch):
    monkeypatch.setattr(scaling, "CORES", 2)
    found = {n: {"a": Timed([[float(max(n, 2))]], [[1.0]], [])} for n in (1, 2, 4)}
    cells = [cell.strip() for cell in scaling.measured(found, lambda n: 8 * n).splitlines()[2].split("|")[2:-1]]
    assert cells == ["4.0", "8.0", "8.0", "1.00", "0.50", "1.00", "125.0", "125.0", "125.0"]


def test_loading_modules_is_not_in_the_seconds(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text("import time; time.sleep(0.8); import slow_too")
    (tmp_path / "slow_too.py").write_text("import time; time.sleep(0.8)")
    monkeypatch.syspath_prepend(tmp_path)
    with clocks() as clock:
        began = clock.wall()
        importlib.import_module("slow_to_load")
        time.sleep(0.05)
        assert 0.05 <= clock.wall() - began < 1.6  # loading is none of it
    assert clock.loading_wall >= 1.6
    for name in ("slow_to_load", "slow_too"):
        del sys.modules[name]
