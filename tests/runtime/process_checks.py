"""What two gloo processes check of a Graph; ``test_state_processes`` starts them once and reports each check."""

import copy
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import graphzero as gz


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(6, 5)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + self.second(x)))


def make(seed):
    torch.manual_seed(seed)
    return Tied().double()


def batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


def share(seed):
    return tuple(t.chunk(2)[dist.get_rank()] for t in batch(seed))


class Train(gz.Graph):
    def __init__(self, model, optimizer=None, stage=0, lr_sch=None):
        super().__init__()
        self.model = model
        if optimizer is not None:
            self.add_optimizer(optimizer, lr_sch=lr_sch)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x, y):
        out = self.model(x)
        loss = nn.functional.mse_loss(out, y)
        if self._optimizers:
            loss.backward()
        return out, loss


def sgd(model, lr=0.1):
    return torch.optim.SGD([{"params": list(model.parameters())}], lr=lr, momentum=0.9)


def eager(steps, seed=0):
    model = make(seed)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer


def trained(stage, steps=3):
    """Only rank 0 begins with the right values, rate and schedule."""
    rank = dist.get_rank()
    model = make(rank)
    optimizer = sgd(model, lr=0.1 if rank == 0 else 7.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    graph = Train(model, optimizer, stage, scheduler)
    found = [graph(*share(step)) for step in range(steps)]
    return graph, found


def same(ours, theirs):
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, name=name: f"{name}: {m}")


def check_steps_are_eager_ones_at_every_stage():
    for stage in range(4):
        graph, found = trained(stage)
        model, optimizer = eager(3)
        full = graph.full_state_dict()
        same(full["modules"]["model"], model.state_dict())
        x, _ = batch(2)
        assert found[2][0].shape == (4, 3) and type(found[2][0]) is torch.Tensor
        losses = [torch.zeros_like(found[2][1]) for _ in range(2)]
        dist.all_gather(losses, found[2][1])
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
    Train(model, sgd(model), 3)(*share(0))
    twin(batch(0)[0])
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)
    torch.testing.assert_close(model[1].running_var, twin[1].running_var)


def check_stage_3_puts_dtensors_everywhere_and_stage_2_only_in_states():
    for stage in (2, 3):
        model = make(0)
        optimizer = sgd(model)
        before = list(model.parameters())
        graph = Train(model, optimizer, stage)
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
    evaluate, again = Train(model), Train(model, sgd(model), 0)
    with torch.no_grad():
        whole = make(0)
        whole.load_state_dict(graph.full_state_dict()["modules"]["model"])
    out, _ = evaluate(*share(5))
    torch.testing.assert_close(out, whole(batch(5)[0]).detach().chunk(2)[dist.get_rank()])
    split = list(model.parameters())
    again(*share(6))
    assert all(p is q and isinstance(p, DTensor) for p, q in zip(model.parameters(), split, strict=True))
    graph(*share(7))


def _raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()
    dist.barrier()


def check_disagreement_raises_on_all_ranks_and_says_what_differs():
    rank = dist.get_rank()
    model = make(0)
    optimizer = sgd(model)
    graph = Train(model, optimizer, 2)
    x, y = batch(0)
    for _ in range(2):  # in the first call and in a later one
        _raises(
            gz.CaptureError,
            r"rank 0: float64\[2, 6\] S\(0\); rank 1: float64\[3, 6\]",
            lambda: graph(x[: 2 + rank], y[: 2 + rank]),
        )
        graph(*share(0))
    model.train(rank == 0)
    _raises(gz.CaptureError, "training flags: rank 0: True; rank 1: False", lambda: graph(*share(0)))
    model.train()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    _raises(gz.CaptureError, "lr: rank 0: 0.1; rank 1: 1.1", lambda: graph(*share(0)))
    optimizer.param_groups[0]["lr"] = 0.1
    graph.config.enable_zero(stage=2 + rank)
    _raises(gz.CaptureError, "configuration: rank 0: .*stage 2", lambda: graph(*share(0)))
    graph.config.enable_zero(stage=2)
    graph(*share(0))


def check_a_failure_on_one_rank_raises_on_the_others():
    rank = dist.get_rank()

    class Fails(Train):
        def build(self, x, y):
            if rank == 1:
                raise ValueError("rank one's own trouble")
            return super().build(x, y)

    model = make(0)
    graph = Fails(model, sgd(model))
    _raises(Exception, "rank one's own trouble" if rank else "rank 1 could not prepare", lambda: graph(*share(0)))
    x, y = share(0)
    good = Train(model, sgd(model))
    _raises(gz.CaptureError, "requires grad", lambda: good(x.requires_grad_(rank == 1), y))


def check_programs_that_differ_raise_and_show_the_line():
    rank = dist.get_rank()

    class Differs(Train):
        def build(self, x, y):
            return super().build(x * 2 if rank else x, y)

    model = make(0)
    _raises(gz.CaptureError, r"compiled program[\s\S]*program line", lambda: Differs(model, sgd(model))(*share(0)))


def check_what_one_rank_changes_alone_raises_on_all():
    """Were it to compile alone, it would wait for the others for ever."""
    rank = dist.get_rank()

    def another_module(graph):
        graph.model.last = copy.deepcopy(graph.model.last)
        graph._optimizers[0].optimizer.param_groups[0]["params"] = list(graph.model.parameters())

    def a_hook(graph):
        graph.model.last.register_forward_hook(lambda module, args, out: 2 * out)

    def another_rate(graph):
        graph._optimizers[0].optimizer.param_groups[0]["lr"] = 0.7

    def a_pass(graph):
        graph.config.add_pass(lambda g: g)

    def other_flags(graph):
        graph.model.first.weight.requires_grad_(False)

    for change, text in (
        (another_module, "modules: rank 0: as in an earlier call; rank 1: not as in any"),
        (a_hook, "modules: rank 0: as in an earlier call; rank 1: not as in any"),
        (another_rate, "lr: rank 0: 0.1; rank 1: 0.7"),
        (a_pass, "configuration: rank 0: .*; rank 1: .*lambda"),
        (other_flags, "no grad"),
    ):
        model = make(0)
        graph = Train(model, sgd(model))
        graph(*share(0))
        if rank == 1:
            change(graph)
        _raises(gz.CaptureError, text, lambda graph=graph: graph(*share(0)))


def check_another_model_structure_or_passes_on_one_rank_raise_on_all():
    rank = dist.get_rank()
    x, y = share(0)
    for model in (nn.Linear(6, 3).double(), nn.Linear(6, 3, bias=rank == 0).double()):
        if rank == 1 and model.bias is not None:
            model = nn.Sequential(model)
        _raises(gz.CaptureError, "tensor model", lambda model=model: Train(model)(x, y))
    model = make(0)
    _raises(gz.CaptureError, "input structure", lambda: Train(model)(x, y=y) if rank else Train(model)(x, y))

    def breaks(graph):
        raise KeyError("of this rank")

    graph = Train(model)
    graph.config.add_pass(breaks if rank else (lambda graph: graph), after="pin")
    _raises(gz.CaptureError, "configuration", lambda: graph(x, y))

    def same_name(graph):
        if rank == 1:
            raise KeyError("of this rank")
        return graph

    graph = Train(model)
    graph.config.add_pass(same_name, after="pin")
    _raises(Exception, "of this rank" if rank else "rank 1 could not prepare.*KeyError", lambda: graph(x, y))


def check_losses_that_are_not_finite_pass_through():
    for stage in range(4):
        model, twin = make(0), make(0)
        graph = Train(model, None, stage)
        graph.add_optimizer(sgd(model), clip_grad_norm=1.0)
        x, y = batch(0)
        x[0, 0] = float("inf")
        twin_loss = nn.functional.mse_loss(twin(x), y)
        twin_loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        graph.build = lambda x, y, graph=graph: nn.functional.mse_loss(graph.model(x), y).backward()
        graph(*(t.chunk(2)[dist.get_rank()] for t in (x, y)))
        torch.testing.assert_close(graph.grad_norm, norm, equal_nan=True)


def check_hyperparameters_of_rank_0_count_even_where_they_decide_the_program():
    rank = dist.get_rank()
    model = make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0 if rank else 0.1)
    Train(model, optimizer)(*share(0))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def check_a_rank_without_values_is_announced():
    model = make(0)
    if dist.get_rank() == 1:
        model.to("meta")
    _raises(gz.ConfigError, "meta device", lambda: Train(model, sgd(model))(*share(0)))


def check_draws_are_those_of_virtual_ranks():
    class Drop(gz.Graph):
        def __init__(self, placement=None):
            super().__init__(placement)
            self.drop = nn.Dropout(0.5)

        def build(self, x):
            return self.drop(x)

    found = []
    for graph, size in (Drop(), 3), (Drop(gz.placement("cpu", range(3), virtual=True)), 6):
        torch.manual_seed(5)
        found.append([graph(torch.ones(size, 4)) for _ in range(2)])
    for real, whole in zip(*found, strict=True):
        assert torch.equal(real, whole.chunk(2)[dist.get_rank()])


def check_first_mode_does_not_talk_in_later_calls():
    model = make(0)
    graph = Train(model, sgd(model))
    graph.config.check_inputs = "first"
    graph(*share(0))
    talked = []
    agree = graph._ranks.agree
    graph._ranks.agree = lambda *args: (talked.append(args[0]), agree(*args))
    graph(*share(1))
    assert not talked
    graph(*(t[:2] for t in share(1)))
    assert len(talked) == 2


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
            other = Train(model, optimizer, stage, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i)))
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
    optimizer = graph._optimizers[0].optimizer
    saved = copy.deepcopy(graph.full_state_dict())  # else, as in torch, it follows the model
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
        graph = Train(model, optimizer, stage)
        for step in range(3):
            graph(*share(step))
        full = graph.full_state_dict()
        torch.testing.assert_close(full["modules"]["model"], plain.state_dict())
        for name, p in plain.named_parameters():
            held = full["optimizers"][0]["state"][f"model.{name}"]["momentum_buffer"]
            torch.testing.assert_close(held, other.state[p]["momentum_buffer"])
    if dist.get_rank() == 1:
        optimizer.state.pop(model.last.bias)
    _raises(gz.CaptureError, "parameters without optimizer state", lambda: graph(*share(3)))


def check_parameters_come_back_whole_when_the_stage_no_longer_splits_them():
    graph, _ = trained(3, steps=1)
    model, optimizer = graph.model, graph._optimizers[0].optimizer
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
    theirs = Train(placed, sgd(placed), 3)
    theirs(*share(0))
    theirs.config.enable_zero(False)
    theirs(*share(1))
    assert all(isinstance(p, DTensor) and p.placements == (Replicate(),) for p in placed.parameters())


def _failing(graph, at, error):
    """Let the next run end with ``error`` in step number ``at`` of the program, after what that step does."""
    steps = graph._last.executor(graph._world).program.steps
    step = steps[at]

    def fail(envs):
        steps[at] = step
        step(envs)
        raise error

    steps[at] = fail


def check_a_failed_call_can_be_made_again_unless_it_was_in_its_update():
    graph, _ = trained(2, steps=1)
    program = graph._last.executor(graph._world).program
    for at in range(program.first_write):  # with transfers under way in some
        _failing(graph, at, RuntimeError("odd"))
        _raises(RuntimeError, "odd", lambda: graph(*share(9)))
    graph(*share(1))
    saved = copy.deepcopy(graph.full_state_dict())
    same(saved["modules"]["model"], eager(2)[0].state_dict())
    for at in (program.first_write, len(program.steps) - 1):
        _failing(graph, at, KeyboardInterrupt())
        _raises(KeyboardInterrupt, "", lambda: graph(*share(2)))
        _raises(gz.GraphZeroError, "load_state_dict", lambda: graph(*share(2)))
        graph.load_state_dict(saved)
    graph._stopped = dist.get_rank()
    _raises(gz.CaptureError, "the last call stopped in step: rank 0: 0; rank 1: 1", lambda: graph(*share(2)))
    graph._stopped = None
    graph(*share(2))
    same(graph.full_state_dict()["modules"]["model"], eager(3)[0].state_dict())


def check_an_attribute_that_build_reads_is_agreed_on():
    class Scaled(Train):
        factor = 1.0

        def build(self, x, y):
            return self.model(x) * self.factor

    graph = Scaled(make(0))
    graph(*share(0))
    graph.factor = 1.0 + dist.get_rank()
    _raises(gz.CaptureError, "attribute factor: rank 0: 1.0; rank 1: 2.0", lambda: graph(*share(0)))
    graph.factor = 2.0
    found, wanted = graph(*share(0)), make(0)(batch(0)[0]) * 2
    torch.testing.assert_close(found, wanted.detach().chunk(2)[dist.get_rank()])


def check_a_seed_set_on_rank_0_restarts_the_draws():
    class Drop(gz.Graph):
        def build(self, x):
            return nn.functional.dropout(x, 0.5)

    torch.manual_seed(dist.get_rank())
    graph = Drop()
    first, second = graph(torch.ones(3, 4)), graph(torch.ones(3, 4))
    assert not torch.equal(first, second)
    torch.manual_seed(7 + dist.get_rank())
    other = graph(torch.ones(3, 4))
    torch.manual_seed(dist.get_rank())
    assert torch.equal(graph(torch.ones(3, 4)), first) and not torch.equal(other, first)
    if dist.get_rank() == 1:  # rank 0 decides
        torch.manual_seed(8)
    assert torch.equal(graph(torch.ones(3, 4)), second)


def check_random_sequences_are_those_of_plain_pytorch():
    from test_sequences import follow, sequence

    for seed, kind, stage in ((1, "sgd", 3), (3, "adamw", 1)):
        steps = [("train", *step[1:]) if step[0] == "eager" else step for step in sequence(seed)]
        follow(steps, kind, stage, gz.placement("cpu", range(2)))


def check_dtensor_inputs_give_dtensor_outputs():
    model = make(0)
    graph = Train(model)
    mesh = graph.placement.mesh()
    x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in batch(0))
    out, loss = graph(x, y)
    assert isinstance(out, DTensor) and out.shape == (8, 3) and gz.sbp.of(out) == (gz.sbp.S(0),)
    assert gz.sbp.of(loss) == (gz.sbp.B,)
    torch.testing.assert_close(out.full_tensor(), graph(*share(0))[0].new_tensor(make(0)(batch(0)[0]).tolist()))


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
        with pytest.raises(gz.PlacementError, match="no part"):
            gz.Graph(gz.placement("cpu", [0]))
    with pytest.raises(gz.PlacementError, match="world has ranks 0 to 1"):
        gz.Graph(gz.placement("cpu", range(4)))


CHECKS = {name.removeprefix("check_"): fn for name, fn in list(globals().items()) if name.startswith("check_")}


def work(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        try:
            check()
            results[f"{name}/{rank}"] = ""
        except BaseException:
            results[f"{name}/{rank}"] = traceback.format_exc()
            break  # the other rank may wait for this one
    dist.destroy_process_group()
