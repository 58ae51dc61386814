"""Mixed precision with models and code of many kinds."""

import warnings

import pytest
import torch
from graphs import TrainGraph
from precision_toys import BF16, F16, Plain, adamw, amp_graph, batch_of, mlp, virtual
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphzero as gz


class Loss(nn.Module):
    """A body and the mean squared error of what it gives."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, y):
        return F.mse_loss(self.body(x).float(), y)


def check_trains(make, batch, stages=(0, 1, 3), plain=None, **more):
    """Three steps at each stage are those of plain PyTorch."""
    expected = None
    if plain is not False:
        reference = (plain or Plain)(make())
        expected = [reference.step(*batch).float() for _ in range(3)]
    for stage in stages:
        graph = amp_graph(make(), stage, virtual(2), **more)
        found = [graph(*batch) for _ in range(3)]
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
        assert float(found[-1]) < float(found[0])


def seeded(make):
    def made():
        torch.manual_seed(0)
        return make()

    return made


def rows():
    return torch.randn(8, 16), torch.randn(8, 8)


def test_norms_in_float32_and_the_rest_in_bfloat16():
    def make():
        model = mlp().bfloat16()
        model.body[1].float()
        return model

    check_trains(make, rows(), plain=False)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_frozen_16_bit_base_with_float32_adapters(dtype):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 8).to(dtype).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    def make():
        torch.manual_seed(0)
        return Loss(Adapted())

    check_trains(
        make, rows(), plain=False, dtype=dtype, optimizer=lambda m: adamw(nn.ModuleList([m.body.down, m.body.up]))
    )


def test_code_with_its_own_autocast():
    class Own(TrainGraph):
        def build(self, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.model.body[:3](x)
            with torch.autocast("cpu", enabled=False):
                loss = F.mse_loss(self.model.body[3](h.float()), y)
            loss.backward()
            return loss

    batch, found = rows(), []
    for stage in (0, 3):
        graph = amp_graph(mlp(), stage, virtual(2), kind=Own)
        found.append(torch.stack([graph(*batch) for _ in range(3)]))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


BODIES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)),
    "a norm of a float32 input": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)),
    "a group norm": lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.Linear(16, 8)),
    "an rms norm": lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 8)),
    "a prelu": lambda: nn.Sequential(nn.Linear(16, 16), nn.PReLU(), nn.Linear(16, 8)),
    "a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(32, 8)
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_layers_are_as_under_autocast(name):
    """Where torch refuses 16-bit weights beside wide inputs, the reference has rounded wide ones."""

    class Rounded(Plain):
        def step(self, *batch):
            casts = {name: self.cast(name, p) for name, p in self.model.named_parameters()}
            with torch.autocast("cpu", self.dtype):
                loss = torch.func.functional_call(self.model, casts, batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        def cast(self, name, p):
            owner = self.model.get_submodule(name.rpartition(".")[0])
            wide = isinstance(owner, (nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
            return p.to(self.dtype).to(p.dtype) if wide else p.to(self.dtype)

    check_trains(lambda: Loss(seeded(BODIES[name])()), rows(), stages=(3,), plain=Rounded)


def test_attention_with_float32_positions_runs_in_16_bit():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 8)

        def forward(self, x):
            q, k, v = self.qkv(x).view(8, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
            turn = torch.arange(4.0).cos()[:, None]
            mixed = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)

    check_trains(lambda: Loss(seeded(Rotated)()), (torch.randn(8, 4, 16), torch.randn(8, 8)), stages=(0, 3))


def test_evaluation_reads_casts_too():
    class Evaluate(gz.Graph):
        def __init__(self, model, placement):
            super().__init__(placement)
            self.model = model
            self.config.enable_amp()

        def build(self, *batch):
            return self.model(*batch)

    for stage in (0, 1):
        graph = amp_graph(mlp(), stage, virtual(2))
        graph(*batch_of(graph.model, 0))
        evaluate = Evaluate(graph.model, graph.placement)
        found, plain = evaluate(*batch_of(graph.model, 1)), Plain(graph.model)
        torch.testing.assert_close(found.float(), plain.step(*batch_of(graph.model, 1)).float(), rtol=1e-2, atol=1e-2)
        gathers = [c for c in evaluate.plan.collectives if c.kind == "all_gather"]
        assert bool(gathers) is (stage > 0) and not evaluate.training


def test_tensor_parallel_splits_stay_and_data_axes_gather_16_bit():
    model, twin = mlp(width=16), mlp(width=16)
    placement = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
    plain = Plain(twin)
    graph = amp_graph(model, 2, placement)
    gz.to_global(
        model, placement=placement, sbp={
            "body.0.weight": (gz.sbp.B, gz.sbp.S(0)), "body.0.bias": (gz.sbp.B, gz.sbp.S(0)),
            "body.3.weight": (gz.sbp.B, gz.sbp.S(1)),
        }
    )  # fmt: skip
    for step in range(3):
        batch = batch_of(model, step)
        torch.testing.assert_close(graph(*batch), plain.step(*batch), rtol=1e-2, atol=1e-3)
    assert gz.sbp.of(model.body[0].weight) == (gz.sbp.S(1), gz.sbp.S(0))
    gathered = [c for c in graph.plan.collectives if c.kind == "all_gather" and c.what_for == "parameters"]
    assert {c.axis for c in gathered} == {"dp"}


def test_small_parameters_stay_whole_beside_split_masters():
    graph = amp_graph(mlp(), 1, virtual(2))
    graph.config.enable_zero(stage=1, shard_min_size=100)
    graph(*batch_of(graph.model, 0))
    assert gz.sbp.of(graph.model.body[0].weight) == (gz.sbp.S(0),)
    assert gz.sbp.of(graph.model.body[0].bias) == (gz.sbp.B,)


def test_turning_it_on_and_off_compiles_anew():
    graph = amp_graph(mlp(), 0, virtual(2), None)
    batch = batch_of(graph.model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = graph(*batch)
        graph.config.enable_amp()
        half = graph(*batch)
        graph.config.enable_amp(False)
        graph(*batch)
    assert full != half and "bf16" not in str(graph.program)


def test_the_optimizer_steps_in_backward_or_waits_for_the_count_of_overflows():
    deep = nn.Sequential(nn.Linear(16, 256), *(nn.Linear(256, 256) for _ in range(2)), nn.Linear(256, 8))
    batch = rows()
    for dtype, stepped in ((BF16, True), (F16, False)):
        graph = amp_graph(Loss(deep), 2, virtual(2), dtype)
        graph.config.set_optimizer_in_backward()
        plan = graph.compile(*batch).plan
        assert (": 0 of" not in plan.decisions[-1]) is stepped


def test_a_check_is_against_plain_pytorch_with_the_same_casts_and_scale():
    graph = amp_graph(mlp(), 2, virtual(2), F16, clip=1.0, init_scale=2.0**10)
    report = gz.check(graph, *batch_of(graph.model, 0))
    assert report and report.stages[0].differences["outputs"] == 0, str(report)


def test_the_first_stage_that_fits_is_found_with_masters_too():
    batch = rows()
    peaks = [amp_graph(mlp(), stage, virtual(2)).compile(*batch).plan.memory.peak for stage in (1, 2, 3)]
    graph = amp_graph(mlp(), 0, virtual(2))
    graph.config.enable_zero(stage="auto")
    graph.config.set_memory_budget(max(peaks))
    assert graph.compile(*batch).plan.memory.peak <= max(peaks)


def test_a_parameter_that_no_optimizer_steps_does_not_skip_a_step():
    model = Loss(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)))
    graph = amp_graph(model, 2, virtual(2), F16, optimizer=lambda m: adamw(m.body[2]))
    graph(*rows())
    assert not graph.skipped and "body.0.weight" not in str(graph.program.gradients())


def test_what_a_checkpoint_recomputes_reads_the_same_casts():
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()), nn.Linear(16, 8)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    graph = amp_graph(Loss(seeded(Recomputed)()), 3, virtual(2))
    report = gz.check(graph, *rows())
    assert report and report.stages[0].differences["gradients"] == 0, str(report)
