"""What users write: modules, losses and tensor code of torch, on virtual ranks against plain eager PyTorch.

Each case runs a few float64 steps at two stages; outputs, parameters, buffers and optimizer state must
be eager's.  Activations must stay split: a case that needs the whole batch says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inside import executor_of
from test_plan_measured import Storages
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphzero as gz

ROWS = 6


def virtual(n: int) -> gz.Placement:
    return gz.placement("cpu", range(n), virtual=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Case:
    """``step(model, *batch)`` returns the loss, or a tuple that begins with it."""

    def __init__(self, model, batch, step, *, opt=sgd, gathers=False, evaluate=False, after=None):
        self.model, self.batch, self.step, self.opt = model, batch, step, opt
        self.gathers, self.evaluate, self.after = gathers, evaluate, after

    def train(self, model, *batch):
        found = self.step(model, *batch)
        (found[0] if isinstance(found, tuple) else found).backward()
        if self.after is not None:
            self.after(model)
        return found


class CaseGraph(gz.Graph):
    def __init__(self, case, model, placement=None, stage=0):
        super().__init__(placement)
        self.case, self.model = case, model
        self.optimizer = case.opt([p for p in model.parameters() if p.requires_grad])
        self.add_optimizer(self.optimizer)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, *batch):
        return self.case.train(self.model, *batch)


CASES: dict[str, Case] = {}


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def square(x: Tensor) -> Tensor:
    return x.pow(2).mean()


def module(name: str, make: Callable[[], nn.Module], *shape: int, **options: Any) -> None:
    """A module on one input of ``shape`` per row; every row counts differently."""

    def step(model, x, weight):
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        return square(y * weight.view(-1, *[1] * (y.dim() - 1))) + 0.01 * y.sum(), y

    CASES[name] = Case(make, lambda: (r(ROWS, *shape), r(ROWS)), step, **options)


class MLP(nn.Module):
    def __init__(self, given=5, made=4):
        super().__init__()
        self.a, self.b = nn.Linear(given, 7), nn.Linear(7, made)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def code(name: str, step: Callable[..., Any], *batch: Callable[[], Tensor], model: Any = MLP, **options: Any) -> None:
    """Tensor code around a small network."""
    makers = batch or (lambda: r(ROWS, 5),)
    CASES[name] = Case(model, lambda: tuple(make() for make in makers), step, **options)


# ---- modules

for circular in ("zeros", "circular", "reflect"):
    module(f"conv2d_{circular}", lambda mode=circular: nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode), 4, 7, 7)
module("conv1d_groups", lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, groups=2), 4, 9)
module("conv_transpose", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), 4, 5, 5)
for training in (True, False):
    for kind, options in {"": {}, "_cumulative": {"momentum": None}, "_plain": {"affine": False},
                          "_no_statistics": {"track_running_stats": False}}.items():  # fmt: skip
        module(
            f"batch_norm{kind}{'' if training else '_evaluating'}",
            lambda options=options: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, **options)),
            3, 6, 6, evaluate=not training,
        )  # fmt: skip
module("instance_norm", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 3, 6, 6)
module("group_norm", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), 3, 6, 6)
module("layer_norm_of_two_dims", lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm((5, 8))), 5, 3)
module("rms_norm", lambda: nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8)), 5, 3)
module("bilinear", lambda: nn.Sequential(Two(nn.Bilinear(5, 5, 3))), 2, 5)
module("shrink", lambda: nn.Sequential(nn.Linear(5, 6), nn.Hardshrink(), nn.Linear(6, 6), nn.Softshrink()), 5)
module("channel_shuffle", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ChannelShuffle(2)), 3, 6, 6)
module("weight_norm", lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), 5)
module("attention", lambda: SelfAttention(), 5, 8)
module("attention_with_weights", lambda: SelfAttention(need_weights=True), 5, 8)
module("encoder_layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 5, 8)
module("decoder_layer", lambda: Decoder(), 5, 8)
for kind in ("LSTM", "GRU", "RNN"):
    module(kind.lower(), lambda kind=kind: getattr(nn, kind)(5, 4, batch_first=True), 2, 5)
    module(f"{kind.lower()}_cell", lambda kind=kind: Cell(kind), 2, 5)
module("lstm_of_two_layers_both_ways", lambda: nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True), 3, 5)


class Two(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x * 2)


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = nn.MultiheadAttention(8, 2, batch_first=True), {"need_weights": False, **options}

    def forward(self, x):
        return self.inner(x, x, x, **self.options)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.inner(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = getattr(nn, f"{kind}Cell")(5, 4)

    def forward(self, x):
        state = None
        for i in range(x.shape[1]):
            state = self.inner(x[:, i], state)
        return state[0] if isinstance(state, tuple) else state


# ---- losses

WEIGHT = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)


def loss(name: str, function: Callable[..., Tensor], *batch: Callable[[], Tensor], **options: Any) -> None:
    code(name, lambda m, x, *rest: function(m(x), *rest), lambda: r(ROWS, 5), *batch, **options)


def classes() -> Tensor:
    return ints(4, ROWS)


def values() -> Tensor:
    return r(ROWS, 4)


def signs() -> Tensor:
    return ints(2, ROWS) * 2 - 1


loss("cross_entropy", lambda y, t: F.cross_entropy(y, t, WEIGHT, ignore_index=1, label_smoothing=0.1), classes)
loss("cross_entropy_of_probabilities", lambda y, t: F.cross_entropy(y, t.softmax(-1), label_smoothing=0.1), values)
loss("mse_none", lambda y, t: F.mse_loss(y, t, reduction="none").mean(1).sum() / len(t), values)
loss("huber", F.huber_loss, values)
loss("bce_logits", lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=WEIGHT), values)
loss("kl", lambda y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"), values)
loss("gaussian_nll", lambda y, t: F.gaussian_nll_loss(y, t, y[:, :1].exp(), full=True), values)
loss("triplet", lambda y, t: F.triplet_margin_loss(y, t, t.flip(1), swap=True), values)
loss("cosine_embedding", lambda y, t, s: F.cosine_embedding_loss(y, t, s, margin=0.2), values, signs)
loss("multi_margin", F.multi_margin_loss, classes)
loss("multilabel_margin", F.multilabel_margin_loss, lambda: ints(4, ROWS, 4))
loss("normal", lambda y, t: -torch.distributions.Normal(y, 1.0).log_prob(t).mean(), values)
loss("categorical", lambda y, t: -torch.distributions.Categorical(logits=y).log_prob(t).mean(), classes)

# ---- tensor code


def contrastive(model, x, z):
    a, b = F.normalize(model(x), dim=-1), F.normalize(model(z), dim=-1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


def penalised(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return square(model(x)) + (slope.norm(dim=1) - 1).pow(2).mean()


def assigned(model, x, at):
    y = model(x) * 1
    y[torch.arange(ROWS), at] = 3.0
    return square(y)


def spectrum(model, x):
    y = model(x)
    return torch.fft.rfft(y, dim=1).abs().mean() + torch.view_as_complex(y.view(-1, 2, 2)).abs().mean()


def time_first(model, x):
    y = model(x.transpose(0, 1).reshape(-1, 5)) * torch.arange(18)[:, None]
    return square(y) + square(y.view(3, -1, 4).cumsum(0))


code("batch_statistics", lambda m, x: m(x).std(0).sum() + square(m(x).mean(0)) + m(x).var())
code("norms", lambda m, x: m(x).norm() + m(x).norm(p=3, dim=0).sum() + F.normalize(m(x), dim=0).sum())
code("contrastive", contrastive, lambda: r(ROWS, 5), lambda: r(ROWS, 5), gathers=True)
code("neighbours", lambda m, x: square(m(x) - m(x).roll(1, 0)) + square(m(x).flip(0) * x[:, :4]), gathers=True)
code("covariance", lambda m, x: square(torch.cov(m(x).T)) + square(torch.corrcoef(m(x).T)), lambda: r(24, 5))
code("distances", lambda m, x: torch.cdist(m(x), r(3, 4).zero_()).mean())
code("spectrum", spectrum)
code("complex_factor", lambda m, x: (m(x) * (1 + 2j)).real.pow(2).sum() + (x[:, :4] - m(x) / 1j).abs().mean())
code(
    "complex_exponent",
    lambda m, x: torch.exp(1j * m(x)).imag.mean() + torch.where(x[:, :4] > 0, m(x) * 1j, 1).abs().mean(),
)
code("determinants", lambda m, x: torch.linalg.det(m(x).view(-1, 2, 2)).sum())
code("time_first", time_first, lambda: r(ROWS, 3, 5))
code("own_column", lambda m, x, i: square(m(x)[torch.arange(len(x)), i]), lambda: r(ROWS, 5), classes)
code("last_token", lambda m, x, i: square(m(x)[torch.arange(len(x)), i - 8]), lambda: r(ROWS, 8, 5),
     lambda: ints(8, ROWS))  # fmt: skip
code("some_tokens", lambda m, x, i: square(m(x)[torch.arange(len(x))[:, None], i]), lambda: r(ROWS, 8, 5),
     lambda: ints(8, ROWS, 3))  # fmt: skip
code("assigned_column", assigned, lambda: r(ROWS, 5), classes)
code("checkpointed", lambda m, x: square(checkpoint(m, x, use_reentrant=False)))
code("penalised", penalised)
code("batch_size", lambda m, x: (m(x).pow(2).sum() / x.shape[0], len(x), {"y": [m(x), None], "z": 2.5}))
code("rprop", lambda m, x: square(m(x)), opt=lambda p: torch.optim.Rprop(p, lr=0.01))
code("no_bias_gradient", lambda m, x: square(m(x)), after=lambda m: setattr(m.a.bias, "grad", None))
code("own_gradient", lambda m, x: square(m.a(x)),
     after=lambda m: setattr(m.b.weight, "grad", m.b.weight.detach() * 0.1))  # fmt: skip


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b.detach(), rtol=1e-8, atol=1e-10)
        else:
            assert a == b


def made(case: Case) -> nn.Module:
    torch.manual_seed(1)
    model = case.model().double()
    return model.eval() if case.evaluate else model


SLOW = "lstm_of_two_layers_both_ways"


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == SLOW)) for n in CASES])
def test_steps_are_eagers_and_activations_stay_split(name):
    case = CASES[name]
    model = made(case)
    twin = copy.deepcopy(model)
    graph, other = CaseGraph(case, model, virtual(3)), case.opt(list(twin.parameters()))
    for stage in (3, 3, 0):  # of one Graph, which is captured once
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        batch = case.batch()
        found = graph(*(x.clone() for x in batch))
        other.zero_grad()
        same(found, case.train(twin, *batch))
        other.step()
        same(model.state_dict(), twin.state_dict())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            same({k: graph.optimizer.state[p][k] for k in other.state[q]}, dict(other.state[q]))
        wide = [c for c in graph.plan.collectives if c.what_for == "other" and c.kind == "all_gather" and c.bytes > 64]
        assert case.gathers == bool(wide), wide  # up to 64 bytes: statistics of the batch


@pytest.mark.parametrize("name", ["conv2d_circular", "encoder_layer", "gru", "last_token", "distances"])
def test_their_memory_is_the_plans(name):
    case = CASES[name]
    with gz.testing.fake_world(2):
        graph = CaseGraph(case, made(case))
        batch = [x[: ROWS // 2].clone() for x in case.batch()]
        if name == "encoder_layer":
            batch = [x.clone() for x in case.batch()]
        graph(*batch)
        slots = [slot for (slot,) in executor_of(graph).slots.values()]
        constants = graph._selection.last.captured.constants.values()
        known = [*batch, *slots, *pytree.tree_leaves(graph.state_dict()), *constants]
        with Storages([x for x in known if isinstance(x, Tensor)]) as mode:
            graph(*batch)
        memory = graph.plan.memory
        assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16


def test_a_program_with_rows_in_sections_reads_back():
    case = CASES["encoder_layer"]
    model = made(case)
    twin = copy.deepcopy(model)
    graph = CaseGraph(case, model, virtual(4), stage=3)
    batch = r(8, 5, 8), r(8)
    same(graph(*batch), case.train(twin, *batch))
    assert not [c for c in graph.plan.collectives if c.what_for == "other" and c.kind == "all_gather"]
    assert str(gz.parse(str(graph.program))) == str(graph.program)


def test_a_view_of_rows_in_sections_that_takes_them_apart_otherwise_gathers():
    def step(model, x):
        y = model(x).reshape(3, 2 * ROWS // 3, 2)  # rows and columns in one dim, and then another one
        return square(y.reshape(-1, 4) @ y.reshape(4, -1)[:, :3])

    case = Case(MLP, lambda: (r(ROWS, 5),), step)
    model = made(case)
    twin = copy.deepcopy(model)
    batch = case.batch()
    same(CaseGraph(case, model, virtual(2))(*batch), case.train(twin, *batch))


def packed(model, x, lengths):
    return square(model(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data)


def ctc(model, x, lengths):
    scores = model(x)[0].log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, torch.ones(ROWS, 2, dtype=torch.long), lengths + 1, lengths)


@pytest.mark.parametrize(("step", "what"), [(packed, "a packed sequence"), (ctc, "ctc_loss")])
def test_lengths_that_are_data_say_so(step, what):
    case = Case(lambda: nn.LSTM(5, 4, batch_first=True), None, step)
    with pytest.raises(gz.CaptureError, match=f"the shapes inside {what} depend on lengths"):
        CaseGraph(case, made(case), virtual(2))(r(ROWS, 3, 5), torch.full((ROWS,), 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: nn.Embedding(7, 4, max_norm=1.0), "max_norm"), (lambda: nn.Embedding(7, 4, sparse=True), "sparse=True")],
)
def test_embeddings_that_no_graph_can_hold_say_so(make, message):
    case = Case(make, None, lambda m, ids: square(m(ids)))
    with pytest.raises(gz.CaptureError, match=message) as caught:
        CaseGraph(case, made(case), virtual(2))(ints(7, ROWS))
    assert "test_user_models.py" in str(caught.value)
