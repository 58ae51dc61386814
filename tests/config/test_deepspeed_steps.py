"""Optimizers and schedules of DeepSpeed's JSON against its formulas, and a whole run against plain PyTorch."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphzero as gz

TWO = gz.placement("cpu", range(2), virtual=True)
STEPS = 30


def ported(placement=TWO, **document):
    """The configuration of a JSON of which nothing is left to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gz.GraphConfig.from_deepspeed({"train_batch_size": 16, "gradient_clipping": 0, **document}, placement)


def made(kind, params, groups=1):
    """The optimizer of a JSON."""
    said = ported(optimizer={"type": kind, "params": params}).deepspeed
    return said.make_optimizer([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)])


def refusal(**document):
    with pytest.raises(gz.ConfigError) as caught:
        ported(**document)
    return str(caught.value)


# ---- optimizers


@pytest.mark.parametrize(
    "kind, params, found, held",
    [
        ("Adam", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.999)}),
        ("AdamW", {"weight_decay": 0.01, "eps": 1e-6}, torch.optim.AdamW, {"weight_decay": 0.01, "eps": 1e-6}),
        ("Adam", {"adam_w_mode": False, "betas": [0.8, 0.99]}, torch.optim.Adam, {"betas": (0.8, 0.99)}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False, "amsgrad": True}, torch.optim.Adam, {"amsgrad": True}),
        ("adam", {"bias_correction": True, "amsgrad": False, "set_grad_none": True}, torch.optim.AdamW, {"lr": 1e-3}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr": 0.02}, torch.optim.Adagrad, {"lr": 0.02, "weight_decay": 0}),
        ("RMSprop", {}, torch.optim.RMSprop, {"alpha": 0.99}),
    ],
)  # fmt: skip
def test_an_optimizer_is_torchs_with_deepspeeds_defaults(kind, params, found, held):
    optimizer = made(kind, params)
    assert type(optimizer) is found
    assert {name: optimizer.param_groups[0][name] for name in held} == held


@pytest.mark.parametrize(
    "kind, params, part",
    [
        (
            "Lamb",
            {},
            "torch has no Lamb as DeepSpeed has it; take the section out, and give optimizer_arguments your own",
        ),
        ("OneBitAdam", {}, "write AdamW; gradients are not compressed"),
        ("Muon", {}, "torch.optim.Muon has the matrices and AdamW the rest"),
        ("Adamm", {}, "'Adamm' is neither DeepSpeed's nor in torch.optim"),
        ("AdamW", {"bias_correction": False}, "torch's Adam corrects its moments"),
        ("AdamW", {"amsgrad": True}, "DeepSpeed's Adam has none either"),
        ("AdamW", {"max_grad_norm": 1.0}, "write gradient_clipping"),
        ("AdamW", {"momentum": 0.9}, "AdamW has no such parameter; it has lr, betas, eps"),
        ("AdamW", {"lr": "auto"}, '"auto", which the Hugging Face Trainer fills in from TrainingArguments.learning'),
        ("AdamW", {"lr": -1.0}, "cannot be made: Invalid learning rate"),
        ("AdamW", {"lr": "5e-5"}, "without quotes: 5e-5"),
    ],
)
def test_an_optimizer_that_would_step_otherwise_is_refused(kind, params, part):
    assert part in refusal(optimizer={"type": kind, "params": params})


# ---- schedules, in the formulas of DeepSpeed's runtime/lr_schedules.py; ``i`` is its last_batch_iteration


def log_warmup(least, most, steps, after):
    def rate(i):
        if i < 0:
            return least
        return least + (most - least) * (1 / math.log(steps) * math.log(i + 1) if i < steps else after(i))

    return rate


def linear_warmup(least, most, steps, after):
    return lambda i: least if i < 0 else least + (most - least) * (i / steps if i < steps else after(i))


def cosine(base, i):
    """Of 20 steps, 4 of them warming from a fifth; down to a tenth."""
    if i < 0:
        return 0.0
    if i < 4:
        return base * (0.2 + 0.8 * (i / 4))
    return base * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (i - 3) / 16))) / 2)


def cycle(i):
    """Up in 4 steps, down in 6, then divided by one more for each 5 steps."""
    if i < 0:
        return 0.1
    if i < 10:
        at = (i + 1) % 10
        return 0.1 + 0.9 * (at / 4 if at <= 4 else (10 - at) / 6)
    return 0.1 / (1 + 0.5 * (i - 9) / 5)


SCHEDULES = {
    "WarmupLR": ({"warmup_max_lr": 0.2, "warmup_num_steps": 7}, log_warmup(0, 0.2, 7, lambda i: 1)),
    "WarmupLR of auto": (
        {
            "type": "WarmupLR", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 7,
            "last_batch_iteration": -1,
        },
        log_warmup(0, 0.3, 7, lambda i: 1),
    ),
    "WarmupLR in a line": (
        {"type": "WarmupLR", "warmup_min_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"},
        linear_warmup(0.1, 0.3, 5, lambda i: 1),
    ),
    "WarmupDecayLR": (
        {"total_num_steps": 20, "warmup_max_lr": 0.2, "warmup_num_steps": 5},
        log_warmup(0, 0.2, 5, lambda i: max(0, (20 - i) / 15)),
    ),
    "WarmupCosineLR": (
        {
            "total_num_steps": 20, "warmup_num_steps": 4, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        lambda i: cosine(0.3, i),
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
            "decay_step_size": 5, "decay_lr_rate": 0.5,
        },
        cycle,
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 3.0},
        lambda i: 0.01 * (1 + 3 * (i + 1) / 5),
    ),
    "LRRangeTest in stairs": (
        {"type": "LRRangeTest", "lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 5,
         "lr_range_test_staircase": True},
        lambda i: 0.01 * (1 + (i + 1) // 5),
    ),
    "StepLR": ({"step_size": 10, "gamma": 0.5}, lambda i: 0.3 * 0.5 ** ((i + 1) // 10)),
}  # fmt: skip


def scheduled(kind, params, lr=0.3):
    params = dict(params)
    scheduler = {"type": params.pop("type", kind), "params": params}
    said = ported(optimizer={"type": "AdamW", "params": {"lr": lr}}, scheduler=scheduler).deepspeed
    arguments = said.optimizer_arguments([nn.Parameter(torch.ones(2))])
    return arguments["optim"], arguments["lr_sch"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_deepspeeds_step_by_step(name):
    params, rate = SCHEDULES[name]
    optimizer, schedule = scheduled(name, params)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == pytest.approx([rate(i) for i in range(-1, STEPS - 1)], rel=1e-12, abs=1e-15)


def test_a_one_cycle_moves_the_first_beta_the_other_way_and_sets_the_second():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    optimizer, schedule = scheduled("OneCycle", params)
    rates, betas = [], []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.1, 0.55, 0.55, 1.0, 0.55, 0.55, 0.1, 0.1, 0.1])
    assert [first for first, _ in betas] == pytest.approx([0.8, 0.9, 0.85, 0.85, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9])
    assert {second for _, second in betas} == {0.99}


def test_a_schedule_goes_on_from_its_state_and_has_a_value_for_each_group():
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 4}}
    said = ported(optimizer={"type": "AdamW", "params": {}}, scheduler=scheduler).deepspeed
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    found = []
    for stopped in (False, True):
        optimizer = said.make_optimizer([dict(group) for group in groups])
        schedule = said.make_scheduler(optimizer)
        for step in range(6):
            if stopped and step == 3:
                kept, optimizer = (schedule.state_dict(), optimizer.state_dict()), said.make_optimizer(groups)
                schedule = said.make_scheduler(optimizer)
                schedule.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            optimizer.step()
            schedule.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    assert found[0] == found[1] == [0.1, 0.2]


@pytest.mark.parametrize(
    "scheduler, part",
    [
        ({"type": "Warmup", "params": {}}, "'Warmup' is neither DeepSpeed's (WarmupLR, WarmupDecayLR"),
        ({"type": "WarmupDecayLR", "params": {}}, "total_num_steps: WarmupDecayLR needs it"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            '"auto", which the Hugging Face Trainer fills in from the number of steps',
        ),
        ({"params": {"warmup_num_steps": 3}}, "scheduler.type: None; write the name of one"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 7}}, "gz.load resumes a schedule"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "did you mean warmup_num_steps?"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "warmup_type: 'cubic'; write 'log' or 'linear'"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "3"}}, "without quotes: 3"),
        ({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}, "cannot be made"),
        ({"type": "StepLR", "params": {"gamma": 0.5}}, "cannot be made"),
    ],
)
def test_a_schedule_without_a_meaning_is_refused(scheduler, part):
    assert part in refusal(scheduler=scheduler)


# ---- a run


class PortedGraph(gz.Graph):
    """A script of DeepSpeed's, moved over."""

    def __init__(self, model, config):
        super().__init__(config=config)
        self.model = model
        self.add_optimizer(**self.config.deepspeed.optimizer_arguments(model.parameters()))

    def build(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss


JSON = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2},
}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def test_a_run_of_a_json_is_plain_pytorch_on_the_whole_batch():
    model, plain = mlp(), mlp()
    graph = PortedGraph(model, ported(**JSON))
    weights, moments = list(plain.parameters()), [[torch.zeros_like(p) for p in plain.parameters()] for _ in range(2)]
    is_clipped = []
    for step in range(1, 6):
        x = torch.randn(16, 8)
        y = 3 * torch.tanh(x[:, :4])
        loss = graph(x, y)
        expected = F.mse_loss(plain(x), y)
        grads = torch.autograd.grad(expected, weights)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        rate = 0.0 if step == 1 else 0.05 * min(1.0, math.log(step - 1) / math.log(4))
        with torch.no_grad():
            for p, g, m, v in zip(weights, grads, *moments, strict=True):
                g = g / max(1.0, float(norm) + 1e-6)
                m.mul_(0.8).add_(g, alpha=0.2)
                v.mul_(0.95).addcmul_(g, g, value=0.05)
                update = (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-6) + 0.1 * p
                p.sub_(update, alpha=rate)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(graph.grad_norm, norm, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        is_clipped.append(bool(norm > 1))
    assert True in is_clipped and graph.plan.stage == 2 and graph.config.gradient_accumulation_steps == 4


def test_a_schedule_does_not_step_with_a_step_that_overflows_and_a_static_scale_stays():
    model = mlp()
    json = JSON | {"fp16": {"enabled": True, "loss_scale": 64}}
    graph = PortedGraph(model, ported(**json))
    x = torch.randn(16, 8)
    rates = []
    for factor in (1.0, 1e30, 1.0, 1.0, 1.0):
        graph(x, factor * x[:, :4])
        rates.append(graph.state_dict()["schedulers"][0]["last_epoch"])
        assert graph.skipped is (factor > 1) and graph.loss_scale == 64
    assert rates == [1, 1, 2, 3, 4]


def test_own_optimizers_are_given_the_schedule_and_the_clipping_of_the_json():
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = ported(**JSON).deepspeed.optimizer_arguments(own)
    assert arguments["optim"] is own and arguments["clip_grad_norm"] == 1.0 and own.param_groups[0]["lr"] == 0.0
    without = {name: held for name, held in JSON.items() if name not in ("optimizer", "scheduler")}
    said = ported(**without).deepspeed
    assert said.optimizer_arguments(own)["lr_sch"] is None
    with pytest.raises(gz.ConfigError, match="no optimizer section; give your own optimizer"):
        said.make_optimizer(model.parameters())
