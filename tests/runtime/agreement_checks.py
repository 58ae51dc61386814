"""What two gloo processes check of the calls that they must agree on: rank 0 decides, or all raise."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph
from inside import failing, program_of
from process_toys import batch, eager, make, mse_graph, raises, same, sgd, share, trained
from torch import nn

import graphzero as gz
from graphzero.ir import value
from graphzero.runtime.execute.steps import Barrier
from graphzero.runtime.world import device_memory
from graphzero.runtime.world.consensus import BIND, CALL, PROGRAM
from graphzero.testing.timer import AGREEING, AROUND


def check_a_check_that_one_ranks_rows_do_not_meet_stops_both_ranks_and_changes_nothing():
    class Checked(TrainGraph):
        def build(self, x, y):
            assert (x < 100).all(), "x is large"
            return super().build(x, y)

    model = make(0)
    step = mse_graph(model, sgd(model), 2, kind=Checked)
    x, y = share(1)
    first = step(x, y)
    before = step.full_state_dict()["modules"]["model"]
    with pytest.raises(gz.CheckError, match="x is large"):
        step(x + 1000 * dist.get_rank(), y)
    after = step.full_state_dict()["modules"]["model"]
    assert all(torch.equal(after[name], held) for name, held in before.items())
    assert not torch.equal(step(x, y)["out"], first["out"])


def check_disagreement_raises_on_all_ranks_and_says_what_differs():
    rank = dist.get_rank()
    model = make(0)
    optimizer = sgd(model)
    graph = mse_graph(model, optimizer, 2)
    x, y = batch(0)
    for _ in range(2):  # in the first call and in a later one
        raises(
            gz.CaptureError,
            r"rank 0: float64\[2, 6\] S\(0\); rank 1: float64\[3, 6\]",
            lambda: graph(x[: 2 + rank], y[: 2 + rank]),
        )
        graph(*share(0))
    model.train(rank == 0)
    raises(gz.CaptureError, "training flags: rank 0: True; rank 1: False", lambda: graph(*share(0)))
    model.train()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    raises(gz.CaptureError, "lr: rank 0: 0.1; rank 1: 1.1", lambda: graph(*share(0)))
    optimizer.param_groups[0]["lr"] = 0.1
    graph.config.enable_zero(stage=2 + rank)
    raises(gz.CaptureError, "config.zero: rank 0: stage 2 over dp; rank 1: stage 3 over dp", lambda: graph(*share(0)))
    graph.config.enable_zero(stage=2)
    graph(*share(0))


def check_a_profile_tells_waiting_for_a_late_rank_apart():
    graph = mse_graph(make(0))
    graph(*share(0))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    times = gz.testing.profile_step(graph, *share(0))
    assert times.seconds[AROUND] > 0
    assert dist.get_rank() == 1 or times.seconds[AGREEING] > 0.1


def check_a_failure_on_one_rank_raises_on_the_others():
    rank = dist.get_rank()

    class Fails(TrainGraph):
        def build(self, x, y):
            if rank == 1:
                raise ValueError("rank one's own trouble")
            return super().build(x, y)

    model = make(0)
    graph = mse_graph(model, sgd(model), kind=Fails)
    raises(Exception, "rank one's own trouble" if rank else "rank 1 could not prepare", lambda: graph(*share(0)))
    x, y = share(0)
    good = mse_graph(model, sgd(model))
    raises(gz.CaptureError, "requires grad", lambda: good(x.requires_grad_(rank == 1), y))


def check_programs_that_differ_raise_and_show_the_line():
    rank = dist.get_rank()

    class Differs(TrainGraph):
        def build(self, x, y):
            return super().build(x * 2 if rank else x, y)

    model = make(0)
    raises(
        gz.CaptureError,
        r"compiled program[\s\S]*program line",
        lambda: mse_graph(model, sgd(model), kind=Differs)(*share(0)),
    )


def check_what_one_rank_changes_alone_raises_on_all():
    """Were it to compile alone, it would wait for the others for ever."""
    rank = dist.get_rank()

    def another_module(graph):
        graph.model.last = copy.deepcopy(graph.model.last)
        graph._source.optimizers[0].optimizer.param_groups[0]["params"] = list(graph.model.parameters())

    def a_hook(graph):
        graph.model.last.register_forward_hook(lambda module, args, out: 2 * out)

    def another_rate(graph):
        graph._source.optimizers[0].optimizer.param_groups[0]["lr"] = 0.7

    def a_pass(graph):
        graph.config.add_pass(lambda g: g)

    def other_flags(graph):
        graph.model.first.weight.requires_grad_(False)

    for change, text in (
        (another_module, "modules: rank 0: as in an earlier call; rank 1: not as in any"),
        (a_hook, "modules: rank 0: as in an earlier call; rank 1: not as in any"),
        (another_rate, "lr: rank 0: 0.1; rank 1: 0.7"),
        (a_pass, r"config.user_passes: rank 0: \(\); rank 1: \(.*lambda.* after zero\)"),
        (other_flags, "no grad"),
    ):
        model = make(0)
        graph = mse_graph(model, sgd(model))
        graph(*share(0))
        if rank == 1:
            change(graph)
        raises(gz.CaptureError, text, lambda graph=graph: graph(*share(0)))


def check_another_model_structure_or_passes_on_one_rank_raise_on_all():
    rank = dist.get_rank()
    x, y = share(0)
    for model in (nn.Linear(6, 3).double(), nn.Linear(6, 3, bias=rank == 0).double()):
        if rank == 1 and model.bias is not None:
            model = nn.Sequential(model)
        raises(gz.CaptureError, "tensor model", lambda model=model: mse_graph(model)(x, y))
    model = make(0)
    raises(gz.CaptureError, "input structure", lambda: mse_graph(model)(x, y=y) if rank else mse_graph(model)(x, y))

    def breaks(graph):
        raise KeyError("of this rank")

    graph = mse_graph(model)
    graph.config.add_pass(breaks if rank else (lambda graph: graph), after="pin")
    raises(gz.CaptureError, "config.user_passes: rank 0: .*lambda.*; rank 1: .*breaks", lambda: graph(x, y))

    def same_name(graph):
        if rank == 1:
            raise KeyError("of this rank")
        return graph

    graph = mse_graph(model)
    graph.config.add_pass(same_name, after="pin")
    raises(Exception, "of this rank" if rank else "rank 1 could not prepare.*KeyError", lambda: graph(x, y))


def check_hyperparameters_of_rank_0_count_even_where_they_decide_the_program():
    rank = dist.get_rank()
    model = make(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0 if rank else 0.1)
    mse_graph(model, optimizer)(*share(0))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def check_a_rank_without_values_is_announced():
    model = make(0)
    if dist.get_rank() == 1:
        model.to("meta")
    raises(gz.ConfigError, "meta device", lambda: mse_graph(model, sgd(model))(*share(0)))


def check_first_mode_compares_only_the_program_in_later_calls():
    model = make(0)
    graph = mse_graph(model, sgd(model))
    graph.config.check_inputs = "first"
    graph(*share(0))
    talked = []
    agree = graph._source.ranks.agree
    graph._source.ranks.agree = lambda *args: talked.append(args[0]) or agree(*args)
    graph(*share(1))
    assert talked == [PROGRAM]
    graph(*(t[:2] for t in share(1)))
    assert talked == [PROGRAM, CALL, PROGRAM, BIND]


def _fails(graph, at, error, inputs, text=None):
    """A run ends with ``error`` in step number ``at`` of the program, after what that step does, or because the other
    rank, which stops there too, is heard of before."""
    with failing(graph, at, error):
        raises((type(error), gz.RankError), text, lambda: graph(*inputs))


def check_a_failed_call_can_be_made_again_unless_it_was_in_its_update():
    graph, _ = trained(2, steps=1)
    program = program_of(graph)
    for at in range(program.first_write):  # with transfers under way in some
        _fails(graph, at, RuntimeError("odd"), share(9), "odd")
    graph(*share(1))
    saved = graph.full_state_dict()
    same(saved["modules"]["model"], eager(2)[0].state_dict())
    for at in (program.first_write, len(program.steps) - 1):
        _fails(graph, at, KeyboardInterrupt(), share(2))
        raises(gz.GraphZeroError, "load_state_dict", lambda: graph(*share(2)))
        graph.load_state_dict(saved)
    graph._selection.progress.taken = dist.get_rank()
    raises(gz.CaptureError, r"steps taken .*load_state_dict.*: rank 0: 0; rank 1: 1", lambda: graph(*share(2)))
    graph.load_state_dict(saved)
    graph(*share(2))
    same(graph.full_state_dict()["modules"]["model"], eager(3)[0].state_dict())


def check_an_optimizer_in_backward_steps_the_same_and_a_call_that_fails_after_its_first_step_says_so():
    wanted, _ = trained(2, steps=2)
    model = make(0)
    graph = mse_graph(model, sgd(model), 2)
    graph.config.set_optimizer_in_backward()
    graph.config.bucket_bytes = 100
    optimizer = graph._source.optimizers[0].optimizer
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        graph(*share(step))
    same(graph.full_state_dict()["modules"]["model"], wanted.full_state_dict()["modules"]["model"])
    program = program_of(graph)
    behind = [step.node for step in program.steps[program.first_write :] if isinstance(step, Barrier)]
    assert "backward" in map(value.phase_of, behind)
    saved = graph.full_state_dict()
    for at, is_true in ((program.first_write - 1, True), (program.first_write, False)):
        _fails(graph, at, RuntimeError("odd"), share(2), "odd")
        if not is_true:
            raises(gz.GraphZeroError, "load_state_dict", lambda: graph(*share(2)))
            graph.load_state_dict(saved)
    graph(*share(2))


def check_an_attribute_that_build_reads_is_agreed_on():
    class Scaled(TrainGraph):
        factor = 1.0

        def build(self, x, y):
            return self.model(x) * self.factor

    graph = mse_graph(make(0), kind=Scaled)
    graph(*share(0))
    graph.factor = 1.0 + dist.get_rank()
    raises(gz.CaptureError, "attribute factor: rank 0: 1.0; rank 1: 2.0", lambda: graph(*share(0)))
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


def check_draws_are_those_of_virtual_ranks():
    class Drop(gz.Graph):
        def __init__(self, placement=None):
            super().__init__(placement)
            self.drop = nn.Dropout(0.5)

        def build(self, x):
            return self.drop(x), torch.normal(x, 0.1), torch.randperm(12)

    found = []
    for graph, size in (Drop(), 3), (Drop(gz.placement("cpu", range(3), virtual=True)), 6):
        torch.manual_seed(5)
        found.append([graph(torch.ones(size, 4)) for _ in range(2)])
    for real, whole in zip(*found, strict=True):
        for mine, of_all in zip(real[:2], whole[:2], strict=True):
            assert torch.equal(mine, of_all.chunk(2)[dist.get_rank()])
        assert torch.equal(real[2], whole[2])


def check_ranks_of_unlike_machines_take_one_stage_and_keep_alike():
    """The first rank's machine has room for any stage, the second's for stage 3 and what it can keep gathered."""
    rank, layers = dist.get_rank(), [layer for _ in range(4) for layer in (nn.Linear(128, 128).double(), nn.Tanh())]
    batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def trained_at(stage):
        model = nn.Sequential(*copy.deepcopy(layers))
        step = mse_graph(model, sgd(model), stage)
        return [step(batch, torch.zeros_like(batch)) for _ in range(2)], step.plan

    wanted, plan = trained_at(3)
    room = plan.memory.peak + 2**17 if rank else 2**40
    machines = device_memory._machine
    device_memory._machine = lambda: device_memory.DeviceMemory(f"machine {rank}", int(room / device_memory.SHARE) + 8)
    try:
        found, plan = trained_at("auto")
    finally:
        device_memory._machine = machines
    assert plan.stage == 3 and plan.kept, plan
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check_graphs_of_equal_shapes_called_in_another_order_raise_instead_of_mixing_their_gradients():
    rank, models = dist.get_rank(), (make(1), make(2))
    first, second = (mse_graph(model, sgd(model)) for model in models)
    named = r"rank 0: a call of Train[\s\S]*rank 1: a call of Train"
    for graphs in ((first, second), (second, first)):
        raises(gz.GraphZeroError, named, lambda graphs=graphs: graphs[rank](*share(0)))
    for graph in (first, second):  # once each has its program
        graph(*share(0))
    before = copy.deepcopy([model.state_dict() for model in models])
    raises(gz.GraphZeroError, r"Train \(number \d+ of that name\)", lambda: (first, second)[rank](*share(0)))
    for model, was in zip(models, before, strict=True):
        same(model.state_dict(), was)
    first(*share(1))
    wanted = eager_steps(make(1), 2)
    same(first.full_state_dict()["modules"]["model"], wanted.state_dict())


def eager_steps(model, steps):
    optimizer = sgd(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def check_other_actions_on_one_rank_raise_on_all_and_say_who_asks_for_what():
    rank = dist.get_rank()
    graph, _ = trained(3, steps=1)
    for action, text in (
        (lambda: graph.compile(*share(0)), r"compile\(\) of Train"),
        (graph.full_state_dict, r"full_state_dict\(\) of Train"),
        (lambda: gz.to_global(make(0), graph.placement, gz.sbp.B), "to_global of Tied"),
    ):
        raises(gz.GraphZeroError, f"rank 0: {text}[\\s\\S]*rank 1: a call of Train", lambda action=action:
               graph(*share(1)) if rank else action())  # fmt: skip
    graph(*share(1))
    same(graph.full_state_dict()["modules"]["model"], eager(2)[0].state_dict())


def check_one_rank_alone_may_look_at_a_graph_before_and_after_its_first_call():
    model = make(0)
    graph = mse_graph(model, sgd(model), 2)
    for _ in range(2):
        if dist.get_rank() == 1:
            assert "model.first.weight" in repr(graph)
            assert "first.weight" in graph.state_dict()["modules"]["model"]
        graph(*share(0))
    fresh = mse_graph(make(0), None, 3).compile(*share(0))
    if dist.get_rank() == 0:
        fresh.state_dict()
    fresh(*share(0))


def check_a_module_that_is_placed_otherwise_on_one_rank_raises_on_all():
    rank, where = dist.get_rank(), gz.placement("cpu", range(2))
    text = r"last.bias: rank 0: float64\[3\] to B; rank 1: float64\[3\] to S\(0\)"
    wanted = {"last.bias": gz.sbp.S(0) if rank else gz.sbp.B}
    raises(gz.GraphZeroError, text, lambda: gz.to_global(make(0), where, wanted))
    wrong = {"odd": gz.sbp.B} if rank else gz.sbp.B
    raises(gz.SbpError, "fits no parameter", lambda: gz.to_global(make(0), where, wrong))


def check_what_is_put_in_on_one_rank_alone_raises_on_all_and_on_all_is_taken_from_rank_0():
    rank = dist.get_rank()

    class Normed(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(6, 3), nn.BatchNorm1d(3))
            self.double()

    def changed(graph, path):
        module, name = graph.model[0 if "weight" in path else 1], path
        put = torch.full_like(getattr(module, name), 2.0 + dist.get_rank())
        if name == "weight":
            put = nn.Parameter(put)
            graph._source.optimizers[0].optimizer.param_groups[0]["params"][0] = put
        setattr(module, name, put)

    for paths in (("running_mean", None), ("weight", None), (None, "running_var"), ("running_mean", "running_var")):
        torch.manual_seed(0)
        model = Normed()
        graph = mse_graph(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
        graph(*share(0))
        if paths[rank]:
            changed(graph, paths[rank])
        raises(gz.GraphZeroError, "new here, to be taken from rank 0", lambda graph=graph: graph(*share(1)))
        if not paths[rank] or paths[0] and paths[1]:
            changed(graph, paths[1 - rank])
        graph(*share(1))  # every rank has put in the same ones
        everyone = [None, None]
        dist.all_gather_object(everyone, {name: x.tolist() for name, x in model.state_dict().items()})
        assert everyone[0] == everyone[1]


def check_a_state_that_one_rank_alone_has_replaced_raises_on_all():
    rank = dist.get_rank()
    for stage in (0, 2):
        graph, _ = trained(stage, steps=1)
        held = graph._source.optimizers[0].optimizer.state[graph.model.last.weight]
        if rank == 1:
            before, held["momentum_buffer"] = held["momentum_buffer"], torch.ones(3, 5, dtype=torch.float64)
        raises(gz.CaptureError, "momentum_buffer: rank 0: .*; rank 1: .*new here", lambda graph=graph: graph(*share(1)))
        if rank == 1:
            held["momentum_buffer"] = before
        graph(*share(1))
        same(graph.full_state_dict()["modules"]["model"], eager(2)[0].state_dict())


def check_ranks_load_one_checkpoint_or_none_does():
    for stage in (0, 3):
        _ranks_load_one_checkpoint_or_none_does(stage)


def _ranks_load_one_checkpoint_or_none_does(stage):
    rank = dist.get_rank()
    graph, _ = trained(stage, steps=1)
    first = graph.full_state_dict()
    graph(*share(1))
    second = graph.full_state_dict()
    mine = (first, second)[rank]
    text = r"modules.model.first.weight: rank 0: float64\[5, 6\] plain, hash"
    raises(gz.CaptureError, text, lambda: graph.load_state_dict(mine))
    other_draws = {**first, "random": {"seed": 3 + rank, "step": 1}}
    raises(gz.CaptureError, "random.0: rank 0: 3; rank 1: 4", lambda: graph.load_state_dict(other_draws))
    broken = {**first, "modules": {}} if rank else first
    raises(gz.CheckpointError, "missing: modules.model", lambda: graph.load_state_dict(broken))
    text = r"rank 0: load_state_dict\(\) of Train[\s\S]*rank 1: a call of Train"
    raises(gz.GraphZeroError, text, lambda: graph(*share(1)) if rank else graph.load_state_dict(first))
    same(graph.full_state_dict()["modules"]["model"], second["modules"]["model"])
    graph.load_state_dict(first)
    graph(*share(1))
    same(graph.full_state_dict()["modules"]["model"], second["modules"]["model"])
    graph.load_state_dict(graph.state_dict())


def check_what_rank_0_alone_loads_before_the_first_call_counts_for_all():
    saved = trained(0, steps=2)[0].full_state_dict()
    model = make(5)
    graph = mse_graph(model, sgd(model), 2)
    if dist.get_rank() == 0:
        graph.load_state_dict({**saved, "schedulers": [None]})
    graph(*share(2))
    same(graph.full_state_dict()["modules"]["model"], eager(3)[0].state_dict())


def check_other_draws_on_one_rank_raise_on_all():
    class Drop(gz.Graph):
        def build(self, x):
            return nn.functional.dropout(x, 0.5)

    graph = Drop()
    graph(torch.ones(3, 4))
    graph._source.state().random.step += dist.get_rank()
    text = r"random draws: rank 0: seed \d+, step 1; rank 1: seed \d+, step 2"
    raises(gz.CaptureError, text, lambda: graph(torch.ones(3, 4)))
    graph.load_state_dict({"random": {"seed": 1, "step": 5}}, strict=False)
    graph(torch.ones(3, 4))


class Weighted(gz.Graph):
    """Counts, weights and a batch: the first two are for all ranks the same."""

    def build(self, x, weights, count):
        return x * weights / count


def check_inputs_that_ranks_are_given_alike_are_compared():
    rank, wide = dist.get_rank(), torch.ones(40)
    graph = Weighted()
    graph.config.set_input("weights", sbp=gz.sbp.B)
    counts = r"values of input count: rank 0: 8; rank 1: 9"
    raises(gz.CaptureError, counts, lambda: graph(torch.ones(2, 40), wide, torch.tensor(8 + rank)))
    large = r"other values of input weights, which is float32\[40\] B.*\n?.*rank 0: hash \w+; rank 1: hash"
    raises(gz.CaptureError, large, lambda: graph(torch.ones(2, 40), wide + rank, torch.tensor(8)))
    for step in range(3):
        graph(torch.ones(2, 40), wide, torch.tensor(8 + step))
    raises(gz.CaptureError, counts, lambda: graph(torch.ones(2, 40), wide, torch.tensor(8 + rank)))
    graph(torch.ones(2, 40), wide + rank, torch.tensor(8))  # large ones are looked at in the first calls only
    graph.config.check_inputs = "values"
    raises(gz.CaptureError, large, lambda: graph(torch.ones(2, 40), wide + rank, torch.tensor(8)))
    graph.compile(torch.ones(2, 40, device="meta"), wide.to("meta"), torch.tensor(8, device="meta"))
    graph(torch.ones(2, 40), wide, torch.tensor(8))


def check_other_settings_of_the_check_on_one_rank_raise_on_all():
    graph = mse_graph(make(0))
    graph(*share(0))
    graph.config.check_inputs = "values" if dist.get_rank() else "always"
    raises(gz.CaptureError, "config.check_inputs: rank 0: always; rank 1: values", lambda: graph(*share(0)))
    graph.config.check_inputs, graph.config.max_programs = "always", 64 + dist.get_rank()
    raises(gz.CaptureError, "config.max_programs: rank 0: 64; rank 1: 65", lambda: graph(*share(0)))


def check_ranks_that_sum_for_themselves_use_equal_threads_or_raise():
    rank, before = dist.get_rank(), torch.get_num_threads()

    def clipped(stage):
        model = make(0)
        graph = mse_graph(model, None, stage)
        graph.add_optimizer(sgd(model), clip_grad_norm=0.1)
        graph.build = lambda x, y: nn.functional.mse_loss(graph.model(x), y).backward()
        return graph

    text = r"arithmetic of 'sum.*: rank 0: 1 thread, .*; rank 1: 2 threads[\s\S]*set_num_threads"
    later, split, bound = clipped(0), clipped(3), clipped(0)
    bound(*share(0))
    torch.set_num_threads(1 + rank)
    try:
        raises(gz.CaptureError, text, lambda: later(*share(0)))
        raises(gz.CaptureError, "threads: rank 0: 1; rank 1: 2", lambda: bound(*share(0)))
        split(*share(0))  # each rank sums its own pieces
    finally:
        torch.set_num_threads(before)
    later(*share(0))
    bound(*share(0))
