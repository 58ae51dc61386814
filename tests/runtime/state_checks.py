"""What two gloo processes check of the steps that a Graph takes and of the state that it keeps."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_toys import batch, eager, make, mse_graph, raises, same, sgd, share, trained
from processes import slow
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import graphzero as gz


def check_steps_are_eager_ones_at_every_stage():
    for stage in range(4):
        graph, found = trained(stage)
        model, optimizer = eager(3)
        full = graph.full_state_dict()
        same(full["modules"]["model"], model.state_dict())
        x, _ = batch(2)
        assert found[2]["out"].shape == (4, 3) and type(found[2]["out"]) is torch.Tensor
        losses = [torch.zeros_like(found[2]["loss"]) for _ in range(2)]
        dist.all_gather(losses, found[2]["loss"])
        assert torch.equal(*losses)
        twin = make(9)
        twin_optimizer = sgd(twin)
        twin.load_state_dict(full["modules"]["model"])
        twin_optimizer.load_state_dict(full["optimizers"][0])
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                twin_optimizer.state[ours]["momentum_buffer"],
                optimizer.state[theirs]["momentum_buffer"],
                atol=1e-7,
                rtol=1e-5,
            )
        assert twin_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def check_buffers_are_taken_from_rank_0_and_see_the_global_batch():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    model, twin = build(), build()
    model[1].running_mean += dist.get_rank()
    mse_graph(model, sgd(model), 3)(*share(0))
    twin(batch(0)[0])
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var)


def check_stage_3_puts_dtensors_everywhere_and_stage_2_only_in_states():
    for stage in (2, 3):
        model = make(0)
        optimizer = sgd(model)
        before = list(model.parameters())
        graph = mse_graph(model, optimizer, stage)
        graph(*share(0))
        after = list(model.parameters())
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p is q for p, q in zip(after, held, strict=True))
        assert model.first.weight is model.second.weight
        assert all(p.grad is None for p in after) and all(isinstance(p, nn.Parameter) for p in after)
        for p in after:
            momentum = optimizer.state[p]["momentum_buffer"]
            assert isinstance(momentum, DTensor) and momentum.shape == p.shape
        assert set(optimizer.state) == set(after)
        if stage == 3:
            assert all(isinstance(p, DTensor) for p in after)
            assert all(p.untyped_storage().nbytes() == 0 for p in before)
            local = model.first.weight.to_local()
            assert local.numel() < model.first.weight.numel() and local.untyped_storage().nbytes() == local.nbytes
            assert gz.sbp.of(model.last.weight)[0].is_split
        else:
            assert all(p is q for p, q in zip(after, before, strict=True)) and gz.sbp.of(after[0]) == (gz.sbp.B,)
        compiled = graph.program
        graph(*share(1))
        assert graph.program is compiled


def check_other_graphs_take_split_parameters_as_they_are():
    graph, _ = trained(3)
    model = graph.model
    evaluate, again = mse_graph(model), mse_graph(model, sgd(model), 0)
    with torch.no_grad():
        whole = make(0)
        whole.load_state_dict(graph.full_state_dict()["modules"]["model"])
    out = evaluate(*share(5))["out"]
    torch.testing.assert_close(out, whole(batch(5)[0]).detach().chunk(2)[dist.get_rank()])
    split = list(model.parameters())
    again(*share(6))
    assert all(p is q and isinstance(p, DTensor) for p, q in zip(model.parameters(), split, strict=True))
    graph(*share(7))


@slow
def check_losses_that_are_not_finite_pass_through():
    for stage in range(4):
        model, twin = make(0), make(0)
        graph = mse_graph(model, None, stage)
        graph.add_optimizer(sgd(model), clip_grad_norm=1.0)
        x, y = batch(0)
        x[0, 0] = float("inf")
        twin_loss = nn.functional.mse_loss(twin(x), y)
        twin_loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        graph.build = lambda x, y, graph=graph: nn.functional.mse_loss(graph.model(x), y).backward()
        graph(*(t.chunk(2)[dist.get_rank()] for t in (x, y)))
        torch.testing.assert_close(graph.grad_norm, norm, equal_nan=True)


@slow
def check_checkpoints_load_at_other_stages_through_dcp():
    graph, _ = trained(3)
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    dcp.save(graph.state_dict(), checkpoint_id=box[0])
    before = pytree.tree_flatten_with_path(graph.full_state_dict())[0]
    expected = graph(*share(7))
    for stage in (0, 1, 3):
        for called in (False, True):
            model = make(5)
            optimizer = sgd(model, lr=0.3)
            other = mse_graph(
                model, optimizer, stage, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
            )
            (other if called else other.compile)(*share(4))
            sd = other.state_dict()
            dcp.load(sd, checkpoint_id=box[0])
            other.load_state_dict(sd)
            after = dict(pytree.tree_flatten_with_path(other.full_state_dict())[0])
            for path, value in before:
                found = after[path]
                equal = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
                assert equal, f"stage {stage}: {pytree.keystr(path)}: {found} != {value}"
            torch.testing.assert_close(other(*share(7)), expected)


def check_eager_optimizer_loads_are_seen():
    graph, _ = trained(1)
    optimizer = graph._source.optimizers[0].optimizer
    saved = graph.full_state_dict()
    graph(*share(3))
    optimizer.load_state_dict(saved["optimizers"][0])
    with torch.no_grad():
        graph.model.load_state_dict(saved["modules"]["model"])
    again, _ = trained(1)
    torch.testing.assert_close(graph(*share(4)), again(*share(4)))
    assert isinstance(optimizer.state[graph.model.last.weight]["momentum_buffer"], DTensor)


def check_a_first_step_makes_the_state_and_ranks_agree_on_what_there_is():
    def dampened(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    plain = make(0)
    other = dampened(plain)
    for step in range(3):
        other.zero_grad()
        x, y = batch(step)
        nn.functional.mse_loss(plain(x), y).backward()
        other.step()
    for stage in range(4):
        model = make(dist.get_rank())
        optimizer = dampened(model)
        if dist.get_rank() == 1:  # rank 0 has none, and it decides
            optimizer.state[model.last.bias]["momentum_buffer"] = torch.ones(3, dtype=torch.float64)
        graph = mse_graph(model, optimizer, stage)
        for step in range(3):
            graph(*share(step))
        full = graph.full_state_dict()
        torch.testing.assert_close(full["modules"]["model"], plain.state_dict())
        for name, p in plain.named_parameters():
            held = full["optimizers"][0]["state"][f"model.{name}"]["momentum_buffer"]
            torch.testing.assert_close(held, other.state[p]["momentum_buffer"])
    if dist.get_rank() == 1:
        optimizer.state.pop(model.last.bias)
    raises(gz.CaptureError, "parameters without optimizer state", lambda: graph(*share(3)))


@slow
def check_parameters_come_back_whole_when_the_stage_no_longer_splits_them():
    graph, _ = trained(3, steps=1)
    model, optimizer = graph.model, graph._source.optimizers[0].optimizer
    for step, stage in enumerate((0, 3, 2, 3), 1):
        graph.config.enable_zero(bool(stage), stage=stage or 2)
        graph(*share(step))
        for p in model.parameters():
            assert isinstance(p, DTensor) == (stage == 3) and isinstance(p, nn.Parameter)
            assert isinstance(optimizer.state[p]["momentum_buffer"], DTensor) == (stage > 0)
        assert model.first.weight is model.second.weight
        assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
        same(graph.full_state_dict()["modules"]["model"], eager(step + 1)[0].state_dict())
    placed = gz.to_global(make(0), graph.placement, gz.sbp.B)  # the user's own DTensors stay such
    theirs = mse_graph(placed, sgd(placed), 3)
    theirs(*share(0))
    theirs.config.enable_zero(False)
    theirs(*share(1))
    assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in placed.parameters())


@slow
def check_random_sequences_are_those_of_plain_pytorch():
    from test_sequences import follow, sequence

    for seed, kind, stage in ((1, "sgd", 3), (3, "adamw", 1)):
        steps = [("train", *step[1:]) if step[0] == "eager" else step for step in sequence(seed)]
        follow(steps, kind, stage, gz.placement("cpu", range(2)))


def check_dtensor_inputs_give_dtensor_outputs():
    model = make(0)
    graph = mse_graph(model)
    mesh = graph.placement.mesh()
    x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in batch(0))
    out, loss = graph(x, y).values()
    assert isinstance(out, DTensor) and out.shape == (8, 3) and gz.sbp.of(out) == (gz.sbp.S(0),)
    assert gz.sbp.of(loss) == (gz.sbp.B,)
    torch.testing.assert_close(out.full_tensor(), graph(*share(0))["out"].new_tensor(make(0)(batch(0)[0]).tolist()))


def check_to_global_and_back():
    rank = dist.get_rank()
    place = gz.placement("cpu", range(2))
    local = torch.arange(6.0).reshape(2, 3) + 10 * rank
    x = gz.to_global(local, place, gz.sbp.S(0))
    assert x.shape == (4, 3) and gz.sbp.of(x) == (gz.sbp.S(0),) and torch.equal(gz.to_local(x), local)
    whole = gz.to_global(x, sbp=gz.sbp.B)
    assert torch.equal(gz.to_local(whole), x.full_tensor())
    summed = gz.to_global(local, place, gz.sbp.P).full_tensor()
    torch.testing.assert_close(summed, torch.arange(6.0).reshape(2, 3) * 2 + 10)
    uneven = gz.to_global(torch.ones(3 - rank, 2), place, gz.sbp.S(0))
    assert uneven.shape == (5, 2)
    with pytest.raises(gz.SbpError, match=r"\[2, 3\] long.*\[3, 2\]"):
        gz.to_global(torch.ones(2 + rank, 2), place, gz.sbp.S(0))
    model = make(rank)
    assert gz.to_global(model, place, gz.sbp.B) is model
    assert model.first.weight is model.second.weight and isinstance(model.first.weight, DTensor)
    assert model.first.weight.placements == (Replicate(),)
    torch.testing.assert_close(model.last.weight.full_tensor(), make(0).last.weight)


def check_a_subset_of_ranks_and_strangers():
    if dist.get_rank() == 0:
        graph = gz.Graph(gz.placement("cpu", [0]))
        assert graph.placement.size == 1
    else:
        with pytest.raises(gz.PlacementError, match="rank 1 is not in placement"):
            gz.Graph(gz.placement("cpu", [0]))
    with pytest.raises(gz.PlacementError, match="world has ranks 0 to 1"):
        gz.Graph(gz.placement("cpu", range(4)))


@slow
def check_a_full_state_dict_is_a_snapshot_at_every_stage():
    for stage in range(4):
        graph, _ = trained(stage, steps=1)
        best = graph.full_state_dict()
        kept = copy.deepcopy(best)
        expected = graph(*share(5))
        graph(*share(6))
        for (path, held), (_, was) in zip(*map(pytree.tree_leaves_with_path, (best, kept)), strict=True):
            equal = torch.equal(held, was) if isinstance(was, torch.Tensor) else held == was
            assert equal, f"stage {stage}: {pytree.keystr(path)} follows the training"
        weights = best["modules"]["model"]
        assert weights["first.weight"].data_ptr() == weights["second.weight"].data_ptr()  # a tie takes no memory twice
        graph.load_state_dict(best)
        torch.testing.assert_close(graph(*share(5)), expected)


@slow
def check_modules_are_converted_between_calls_and_train_on_at_every_stage():
    found = []
    for stage in (0, 3):
        model = make(0).float()
        optimizer = torch.optim.AdamW(model.parameters())
        graph = mse_graph(model, optimizer, stage)
        x, y = share(0)
        graph(x.float(), y.float())
        before = model.last.weight
        model.to("cpu").float()
        assert model.last.weight is before
        graph(x.float(), y.float())
        model.double()
        graph(x, y)
        assert optimizer.param_groups[0]["params"][-2] is model.last.weight
        full = graph.full_state_dict()
        found.append(
            [*full["modules"]["model"].values(), *full["optimizers"][0]["state"]["model.last.weight"].values()]
        )
        assert full["modules"]["model"]["last.weight"].dtype == torch.float64
    for plain, split in zip(*found, strict=True):
        torch.testing.assert_close(split, plain)
