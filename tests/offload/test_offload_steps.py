"""Steps whose optimizer states lie in host memory are the same to the bit, and the plan counts what is where."""

import gc
import os
from pathlib import Path

import pytest
import torch
from offload_toys import OPTIMIZERS, OffloadGraph, batch, differences, results_of

import graphzero as gz
from graphzero.plan.plan import mega
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.testing import measure_step, strict_transfers


def offloaded(path=None, **options):
    graph = OffloadGraph(**options)
    graph.config.enable_offload(path=path)
    return graph


@pytest.mark.parametrize("stage", [pytest.param(x, marks=[pytest.mark.slow] * (x in (0, 1))) for x in range(4)])
def test_every_stage_with_micro_batches_and_clipping_has_the_same_bits(stage):
    options = {"stage": stage, "steps": 4, "clip": 0.1, "average": True}
    expected = results_of(OffloadGraph(**options))
    with strict_transfers():
        assert differences(results_of(offloaded(**options)), expected) == []


FAST = ("sgd", "fused")


@pytest.mark.parametrize("optimizer", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in OPTIMIZERS])
def test_every_optimizer_has_the_same_bits(optimizer):
    expected = results_of(OffloadGraph(optimizer, stage=2))
    with strict_transfers():
        graph = offloaded(optimizer=optimizer, stage=2)
        assert differences(results_of(graph), expected) == []
    states = [node for node in graph.program.placeholders("state") if node.meta["type"].shape]
    assert states and graph.plan.memory.host_resident > 0 and graph.plan.memory["optimizer_states"] <= 8


@pytest.mark.slow
def test_an_update_within_backward_has_the_same_bits():
    def graph():
        graph = OffloadGraph(stage=1)
        graph.config.set_optimizer_in_backward()
        return graph

    expected, moved = results_of(graph()), graph()
    moved.config.enable_offload()
    with strict_transfers():
        assert differences(results_of(moved), expected) == []


def test_a_step_that_loss_scaling_skips_has_the_same_bits():
    def results(offload):
        graph = OffloadGraph(stage=2)
        graph.config.enable_amp(dtype=torch.float16)
        graph.config.enable_offload(offload)
        graph(*batch(0))
        x, y = batch(1)
        graph(x * 1e4, y * 1e30)
        skipped = graph.skipped
        return skipped, results_of(graph)

    (skipped, expected), (also_skipped, found) = results(False), results(True)
    assert skipped and also_skipped and differences(found, expected) == []


@pytest.mark.parametrize("stage", [0, 2])
def test_the_plan_is_what_a_step_holds_on_the_device_and_on_the_host(stage):
    with gz.testing.fake_world(2):
        graphs = [make(stage=stage, where=gz.placement("cpu", range(2))) for make in (OffloadGraph, offloaded)]
        for graph in graphs:
            graph(*batch())
            memory, measured = graph.plan.memory, measure_step(graph, *batch())
            assert (measured.peak, measured.host) == (memory.peak, memory.host)
            assert measured.at_peak == {name: nbytes for name, nbytes in memory.at_peak.items() if nbytes}
        before, after = (graph.plan.memory for graph in graphs)
    moved = before["optimizer_states"] - after["optimizer_states"]
    assert after.host_resident == after.host == moved > 0 and before.host == 0
    assert graphs[1].plan.host_traffic == (moved, moved) and graphs[0].plan.host_traffic == (0, 0)
    assert f"over the link to the host: {mega(moved)} to the device, {mega(moved)}" in str(graphs[1].plan)


def test_the_device_holds_two_buckets_at_most():
    graph = OffloadGraph(stage=0)
    graph.config.bucket_bytes = 1
    graph.config.enable_offload()
    graph(*batch())
    at_once, most, sizes = {}, 0, [2 * p.numel() * 4 for p in graph.model.parameters()]
    for node in graph.program.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "to_device_launch":
            at_once[node.args[0].name] = node.meta["type"].nbytes
        elif name == "to_host_wait":
            del at_once[node.args[0].args[0].name]
        most = max(most, sum(at_once.values()))
    assert not at_once and most == max(a + b for a, b in zip(sizes, sizes[1:], strict=False))


def test_nothing_is_under_way_after_a_step_that_stops(monkeypatch):
    """On a GPU the memory of a copy would go to somebody else, or Python read a state that is still arriving."""
    copies = []

    def end(self, target, on_host):
        copies.append(self)
        raise RuntimeError("stopped")

    monkeypatch.setattr(HostCopies, "end", end)
    with strict_transfers(), pytest.raises(RuntimeError, match="stopped"):
        offloaded(stage=1)(*batch())
    assert copies[0]._under_way == {}


# ---- files


def test_states_in_a_file_have_the_same_bits_and_the_file_goes_with_them(tmp_path):
    folder = tmp_path / "new" / "states"
    expected = results_of(OffloadGraph(stage=2))
    graph = offloaded(folder, stage=2)
    assert differences(results_of(graph), expected) == []
    assert os.listdir(folder) == []  # the file has no name
    states = [x for state in graph.optimizer.state.values() for x in state.values() if x.dim()]
    assert states and all(in_folder(x, folder) for x in states)
    del states
    graph = None
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def in_folder(x, folder):
    """Whether a tensor lies in a mapped file of the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= x.data_ptr() < end:
            return str(folder) in line
    return False


@pytest.mark.slow
def test_states_move_into_files_and_out_again_between_steps(tmp_path):
    graph, twin = OffloadGraph(stage=1), OffloadGraph(stage=1)
    for step, offload in enumerate([{}, {"path": tmp_path / "a"}, {"path": tmp_path / "b"}, None, {}]):
        graph.config.enable_offload(offload is not None, **(offload or {}))
        assert torch.equal(graph(*batch(step)), twin(*batch(step)))
        state = graph.optimizer.state[graph.model[0].weight]["exp_avg"]
        assert in_folder(state, tmp_path) == bool(offload)
    assert differences(graph.full_state_dict(), twin.full_state_dict()) == []


def test_a_folder_that_cannot_be_written_is_named_before_anything_changes(tmp_path):
    (tmp_path / "file").write_text("")
    graph = offloaded(tmp_path / "file" / "states", stage=1)
    before = {name: x.clone() for name, x in graph.model.state_dict().items()}
    with pytest.raises(gz.ConfigError, match=r"bytes of optimizer states do not go there: Not a directory\n  Nothing"):
        graph(*batch())
    assert all(torch.equal(x, before[name]) for name, x in graph.model.state_dict().items())
    graph.config.enable_offload(path="a\0b")
    with pytest.raises(gz.ConfigError, match="states do not go there: embedded null byte"):
        graph(*batch())
    graph.config.enable_offload(path=tmp_path / "states")
    assert differences(results_of(graph), results_of(OffloadGraph(stage=1))) == []


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    def full(descriptor, offset, nbytes):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(gz.ConfigError, match=r"enable_offload\(path=.*do not go there: No space left on device"):
        offloaded(tmp_path)(*batch())
    assert os.listdir(tmp_path) == []


def test_a_rank_that_holds_nothing_of_small_states_needs_no_file_for_them(tmp_path):
    """Of a weight's 5 rows rank 8 of 9 has none; it binds again when the program changes."""
    with gz.testing.fake_world(9, rank=8):
        graph = OffloadGraph(stage=1, where=gz.placement("cpu", range(9)))
        graph.config.enable_offload(path=tmp_path)
        for rows in (9, 18, 9):
            graph(torch.zeros(rows, 12), torch.zeros(rows, 5))
        piece = graph.optimizer.state[graph.model[4].weight]["exp_avg"].to_local()
        assert not piece.numel() and graph.plan.memory.host_resident > 0


# ---- settings


def test_settings_say_what_is_wrong(tmp_path):
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    with pytest.raises(gz.ConfigError, match=r"enable_offload\(2\): say True or False"):
        config.enable_offload(2)
    with pytest.raises(gz.ConfigError, match="nothing would be written there"):
        config.enable_offload(False, path=tmp_path)
    for path in ("", b"states"):
        with pytest.raises(gz.ConfigError, match=r"enable_offload\(path=.*\): give the path of a folder"):
            config.enable_offload(path=path)
    config.enable_offload(path=tmp_path)
    assert config.description == f"offload=states in {tmp_path}"
    config.enable_offload(False)
    assert config.description == ""


def test_a_recorded_step_is_refused():
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    config.enable_offload()
    with pytest.raises(gz.ConfigError, match=r"set_cuda_graph\(\) and enable_offload\(\): .*leave one of them out"):
        config.set_cuda_graph()
