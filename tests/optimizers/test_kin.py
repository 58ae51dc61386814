"""Optimizers that need whole matrices: at ZeRO's stages they step as plain PyTorch, and exchange matrices in stacks."""

import copy

import pytest
import torch
from kin_toys import Blocks, Orthogonal, Projected, Shampoo, batch, mse_graph, muon, of, plain
from optimizer_reference import distance

import graphzero as gz
from graphzero.passes import pass_list

LIMIT = 1e-9
S, B = gz.sbp.S, gz.sbp.B


def trained(make, stage, placement=None, model=None, change=lambda graph: None, later=()):
    """A Graph that has trained, after its losses and states were compared with plain PyTorch's.

    later: stages at which it takes its last steps, from the same capture.
    """
    model, stages = model or Blocks(), [stage] * (3 - len(later)) + [*later]
    width = model.norm.weight.numel()
    other, others, losses = plain(model, make, len(stages), width)
    graph = mse_graph(copy.deepcopy(model), make, stage, placement)
    change(graph)
    for step, (wanted, stage) in enumerate(zip(losses, stages, strict=True)):
        if later:
            graph.config.enable_zero(stage=stage)
        torch.testing.assert_close(graph(*batch(step, width, wanted.dtype)), wanted, atol=LIMIT, rtol=0)
    assert distance(graph.model, graph.optimizers, other, others) <= LIMIT
    return graph


def of_update(graph):
    """The collectives of the update that are not of parameters or gradients, by kind."""
    return [c.kind for c in graph.plan.collectives if c.phase == "update" and c.what_for == "other"]


@pytest.mark.parametrize("make", [muon, of(Orthogonal)])
def test_products_of_matrices_are_one_exchange_each_way_for_each_shape(make):
    graph = trained(make, 1, later=(2, 3))
    for stage in (1, 2, 3):
        graph.config.enable_zero(stage=stage)
        assert of_update(graph.compile(*batch(0))) == ["all_to_all"] * 4, stage


def test_a_users_optimizer_with_states_of_other_shapes_is_stacked_too():
    assert of_update(trained(of(Shampoo), 3)) == ["all_to_all"] * 12  # of each shape three in, and three out
    assert "all_to_all" in of_update(trained(of(Projected), 2))


@pytest.mark.parametrize("axis", [None, "dp_shard"])
def test_two_data_axes(axis):
    placement = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp_replicate", "dp_shard"), virtual=True)
    graph = trained(muon, 2, placement, change=lambda graph: graph.config.enable_zero(stage=2, axis=axis))
    assert of_update(graph) == ["all_to_all"] * (4 if axis else 8)  # on each axis


@pytest.mark.parametrize("stage", [0, 3])
def test_split_models_exchange_over_both_axes(stage):
    placement = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
    split = {"up.*.weight": (B, S(0)), "up.*.bias": (B, S(0)), "down.*.weight": (B, S(1))}

    def change(graph):
        gz.to_global(graph.model, placement=placement, sbp=split)

    graph = trained(of(Orthogonal), stage, placement, change=change)
    assert {c.axis for c in graph.plan.collectives if c.kind == "all_to_all"} == ({"dp", "tp"} if stage else {"tp"})
    assert set(of_update(graph)) == {"all_to_all"}


def test_sizes_that_do_not_divide_micro_batches_and_steps_in_backward():
    assert of_update(trained(muon, 2, model=Blocks(5, 7, 9))) == ["all_to_all"] * 4
    trained(of(Orthogonal), 3, change=lambda graph: graph.config.set_gradient_accumulation_steps(2))
    trained(muon, 2, change=lambda graph: graph.config.set_optimizer_in_backward())


def test_masters_of_16_bit_casts_step_alike_at_all_stages():
    def made(stage):
        graph = mse_graph(Blocks(dtype=torch.float32), muon, stage)
        graph.config.enable_amp(dtype=torch.float16, init_scale=8.0)
        for step in range(3):
            graph(*batch(step, dtype=torch.float32))
        return graph

    whole, split = made(0), made(2)
    assert not of_update(whole).count("all_to_all") and of_update(split).count("all_to_all") == 4
    assert distance(whole.model, whole.optimizers, split.model, split.optimizers) <= 1e-6


def test_a_matrix_without_any_gradient_is_no_nan_in_a_stack():
    def silent(model):
        with torch.no_grad():
            model.down[1].weight.zero_()
            model.up[1].weight.zero_()
        return model

    graph = trained(of(Orthogonal), 2, model=silent(Blocks()))
    assert all(p.isfinite().all() for p in graph.model.parameters())


def test_updates_in_stacks_send_less_and_hold_no_more(monkeypatch):
    """A stack is no larger than a bucket, or a matrix on each rank: what gathers of whole matrices hold."""

    def planned():
        graph = mse_graph(Blocks(4, 32, 32, dtype=torch.float32), muon, 2)
        for stage in (2, 3):
            graph.config.enable_zero(stage=stage)
            yield graph.compile(*batch(0, 32, torch.float32)).plan

    stacked = [*planned()]
    apart = tuple(entry for entry in pass_list.pass_entries() if entry.name != "stack_updates")
    monkeypatch.setattr(pass_list, "pass_entries", lambda: apart)
    for plan, before in zip(stacked, planned(), strict=True):
        assert plan.memory.peak <= 1.02 * before.memory.peak
        sent, sent_before = (
            sum(c.bytes for c in one.collectives if c.phase == "update" and c.what_for == "other")
            for one in (plan, before)
        )
        elements = 8 * 32 * 32
        assert sent == 2 * (2 * 3 / 4 * elements / 4)  # bytes of bf16, there and back, of a quarter on each rank
        assert sent_before > 10 * sent
        assert plan.comm_volume == before.comm_volume


def test_every_pass_leaves_the_step_what_it_is():
    assert gz.check(mse_graph(Blocks(2, 4, 6), of(Orthogonal), 2), *batch(0, 4))
