"""float16: the loss scale goes on as torch's GradScaler does, a step with an overflow changes nothing."""

import copy

import pytest
import torch
from graphs import TrainGraph
from precision_toys import F16, Plain, adamw, amp_graph, batch_of, mlp, virtual
from torch import nn

FINITE, OVERFLOW = 0, 1
SEQUENCES = {
    "all finite": [FINITE] * 8,
    "all overflow": [OVERFLOW] * 5,
    "mixed": [FINITE, OVERFLOW, FINITE, FINITE, FINITE, FINITE, OVERFLOW, OVERFLOW, FINITE, FINITE, FINITE],
}
SCALING = {"init_scale": 2.0**10, "growth_interval": 3}


def fed(model, step, overflow, row=slice(None)):
    """A batch whose gradients overflow, in the given rows of it alone."""
    x, y = batch_of(model, step)
    if overflow:
        x = x.clone()
        x[row] = 3e4
        y = y.clone()
        y[row] = -6e4
    return x, y


@pytest.mark.parametrize(
    "name, stage", [("all finite", 1), ("all overflow", 2), ("mixed", 0), ("mixed", 2), ("mixed", 3)]
)
def test_the_scale_is_that_of_grad_scaler(name, stage):
    model, twin = mlp(), mlp()
    graph = amp_graph(model, stage, virtual(2), F16, **SCALING)
    plain = Plain(twin, F16, **SCALING)
    assert not graph.skipped and graph.loss_scale == 2.0**10
    for step, overflow in enumerate(SEQUENCES[name]):
        before = copy.deepcopy(graph.full_state_dict()) if step else None
        graph(*fed(model, step, overflow))
        plain.step(*fed(model, step, overflow))
        assert graph.skipped is bool(overflow)
        assert graph.loss_scale == plain.scaler.get_scale()
        assert int(graph.state_dict()["loss_scale"]["growth_tracker"]) == plain.scaler._get_growth_tracker()
        if overflow and before is not None:
            after = graph.full_state_dict()
            check_same(before["modules"], after["modules"])
            check_same(before["optimizers"][0]["state"], after["optimizers"][0]["state"])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    steps = {float(state["step"]) for state in graph.optimizer.state.values()}
    assert steps == {float(SEQUENCES[name].count(FINITE))}


def check_same(before, after):
    for key, held in before.items():
        if isinstance(held, torch.Tensor):
            assert torch.equal(held, after[key]), key
        else:
            check_same(held, after[key])


@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_in_the_share_of_one_rank_skips_the_step_on_all(stage):
    model = mlp()
    graph = amp_graph(model, stage, virtual(4), F16, **SCALING)
    graph(*fed(model, 0, FINITE))
    before = copy.deepcopy(model.state_dict())
    graph(*fed(model, 1, OVERFLOW, row=slice(6, 8)))  # the last rank's
    assert graph.skipped
    check_same(before, model.state_dict())
    graph(*fed(model, 2, FINITE))
    assert not graph.skipped and not torch.equal(before["body.0.weight"], model.body[0].weight)


def test_the_scale_falls_after_as_many_overflows_as_hysteresis_and_not_below_its_least():
    model = mlp()
    graph = amp_graph(model, 2, virtual(2), F16, init_scale=16.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    found = []
    for step, overflow in enumerate([1, 1, 1, 1, 0, 0, 1, 1]):
        graph(*fed(model, step, overflow))
        found.append((graph.loss_scale, int(graph.state_dict()["loss_scale"]["hysteresis"])))
    # Megatron-LM's: the first overflow is stood, each one after it halves; growing fills up again
    assert found == [(16, 1), (8, 0), (4, 0), (4, 0), (4, 0), (8, 2), (8, 1), (4, 0)]


def test_with_consecutive_hysteresis_a_good_step_counts_overflows_anew():
    model = mlp()
    told = {"init_scale": 16.0, "growth_interval": 3, "hysteresis": 2, "min_scale": 4.0, "consecutive_hysteresis": True}
    graph = amp_graph(model, 2, virtual(2), F16, **told)
    found = []
    for step, overflow in enumerate([1, 0, 1, 1, 0, 0, 0]):
        graph(*fed(model, step, overflow))
        found.append((graph.loss_scale, int(graph.state_dict()["loss_scale"]["hysteresis"])))
    # as DeepSpeed's DynamicLossScaler, but that its first growth is one step later
    assert found == [(16, 1), (16, 2), (16, 1), (8, 0), (8, 2), (8, 2), (16, 2)]


def test_a_scheduler_does_not_step_with_a_step_that_is_skipped():
    model = mlp()
    halving = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    graph = amp_graph(model, 2, virtual(2), F16, scheduler=halving, **SCALING)
    rates = []
    for step, overflow in enumerate([0, 1, 1, 0]):
        graph(*fed(model, step, overflow))
        rates.append(graph.optimizer.param_groups[0]["lr"])
    assert rates == [5e-3, 5e-3, 5e-3, 2.5e-3]


def test_the_norm_is_that_of_unscaled_gradients_and_its_sum_goes_with_the_count_of_overflows():
    found = []
    for scale in (1.0, 2.0**12):
        model = mlp()
        graph = amp_graph(model, 2, virtual(2), F16, clip=0.5, init_scale=scale)
        graph(*batch_of(model, 0))
        found.append(float(graph.grad_norm))
        sums = [c for c in graph.plan.collectives if c.phase == "update"]
        assert [(c.kind, c.bytes) for c in sums] == [("all_reduce", 8.0)]
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_code_after_backward_sees_unscaled_gradients():
    class Clips(TrainGraph):
        def build(self, *batch):
            loss = self.model(*batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            return loss, norm

    told = {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **SCALING}
    clips = amp_graph(mlp(), 2, virtual(2), F16, kind=Clips, **told)
    told = amp_graph(mlp(), 2, virtual(2), F16, clip=0.1, **told)
    for step in range(3):
        _, norm = clips(*batch_of(clips.model, step))
        told(*batch_of(told.model, step))
        assert float(norm) == pytest.approx(float(told.grad_norm), rel=5e-3)
    assert not clips.skipped
    torch.testing.assert_close(clips.model.state_dict(), told.model.state_dict(), rtol=1e-2, atol=1e-3)


def test_two_backwards_add_up_to_one_step():
    class Twice(TrainGraph):
        def build(self, x, y):
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = self.model(a, b) / 2
                loss.backward()
            return loss

    found = []
    for kind in (Twice, TrainGraph):
        model = mlp()
        sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
        graph = amp_graph(model, 2, virtual(2), F16, optimizer=sgd, kind=kind)
        for step in range(3):
            graph(*batch_of(model, step))
        assert not graph.skipped
        found.append(model.body[0].weight.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


def test_the_scale_is_saved_and_goes_on_where_it_was_at_another_stage_and_size(stages=(2, 3)):
    model = mlp()
    graph = amp_graph(model, stages[0], virtual(2), F16, **SCALING)
    for step, overflow in enumerate([0, 1, 0]):
        graph(*fed(model, step, overflow))
    saved = copy.deepcopy(graph.full_state_dict())
    assert {name: float(x) for name, x in saved["loss_scale"].items()} == {
        "scale": 2.0**9,
        "growth_tracker": 1.0,
        "hysteresis": 0.0,
    }
    assert set(saved["modules"]) == {"model"}
    other = amp_graph(mlp(1), stages[1], virtual(4), F16, **SCALING)
    other.load_state_dict(saved)
    for step, overflow in ((3, 0), (4, 0), (5, 1)):
        batch = fed(model, step, overflow)
        torch.testing.assert_close(graph(*batch), other(*batch), rtol=1e-2, atol=1e-3)
        assert graph.loss_scale == other.loss_scale
        assert graph.skipped is other.skipped


def test_a_checkpoint_of_another_precision_loads_and_leaves_the_scale_as_it_is():
    plain = amp_graph(mlp(), 2, virtual(2), None)
    plain(*batch_of(plain.model, 0))
    graph = amp_graph(mlp(1), 2, virtual(2), F16, **SCALING)
    graph.load_state_dict(plain.full_state_dict())
    assert graph.loss_scale == 2.0**10
    scaled = graph.full_state_dict()
    assert "loss_scale" in scaled
    plain.load_state_dict(scaled)
    assert plain.loss_scale is None


def test_a_first_step_that_is_skipped_leaves_states_that_the_next_one_begins_with():
    def momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, twin = mlp(), mlp()
    graph = amp_graph(model, 2, virtual(2), F16, optimizer=momentum, **SCALING)
    plain = Plain(twin, F16, optimizer=momentum, **SCALING)
    for step, overflow in enumerate([1, 0, 0, 1, 0]):
        graph(*fed(model, step, overflow))
        plain.step(*fed(model, step, overflow))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_two_optimizers_skip_together():
    model = mlp()
    graph = amp_graph(model, 2, virtual(2), F16, optimizer=lambda m: [adamw(m.body[0]), adamw(m.body[3])], **SCALING)
    before = copy.deepcopy(model.state_dict())
    graph(*fed(model, 0, OVERFLOW))
    assert graph.skipped
    check_same(before, model.state_dict())
    graph(*fed(model, 0, FINITE))
    assert not graph.skipped
