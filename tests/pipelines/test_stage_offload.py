"""Optimizer states and activations of pipeline stages in host memory: the same bits, and the bytes of the plan."""

from __future__ import annotations

import gc
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from staged import (
    Net,
    adamw,
    batches,
    largest_difference,
    momentum,
    placement,
    staged_graph,
    stages_of,
    tensors_of,
    trained,
)
from storages import Storages
from torch import nn
from torch_sanitizer import find_race_by_torch

import graphzero as gz
from graphzero import _compat
from graphzero.errors import ConfigError
from graphzero.ir.pipeline_launches import COPIES, LaunchKind, list_launches
from graphzero.ir.streams.events import TO_DEVICE, TO_HOST, StreamKernel
from graphzero.ir.streams.stage_events import StageEvents
from graphzero.ir.verifier.stream_order import find_race
from graphzero.plan.seconds import plain as plain_device
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.sbp.link_costs import Link
from graphzero.testing import strict_transfers


def offloaded(offload: bool, folder: Path | None = None, stages: int = 2, **options: Any) -> Any:
    options = {"optimizer": adamw, **options}
    tied, average, scale = (options.pop(name, False) for name in ("tied", "average", "scale"))
    torch.manual_seed(0)
    model = Net(stages, tied=tied)
    graph = staged_graph(model, stages_of(stages, stages), placement(2, 2), micro_batches=4, **options)
    if average:
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        graph.averaged = averaged
        graph.add_average(averaged, model)
    if scale:
        graph.config.enable_amp(dtype=torch.float16)
    graph.config.bucket_bytes = 400
    if offload:
        graph.config.enable_offload(path=folder)
    return graph


@pytest.mark.parametrize(
    ("in_files", "options"),
    [
        (True, {"stage": 0, "schedule": "gpipe", "tied": True}),
        (False, {"stage": 1, "schedule": "zbv", "stages": 4, "clip": 0.1}),
        (True, {"stage": 2, "schedule": "1f1b", "clip": 0.1, "average": True, "tied": True}),
        pytest.param(True, {"stage": 3, "schedule": "zb1p", "scale": True}, marks=pytest.mark.slow),
        (False, {"stage": 3, "optimizer": momentum, "clip": 0.1}),
    ],
)
def test_steps_have_the_same_bits_in_memory_and_in_files(
    in_files: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    wanted = trained(offloaded(False, **options), steps=3)
    graph = offloaded(True, tmp_path if in_files else None, **options)
    assert largest_difference(trained(graph, steps=3), wanted) == 0


def test_the_plan_says_what_each_stage_has_on_the_host() -> None:
    plain, graph = (offloaded(offload, stage=1) for offload in (False, True))
    trained(plain), trained(graph)
    pairs = zip(plain.plan.pipeline.members, graph.plan.pipeline.members, strict=True)
    for before, after in ((one.memory, other.memory) for one, other in pairs):
        moved = before["optimizer_states"] - after["optimizer_states"]
        assert after.host == after.host_resident == moved > 0 and before.host == 0
        assert after.peak <= before.peak
    assert graph.plan.host_traffic == (graph.plan.memory.host,) * 2 and plain.plan.host_traffic == (0, 0)
    for words in ("on host", ", without copies to and from the host"):
        assert words in str(graph.plan) and words not in str(plain.plan)
    assert "over the link to the host" in str(graph.plan)


def test_the_peak_of_an_update_is_the_plans_to_the_byte() -> None:
    """Wide layers and one row: the update holds most, the states of two parameters among it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
    graph = staged_graph(
        model, {f"model.{i}": i // 2 for i in range(4)}, placement(1, 1), [["0F0", "1F0", "1B0", "0B0"]],
        loss_fn=lambda model, x: model(x).square().mean(), optimizer=adamw,
    )  # fmt: skip
    graph.config.bucket_bytes = 1
    graph.config.enable_offload()
    x = torch.randn(1, 40)
    graph(x)
    gc.collect()
    memory = graph.plan.memory
    assert memory.at_peak["optimizer_states"] == 2 * 2 * model[0].weight.nbytes + 4 and "epilogue@0" in memory.peak_at
    with Storages([x, *tensors_of(graph.state_dict())]) as mode:
        graph(x)
    assert mode.peak + sum(memory.resident.values()) == memory.peak


def test_a_checkpoint_goes_to_a_graph_without_offload_and_stages_and_back(tmp_path: Path) -> None:
    first = offloaded(True, tmp_path / "states", stage=2)
    trained(first)
    gz.save(first, tmp_path / "step")
    torch.manual_seed(7)
    whole = staged_graph(Net(2), None, placement(2, 2), stage=2, micro_batches=4, optimizer=adamw)
    gz.load(whole, tmp_path / "step")
    wanted = tensors_of(first.full_state_dict())
    assert all(map(torch.equal, tensors_of(whole.full_state_dict()), wanted))
    trained(whole)
    gz.save(whole, tmp_path / "later")
    gz.load(first, tmp_path / "later")  # into a Graph that has run, whose states are in a file
    assert all(map(torch.equal, tensors_of(first.full_state_dict()), tensors_of(whole.full_state_dict())))
    assert all(map(torch.equal, trained(first), trained(whole)))


# ---- activations


def waiting(activations: int | None, folder: Path | None = None, stages: int = 4, **options: Any) -> Any:
    """Eight micro-batches, of activations at most so many bytes on the device."""
    torch.manual_seed(0)
    where = options.pop("where", placement(2, 2))
    graph = staged_graph(Net(stages), stages_of(stages, stages), where, micro_batches=8, **options)
    if activations is not None:
        graph.config.enable_offload(False, activations=activations, path=folder)
    return graph


def least_of(**options: Any) -> int:
    """The least bytes of activations that work, as the error for fewer says."""
    with pytest.raises(ConfigError, match=r"enable_offload\(activations=1\): the ranks of stage") as info:
        waiting(1, **options).compile(*batches(1)[0])
    (least,) = re.findall(r"What it needs is config.enable_offload\(activations=(\d+)\)", str(info.value))
    return int(least)


@pytest.mark.parametrize(
    ("shares", "options"),  # shares of the bytes between the least that work and all, that may stay on the device
    [
        ((0.0,), {"schedule": "zb1p", "where": placement(4, 1), "stage": 2}),
        ((0.0, 0.5), {"schedule": "zbv", "stage": 3, "clip": 0.1, "optimizer": adamw}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ((0.0,), {"schedule": "gpipe", "stages": 2, "stage": 0}),
                (
                    (0.0, 0.5),
                    {"schedule": "1f1b", "where": placement(4, 1), "stage": 1, "clip": 0.1, "optimizer": adamw},
                ),
                ((0.0,), {"schedule": "interleaved", "stage": 2}),
            )
        ),
    ],
)
@pytest.mark.at_once
def test_steps_with_activations_on_the_host_have_the_same_bits(
    shares: tuple[float, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    plain = waiting(None, **options)
    wanted = trained(plain, steps=2)
    most, least = max(one.memory.activations for one in plain.plan.pipeline.members), least_of(**options)
    assert least < 0.7 * most
    for share in shares:
        nbytes = least + int(share * (most - least))
        graph = waiting(nbytes, None if share else tmp_path, **options)
        start = graph.full_state_dict()
        with strict_transfers():
            assert largest_difference(trained(graph, steps=2), wanted) == 0
        members = [one.memory for one in graph.plan.pipeline.members]
        assert max(one.activations for one in members) <= nbytes and any(one.host for one in members)
        assert len([line for line in graph.plan.decisions if "on the host until backward" in line]) > 0
        graph.load_state_dict(start)
        assert largest_difference(trained(graph, steps=2), wanted) == 0


def test_the_peak_with_activations_on_the_host_is_the_plans_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages on one rank, whose activations wait in a file, which is not counted."""

    def copy_unseen(copies: HostCopies, target: torch.Tensor, source: torch.Tensor) -> Handle:
        with _compat.no_modes():
            return begin_copy(copies, target, source)

    begin_copy = HostCopies.begin_copy
    monkeypatch.setattr(HostCopies, "begin_copy", copy_unseen)
    rows = [
        [f"{stage}F{k}" for k in range(8) for stage in (0, 1)] + [f"{stage}B{k}" for k in range(8) for stage in (1, 0)]
    ]
    peaks = []
    for nbytes in (None, 3000):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        graph = staged_graph(
            model, {f"model.{i}": i // 2 for i in range(4)}, placement(1, 1), rows, micro_batches=8,
            loss_fn=lambda model, x: model(x).square().mean(),
        )  # fmt: skip
        graph.config.enable_offload(False, activations=nbytes, path=tmp_path if nbytes else None)
        x = torch.randn(64, 12)
        graph(x)
        gc.collect()
        memory = graph.plan.memory
        assert nbytes is None or memory.activations <= nbytes and memory.host
        with Storages([x, *tensors_of(graph.state_dict())]) as mode:
            graph(x)
        assert mode.peak + sum(memory.resident.values()) == memory.peak
        peaks.append(memory.peak)
    assert peaks[1] < peaks[0] and graph.plan.host_traffic.to_host == graph.plan.host_traffic.to_device > 0


def test_the_law_of_streams_objects_to_a_dropped_copy_record_or_wait_where_torchs_sanitizer_does() -> None:
    graph = waiting(least_of(schedule="zb1p", where=placement(4, 1)), schedule="zb1p", where=placement(4, 1))
    graph.compile(*batches(1)[0])
    pipeline = graph._selection.last.pipeline
    launches = list_launches(pipeline, 1)
    counts = Counter(launch.kind for launch in launches)
    assert counts[LaunchKind.STORE] > 8 and len({counts[kind] for kind in COPIES}) == 1
    events = StageEvents(pipeline, 1, launches).all()
    assert not find_race(events) and not find_race_by_torch(events)
    objects: Counter[bool] = Counter()
    for i, event in enumerate(events):
        if not isinstance(event, StreamKernel) and event.stream in (TO_HOST, TO_DEVICE):
            rest = [*events[:i], *events[i + 1 :]]
            race = find_race(rest) is not None
            assert race == find_race_by_torch(rest), event
            objects[race] += 1
    for kind in (LaunchKind.STORED, LaunchKind.FETCHED):
        for launch in [one for one in launches if one.kind is kind]:
            race = find_race(StageEvents(pipeline, 1, [one for one in launches if one != launch]).all())
            objects[race is not None] += 1
    # Dropped without harm are those beside another one of the same direction, which orders the same.
    assert objects[True] > objects[False], objects


def test_copies_that_calls_hide_cost_nothing_and_slow_ones_do() -> None:
    options = {"schedule": "gpipe", "stages": 2}
    plain, graph = waiting(None, **options), waiting(least_of(**options), **options)
    for one in (plain, graph):
        one.compile(*batches(1)[0])
    pipelines = [one._selection.last.pipeline for one in (plain, graph)]
    fast, slow = (
        replace(device, links={**device.links, "host memory": Link(0.0, bandwidth)})
        for device in [plain_device("cuda")]
        for bandwidth in (1e15, 1e6)
    )
    before, beside, late = (
        pipeline_timeline(pipeline, device).seconds
        for pipeline, device in zip([pipelines[0], *[pipelines[1]] * 2], (fast, fast, slow), strict=True)
    )
    nbytes = max(sum(trip.nbytes for trip in pipelines[1].round_trips if trip.member == i) for i in range(2))
    assert beside == pytest.approx(before, rel=1e-3) and late > before + nbytes / 1e6


def test_the_budget_does_not_choose_activations_of_stages_yet() -> None:
    graph = waiting("auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'activations="auto"\) yet\n.*activations=nbytes\).*recomputes'):
        graph(*batches(1)[0])
