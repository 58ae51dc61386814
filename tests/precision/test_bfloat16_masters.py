"""Masters and optimizer states in bfloat16: what a step writes is rounded stochastically, alike at any placement."""

import math

import pytest
import torch
from graphs import TrainGraph
from precision_toys import BF16, amp_graph, batch_of, gpt, losses, mlp, virtual
from torch import nn

import graphzero as gz
from graphzero.testing.measure import measure_step

SIZE = (12, 5)


class Exact(nn.Module):
    """Gradients that are the same bits in whatever order they are added up: sums of small whole numbers."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(SIZE[1]))

    def forward(self, x):
        return (x @ self.weight + self.bias).sum()


def whole_numbers(step, size=8):
    return (torch.randint(-2, 3, (size, SIZE[0]), generator=torch.Generator().manual_seed(step)).to(BF16),)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def exact(stage=0, placement=None, seed=3, parts=1, optimizer=adamw, early=False, axis=None):
    """A Graph that draws from ``seed``."""
    graph = amp_graph(Exact().to(BF16), 0, placement or virtual(1), optimizer=optimizer, stochastic_rounding=True)
    graph.config.set_gradient_accumulation_steps(parts)
    graph.config.set_optimizer_in_backward(early)
    if stage:
        graph.config.enable_zero(stage=stage, axis=axis)
    torch.manual_seed(seed)
    return graph


def train(graph, steps=4, begin=0):
    for step in range(begin, begin + steps):
        graph(*whole_numbers(step))
    return graph


def held(graph):
    """All that a Graph holds between calls, whole."""
    full = graph.full_state_dict()
    states = {f"{i}/{key}": x for i, all_ in full["optimizers"][0]["state"].items() for key, x in all_.items()}
    return {**full["modules"]["model"], **states}


def differ(a, b):
    a, b = held(a), held(b)
    assert a.keys() == b.keys()
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


GRIDS = {
    "dp, tp": {"ranks": [[0, 1], [2, 3]], "names": ("dp", "tp")},
    "hybrid": {"ranks": [[0, 1], [2, 3]], "names": ("dp_replicate", "dp_shard")},
}


def grid(name):
    return gz.placement("cpu", virtual=True, **GRIDS[name])


# ---- the same anywhere


def test_parameters_and_states_are_the_same_bits_at_every_stage_and_number_of_ranks():
    one = train(exact())
    assert all(x.dtype == BF16 for x in held(one).values() if x.dim())
    for ranks, stage in ((2, 0), (2, 2), (4, 1), (4, 3)):  # of the 5 biases, some ranks have fewer
        assert differ(train(exact(stage, virtual(ranks))), one) == [], (ranks, stage)


@pytest.mark.parametrize("name, axis", [("dp, tp", None), ("hybrid", "dp_shard")])
def test_and_on_two_axes(name, axis):
    one, graph = train(exact()), exact(3, grid(name), axis=axis)
    if name == "dp, tp":
        gz.to_global(graph.model, placement=graph.placement, sbp={"weight": (gz.sbp.B, gz.sbp.S(0, 2))})
    assert differ(train(graph), one) == []
    text = str(graph.program)
    assert "start=[12@dp" in text or "[12@tp@dp" in text or "stochastic_round(view" in text


def test_and_in_micro_batches_and_while_backward_runs_and_with_momentum():
    one = train(exact())
    assert differ(train(exact(2, virtual(2), parts=2)), one) == []
    assert differ(train(exact(2, virtual(2), early=True)), one) == []
    one, two = train(exact(optimizer=sgd)), train(exact(3, virtual(2), optimizer=sgd))
    assert differ(one, two) == []


def test_it_goes_on_after_a_load_to_the_bit_at_another_stage_and_number_of_ranks(tmp_path):
    long = train(exact(), 6)
    first = train(exact(2, virtual(4)), 3)
    gz.save(first, tmp_path / "here")
    second = exact(3, virtual(2), seed=99)
    gz.load(second, tmp_path / "here")
    assert differ(train(second, 3, begin=3), long) == []
    third = exact(1, virtual(2), seed=98)
    third.load_state_dict(first.state_dict())
    assert differ(third, first) == []
    assert differ(train(third, 3, begin=3), long) == []


def test_other_seeds_and_steps_round_otherwise():
    assert differ(train(exact(seed=4)), train(exact(seed=3))) != []
    graph = exact(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=2.0**-12))
    changed = []
    for _ in range(2):
        with torch.no_grad():
            graph.model.weight.fill_(1.0)
        graph(torch.ones(4, SIZE[0], dtype=BF16))
        changed.append(graph.model.weight < 1)
    assert not torch.equal(*changed)


# ---- what it is for


class Shift(nn.Module):
    """Each weight has a gradient of one."""

    def __init__(self, size=64):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))

    def forward(self, x):
        return (self.weight * x.mean()).sum()


def test_updates_too_small_for_the_nearest_bfloat16_are_kept_on_average():
    steps, rate, spacing = 64, 2.0**-12, 2.0**-8  # between bfloat16 below 1

    def descend(model):
        return torch.optim.SGD(model.parameters(), lr=rate)

    lost = Shift().to(BF16)
    plain = descend(lost)
    graph = amp_graph(Shift().to(BF16), 2, virtual(2), optimizer=descend, stochastic_rounding=True)
    torch.manual_seed(0)
    for _ in range(steps):
        lost(torch.ones(4, dtype=BF16)).backward()
        plain.step()
        plain.zero_grad()
        graph(torch.ones(4, dtype=BF16))
    assert (lost.weight == 1).all()
    found = graph.model.weight.detach().double()
    bound = 4 * math.sqrt(steps * rate * spacing / found.numel())
    assert abs(float(found.mean()) - (1 - steps * rate)) < bound < 0.1 * steps * rate


@pytest.fixture(scope="module")
def wide():
    return losses(amp_graph(gpt(), 0, virtual(1), clip=1.0), gpt(), 50)


@pytest.mark.parametrize("stage, ranks", [(0, 1), (3, 2)])
def test_a_gpt_learns_as_with_masters_in_float32(wide, stage, ranks):
    torch.manual_seed(0)
    model = gpt().to(BF16)
    found = losses(amp_graph(model, stage, virtual(ranks), clip=1.0, stochastic_rounding=True), model, 50)
    assert wide[-4:].mean() < 0.9 * wide[:4].mean()
    assert (found - wide).abs().max() < 0.005 * wide[0]


def test_counters_stay_exact_and_what_is_not_bfloat16_stays_as_it_is():
    model = mlp()
    model.body[0].to(BF16).requires_grad_(False)
    model.body[3].to(BF16)
    frozen = [p.clone() for p in model.body[0].parameters()]
    graph = amp_graph(model, 2, virtual(2), stochastic_rounding=True)
    graph(*batch_of(model, 0))
    for held_ in graph.optimizer.state.values():
        held_["step"].fill_(1000.0)
    graph(*batch_of(model, 1))
    states = {name: graph.optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    assert {name: held_["exp_avg"].dtype for name, held_ in states.items() if held_} == {
        "body.1.weight": torch.float32, "body.1.bias": torch.float32, "body.3.weight": BF16, "body.3.bias": BF16,
    }  # fmt: skip
    assert {float(held_["step"]) for held_ in states.values() if held_} == {1001.0}
    assert all(torch.equal(a, b) for a, b in zip(frozen, model.body[0].parameters(), strict=True))


def test_without_it_the_same_model_steps_in_16_bit_as_before():
    texts = []
    for rounding in (False, True, False):
        model = mlp()
        model.body[3].to(BF16)
        graph = amp_graph(model, 2, virtual(2), stochastic_rounding=rounding).compile(*batch_of(model, 0))
        texts.append(str(graph.program))
    assert texts[0] == texts[2] and "round" not in texts[0] and "seed" not in texts[0]
    assert texts[1].count("adam_rounded(") == 2


class Clipping(TrainGraph):
    def build(self, *batch):
        loss = self.model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


def test_code_of_the_users_after_backward_clips_and_gradients_may_be_reduced_in_float32():
    found = []
    for stage, ranks in ((0, 2), (3, 2)):
        model = mlp().to(BF16)
        graph = amp_graph(
            model, stage, virtual(ranks), kind=Clipping, stochastic_rounding=True, reduce_dtype=torch.float32
        )
        torch.manual_seed(0)
        for step in range(2):
            graph(*batch_of(model, step))
        reduced = [c.bytes for c in graph.plan.collectives if c.what_for == "gradients"]
        assert sum(reduced) == 4 * graph.plan.parameters * (2 if stage == 0 else 1) / ranks
        found.append(graph)
    assert differ(*found) == []


def test_an_average_in_bfloat16_follows_its_model():
    graph = amp_graph(Shift().to(BF16), 2, virtual(2), optimizer=sgd, stochastic_rounding=True)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    graph.average = torch.optim.swa_utils.AveragedModel(graph.model, multi_avg_fn=average)
    graph.add_average(graph.average, graph.model)
    with torch.no_grad():
        graph(torch.ones(4, dtype=BF16))
        graph.average.module.weight.fill_(1.0)
        graph.model.weight.fill_(2.0)
        graph.optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(8):
        graph(torch.ones(4, dtype=BF16))
    found = graph.average.module.weight.detach().double()
    wanted, bound = 2 - 0.999**8, 4 * math.sqrt(8 * 0.001 * 2**-7 / found.numel())
    assert abs(float(found.mean()) - wanted) < bound < 0.1 * (wanted - 1)


def test_a_check_compares_with_the_step_that_is_not_rounded():
    graph = amp_graph(mlp().to(BF16), 2, virtual(2), clip=1.0, stochastic_rounding=True)
    batch = batch_of(graph.model, 0)
    assert gz.check(graph, *batch)
    graph(*batch)
    report = gz.check(graph, *batch, dtype=torch.float64)
    assert report.agrees and report.rtol < 1e-7


# ---- checkpoints of other runs


def test_a_checkpoint_in_float32_is_rounded_to_the_nearest_and_one_in_bfloat16_is_taken_back_exactly():
    wide = amp_graph(mlp(), 2, virtual(2))
    wide(*batch_of(wide.model, 0))
    narrow = amp_graph(mlp(1).to(BF16), 3, virtual(2), stochastic_rounding=True)
    narrow.load_state_dict(wide.state_dict())
    for name, x in held(wide).items():
        here = held(narrow)[name]
        assert torch.equal(here, x.to(here.dtype)), name
    narrow(*batch_of(wide.model, 1))
    wide.load_state_dict(narrow.state_dict())
    assert all(torch.equal(x.double(), held(narrow)[name].double()) for name, x in held(wide).items())
    assert all(p.dtype == torch.float32 for p in wide.model.parameters())


def test_eager_modules_and_optimizers_load_it():
    graph = train(exact(2, virtual(2)))
    full = graph.full_state_dict()
    model = Exact().to(BF16)
    optimizer = adamw(model)
    model.load_state_dict(full["modules"]["model"])
    optimizer.load_state_dict(full["optimizers"][0])
    for name, p in model.named_parameters():
        assert torch.equal(p, full["modules"]["model"][name])
        assert optimizer.state[p]["exp_avg_sq"].dtype == BF16


# ---- what it costs


def test_six_bytes_a_parameter_less_are_held():
    ranks = 4
    batch = batch_of(mlp(width=64), 0)
    graphs = (
        amp_graph(mlp(width=64), 0, virtual(ranks)),
        amp_graph(mlp(width=64).to(BF16), 0, virtual(ranks), stochastic_rounding=True),
    )
    for stage in range(4):
        for graph in graphs:
            graph.config.enable_zero(stage > 0, stage=stage or 2)
        wide, narrow = (graph.compile(*batch).plan for graph in graphs)
        saved = [
            sum(int(plan.memory[kind]) for kind in ("parameters", "optimizer_states")) / plan.parameters
            for plan in (wide, narrow)
        ]
        assert saved[0] - saved[1] == pytest.approx(6 / (ranks if stage else 1), abs=1e-2)
        assert narrow.memory.model_state < wide.memory.model_state
        assert narrow.comm_volume == wide.comm_volume
        assert narrow.memory["compute_parameters"] == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_call_takes_what_its_plan_says(stage):
    with gz.testing.fake_world(2):
        model = gpt().to(BF16)
        graph = amp_graph(model, stage, clip=1.0, stochastic_rounding=True)
        batch = batch_of(model, 0, 4)
        graph(*batch)
        plan, measured = graph.plan, measure_step(graph, *batch)
        assert measured.peak == plan.memory.peak
        assert measured.resident == {name: nbytes for name, nbytes in plan.memory.resident.items() if nbytes}


def test_adam_holds_no_copies_in_float32_while_it_steps():
    plans = []
    for make, told in ((lambda: mlp(width=64), {}), (lambda: mlp(width=64).to(BF16), {"stochastic_rounding": True})):
        model = make()
        graph = amp_graph(model, 0, virtual(1), **told).compile(*batch_of(model, 0))
        plans.append(graph.plan)
    assert plans[0].memory.peak - plans[1].memory.peak == pytest.approx(6 * plans[0].parameters, rel=0.01)
    assert " stochastic_round(" not in str(graph.program) and "= adam_rounded(" in str(graph.program)


# ---- what is refused


def test_a_model_without_bfloat16_is_refused_and_says_how_to_make_one():
    graph = amp_graph(mlp(), 0, virtual(2), stochastic_rounding=True)
    with pytest.raises(gz.ConfigError) as told:
        graph(*batch_of(graph.model, 0))
    text = str(told.value)
    assert "enable_amp(stochastic_rounding=True): none of the 6 trainable parameters of Train is bfloat16" in text
    assert "model.body.0.weight: float32[64, 16]" in text and "model.to(torch.bfloat16)" in text
    graph.model.to(BF16)
    assert graph(*batch_of(graph.model, 0)).isfinite()


def test_float16_is_refused_as_dtype_and_as_a_parameter():
    config = amp_graph(mlp(), 0, virtual(2), None).config
    with pytest.raises(gz.ConfigError, match=r"enable_amp\(dtype=torch.float16, stochastic_rounding=True\)"):
        config.enable_amp(dtype=torch.float16, stochastic_rounding=True)
    with pytest.raises(gz.ConfigError, match=r"enable_amp\(stochastic_rounding='yes'\)"):
        config.enable_amp(stochastic_rounding="yes")
    assert config.amp.dtype is None
    model = mlp().to(BF16)
    model.body[0].to(torch.float16)
    graph = amp_graph(model, 0, virtual(2), stochastic_rounding=True)
    with pytest.raises(gz.ConfigError, match="2 trainable parameters of Train are float16"):
        graph(*batch_of(model, 0))


def test_a_model_in_16_bit_is_told_of_it():
    graph = amp_graph(mlp().to(BF16), 0, virtual(2))
    with pytest.raises(gz.ConfigError, match=r"enable_amp\(stochastic_rounding=True\)"):
        graph(*batch_of(graph.model, 0))
