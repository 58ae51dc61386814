"""Graphs, settings, optimizers, placements and state dicts that have no meaning are refused where they are given."""

import copy

import pytest
import torch
from torch import nn
from wrong import X, Y, make, refused, says

import graphzero as gz

PLACE = gz.placement("cpu", range(2), virtual=True)


# ---- the class


def graph(**members):
    return type("Step", (gz.Graph,), members)


def no_init(self):
    pass


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step.add_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        lambda step: step.config.enable_zero(),
        lambda step: step(X),
        lambda step: step.state_dict(),
        lambda step: repr(step),
        lambda step: setattr(step, "model", nn.Linear(2, 2)),
    ],
)
def test_a_graph_without_super_init_says_so(use):
    step = graph(__init__=no_init, build=lambda self, x: x)()
    with says(gz.ConfigError, "super().__init__()", "Step"):
        use(step)
    assert not hasattr(step, "other")


def test_a_graph_needs_a_build_that_can_be_called():
    refused(graph()(PLACE), gz.ConfigError, "Step has no build", "def build(self, x, y):")
    refused(graph(forward=lambda self, x: x)(PLACE), gz.ConfigError, "Step has no build")
    refused(graph(build=5)(PLACE), gz.ConfigError, "Step.build is of type int")
    refused(graph(build=lambda: 1)(PLACE), gz.ConfigError, "Step.build takes no arguments, not even self")
    assert torch.equal(graph(build=staticmethod(lambda x: 2 * x))(PLACE)(X), 2 * X)


# ---- the configuration

WRONG_SETTINGS = {
    "stage 4": (lambda c: c.enable_zero(stage=4), "stage=4", "1 (optimizer states split)"),
    "a text for a stage": (lambda c: c.enable_zero(stage="2"), "stage='2'"),
    "a stage as a float": (lambda c: c.enable_zero(stage=2.0), "stage=2.0"),
    "a stage for the mode": (lambda c: c.enable_zero(3), "stage=3"),
    "a negative size": (lambda c: c.enable_zero(shard_min_size=-1), "shard_min_size=-1"),
    "an axis that is not there": (lambda c: c.enable_zero(axis="tp"), "'tp'", "'dp'"),
    "an axis by number": (lambda c: c.enable_zero(axis=0), "axis=0", "'dp'"),
    "a stage in words": (lambda c: c.enable_zero(stage="fast"), "stage='fast'", '"auto"'),
    "what to keep, by number": (lambda c: c.enable_zero(stage=3, keep_gathered=1), "keep_gathered=1", "True for all"),
    "what to keep, by no name": (lambda c: c.enable_zero(stage=3, keep_gathered=()), "keep_gathered=()", "names"),
    "kept below stage 3": (lambda c: c.enable_zero(stage=2, keep_gathered=True), "stage=2", "whole all the time"),
    "kept at any stage": (lambda c: c.enable_zero(stage="auto", keep_gathered="a"), "the memory budget decides"),
    "a negative budget": (lambda c: c.set_memory_budget(-1), "set_memory_budget(-1)", "bytes"),
    "a budget of nothing": (lambda c: c.set_memory_budget(0), "set_memory_budget(0)", "None for no budget"),
    "a budget that says yes": (lambda c: c.set_memory_budget(True), "set_memory_budget(True)"),
    "a budget as a float": (lambda c: c.set_memory_budget(2e9), "set_memory_budget(2000000000.0)", "20 * 2**30"),
    "a budget as text": (lambda c: c.set_memory_budget("2GiB"), "set_memory_budget('2GiB')", "20 * 2**30"),
    "an SBP as text": (lambda c: c.set_input("x", sbp="B"), "gz.sbp.B"),
    "an input by number": (lambda c: c.set_input(0, sbp=gz.sbp.B), "set_input(0"),
    "a way of attention": (lambda c: c.set_split_attention("helix"), "set_split_attention('helix')", "'ring'"),
    "a way on no axis": (lambda c: c.set_split_attention("ring", axis="cp"), "axis='cp'", "'dp'"),
    "an executor": (lambda c: c.set_executor(None), "'eager'"),
    "check_inputs": (lambda c: setattr(c, "check_inputs", True), "'always', 'first'"),
    "bucket_bytes": (lambda c: setattr(c, "bucket_bytes", "1M"), "bytes"),
    "no micro-batches": (lambda c: c.set_gradient_accumulation_steps(0), "1 or more"),
    "a setting that is not there": (lambda c: setattr(c, "zero_stage", 3), "config.zero_stage", "enable_zero"),
    "what is read only": (lambda c: setattr(c, "zero", 3), "config.zero = 3", "enable_zero"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_setting_without_meaning_is_refused_where_it_is_set(name):
    setting, *words = WRONG_SETTINGS[name]
    config = make().config
    before = config.fingerprint
    with says(gz.ConfigError, *words):
        setting(config)
    assert config.fingerprint == before


def test_zero_on_a_world_of_one_changes_nothing():
    torch.manual_seed(3)
    one, two = make(ranks=1, stage=3), make(ranks=2, stage=1)
    two.model.load_state_dict(one.model.state_dict())
    torch.testing.assert_close([one(X, Y) for _ in range(2)], [two(X, Y) for _ in range(2)])


# ---- optimizers and schedulers


def test_an_optimizer_of_other_parameters_is_refused_with_their_shape():
    stranger = nn.Linear(2, 5)

    def optimizer(parameters, lr):
        return torch.optim.SGD(stranger.parameters(), lr=lr)

    refused(make(optimizer=optimizer), gz.ConfigError, "[5, 2]", "self.model = model")


def test_what_is_no_optimizer_or_scheduler_of_it_is_refused():
    step = make(optimizer=None)
    parameters = list(step.model.parameters())
    mine, other = torch.optim.SGD(parameters), torch.optim.SGD(parameters)
    for wrong in (torch.optim.SGD, parameters, None):
        with says(gz.ConfigError, "torch.optim.Optimizer"):
            step.add_optimizer(wrong)
    with says(gz.ConfigError, "StepLR", "another optimizer"):
        step.add_optimizer(mine, lr_sch=torch.optim.lr_scheduler.StepLR(other, 1))
    for clip in (-1, 0, float("nan"), True, "1"):
        with says(gz.ConfigError, "clip_grad_norm", "positive number"):
            step.add_optimizer(mine, clip_grad_norm=clip)
    step.add_optimizer(mine)
    with says(gz.ConfigError, "2 of its parameters belong to optimizer 0 (SGD)"):
        step.add_optimizer(other)


def test_optimizers_without_anything_to_step_are_refused():
    def empty(parameters, lr):
        made = torch.optim.SGD(parameters, lr=lr)
        made.param_groups[0]["params"] = []
        return made

    refused(make(optimizer=empty), gz.CaptureError, "no parameter of the optimizers", "wrong.py:")
    frozen = make()
    frozen.model.requires_grad_(False)
    refused(frozen, gz.CaptureError, "requires_grad", "wrong.py:")


def test_optimizers_that_are_no_graph_are_refused_with_the_reason():
    refused(make(optimizer=torch.optim.LBFGS), gz.CaptureError, "LBFGS", "several times", "AdamW")
    refused(make(optimizer=torch.optim.SparseAdam), gz.CaptureError, "SparseAdam", "dense", "AdamW")


def test_a_hook_on_a_parameter_is_part_of_the_step():
    step, plain = make(), nn.Linear(4, 3)
    plain.load_state_dict(step.model.state_dict())
    for model in (step.model, plain):
        model.weight.register_hook(lambda grad: grad * 0.5)
    step(X, Y)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    nn.functional.cross_entropy(plain(X), Y).backward()
    optimizer.step()
    torch.testing.assert_close(step.model.weight, plain.weight)


def test_a_hook_after_the_accumulation_of_a_gradient_is_refused():
    step = make()
    step.model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(step, gz.CaptureError, "model.weight", "register_hook")


def test_an_unused_parameter_is_named_in_a_warning_and_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    step = make(model=Model(), optimizer=torch.optim.AdamW, weight_decay=0.5)
    before = step.model.idle.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"model\.idle\.weight"):
        step(X, Y)
    assert torch.equal(step.model.idle.weight, before)
    assert step.model.idle.weight.grad is None


# ---- placements, global tensors, pins


def test_ranks_that_cannot_be_are_refused():
    for ranks, word in (
        ([-1, 0], "count from 0"), ([0, 0], "more than once"), ([], "no ranks"), ([[0, 1], [2]], "ragged"),
        ("01", "whole numbers"), ([0.5], "whole numbers"), (2, "range(n)"), (None, "range(n)"),
    ):  # fmt: skip
        with says(gz.PlacementError, word):
            gz.placement("cpu", ranks)
    for wrong in (4, "cpu"):
        with says(gz.PlacementError, repr(wrong), "placement("):
            gz.Graph(wrong)
    with says(gz.PlacementError, "'tpu'", "cuda"):
        gz.placement("tpu", [0])


def test_more_ranks_than_the_world_has_are_refused():
    with says(gz.PlacementError, "torchrun"):
        gz.Graph(gz.placement("cpu", range(4)))
    with gz.testing.fake_world(2), says(gz.PlacementError, "rank 3"):
        gz.Graph(gz.placement("cpu", range(4))).compile(X)


def test_what_cannot_be_global_is_refused():
    for x, sbp, words in (
        (None, gz.sbp.B, ("NoneType",)), ([X], gz.sbp.B, ("list", "each tensor")), (X, None, ("sbp=",)),
        (X, "B", ("'B'",)), (X, gz.sbp.S(9), ("no dim 9",)), (X, (gz.sbp.B, gz.sbp.B), ("one SBP per axis",)),
    ):  # fmt: skip
        with says(gz.SbpError, *words):
            gz.to_global(x, PLACE, sbp)
    with says(gz.SbpError, "bias", "no dim 1"):
        gz.to_global(nn.Linear(2, 2), PLACE, gz.sbp.S(1))
    with says(gz.PlacementError, "placement="):
        gz.to_global(nn.Linear(2, 2))
    for dim in (-1, 1.5, "0"):
        with says(gz.SbpError, "from 0 up"):
            gz.sbp.S(dim)


# ---- texts and state dicts


def test_a_broken_text_is_refused_with_the_number_of_its_line():
    text = str(make().compile(X, Y).history[1].after)
    for broken, line in (
        ("", "line 1"), ("hello", "line 1"), (text.replace("= addmm(", "= addmmm("), "addmmm"),
        (text.replace("S(0)", "S(x)", 1), "line 2"), (text.replace("f32[", "f99[", 1), "line 2"),
        ("\n".join(text.splitlines()[:-1]), "return"), (5, "str(graph)"), (b"graph", "str(graph)"),
    ):  # fmt: skip
        with says(gz.GraphZeroError, line):
            gz.parse(broken)


def change(sd, path, value):
    *outer, last = path
    for key in outer:
        sd = sd[key]
    if value is None:
        del sd[last]
    else:
        sd[last] = value


WEIGHT = ("modules", "model", "weight")
STATE = ("optimizers", 0, "state")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (WEIGHT, None, ("missing: modules.model.weight", "strict=False")),
        (("modules", "model", "other"), torch.ones(1), ("unexpected: modules.model.other", "strict=False")),
        (WEIGHT, torch.ones(5), ("modules.model.weight is [3, 4] here, [5]",)),
        (WEIGHT, torch.ones(3, 4, device="meta"), ("modules.model.weight", "meta")),
        (WEIGHT, "text", ("modules.model.weight", "str")),
        (("modules", "model"), 5, ("modules.model", "int")),
        (("optimizers",), {"state": {}}, ("optimizers", "dict")),
        (("optimizers",), [], ("optimizers: 1 here, 0",)),
        (("optimizers", 0, "param_groups"), None, ("optimizers.0.param_groups",)),
        ((*STATE, "model.weight", "exp_avg"), torch.ones(2), ("exp_avg is [3, 4] here, [2]",)),
        ((*STATE, "model.weight", "exp_avg"), None, ("missing: optimizers.0.state.model.weight.exp_avg",)),
        ((*STATE, "stranger"), {}, ("unexpected: optimizers.0.state.stranger",)),
        ((*STATE, "model.weight"), 5, ("optimizers.0.state.model.weight", "int")),
        (("random",), 5, ("random",)),
        (("extra",), 1, ("unexpected: extra",)),
    ],
)
def test_a_state_dict_that_does_not_fit_names_what_and_loads_nothing(path, value, words):
    step = make(optimizer=torch.optim.AdamW)
    step(X, Y)
    sd = copy.deepcopy(step.state_dict())
    before = copy.deepcopy(sd)
    sd["modules"]["model"]["bias"] += 1
    change(sd, path, value)
    with says(gz.CheckpointError, "nothing was loaded", *words):
        step.load_state_dict(sd)
    assert all(torch.equal(p, before["modules"]["model"][name]) for name, p in step.model.state_dict().items())


@pytest.mark.parametrize("wrong", [[1], 5, {}, nn.Linear(4, 3).state_dict()])
def test_what_is_no_state_dict_of_a_graph_is_refused(wrong):
    with says(gz.CheckpointError, "nothing was loaded"):
        make().load_state_dict(wrong)
