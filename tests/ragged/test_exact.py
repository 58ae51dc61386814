"""Padding has no part in what a step computes, whatever it holds: here floats are padded with NaN."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import graphzero as gz
from graphzero.capture import capture

D, ROWS, TOKENS = 4, 6, 11
NAN = float("nan")
T = torch.arange


def attend(h, **more):
    return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], **more).square().mean()


def normal(h):
    return F.batch_norm(h, None, None, training=True).square().mul(h).mean()


def shifted(i):
    made = torch.zeros_like(i)
    made[:, 1:] = i[:, :-1]
    made[:, 0] = 3
    return made


# Each is a function of h[rows, tokens, D], m: bool[rows, tokens], True at the beginnings of rows, i: i64[rows, tokens].
EXACT = {
    "means and sums": [
        lambda h, m, i: h.mean() + h.mean(1).square().sum() + h.mean((0, 1)).square().sum() + h.sum((0, 2)).mean(),
        lambda h, m, i: h.var(1).sum() + h.std(0, correction=0).mean() + h.norm() + h.norm(dim=1).sum(),
        lambda h, m, i: h.amax(1).sum() + h.amin((0, 1)).sum() + h.max(1).values.sum(),
        lambda h, m, i: (h * (h.argmax(1, keepdim=True) == 2)).sum() + h.mean() * m.all() + m.any(1).sum() * h.mean(),
        lambda h, m, i: (h * m[..., None]).sum() / m.sum() + h.sum() / torch.count_nonzero(m),
        lambda h, m, i: m.sum(1).max() * h.sum(),
        lambda h, m, i: torch.where(m[..., None], h, 0.0).sum(1).div(m.sum(1, keepdim=True)).square().mean(),
        lambda h, m, i: h.reshape(-1).square().mean() + h.reshape(h.shape[0], -1).square().mean(0).sum(),
        lambda h, m, i: (h.mT @ h).square().mean() + torch.einsum("btd,bsd->bts", h, h).mean(),
        lambda h, m, i: torch.cdist(h, h).mean(),
    ],
    "numbers that were sizes": [
        lambda h, m, i: h.sum() / h.shape[0] + h.sum() / (h.shape[1] - 1) + h.sum() * len(h),
        lambda h, m, i: h.sum() / h[..., 0].numel(),
        lambda h, m, i: h.sum() * h.shape[1] ** -0.5 + h.mean() / (h.shape[0] * h.shape[1] - 1) - h.sum() / -len(h),
        lambda h, m, i: h.sum() / torch.tensor(h.shape[1]) + torch.log(torch.ones_like(h[..., 0]).sum()),
        lambda h, m, i: (h * T(h.shape[1])[None, :, None]).mean() + (h * torch.ones(D).expand(h.shape)).mean(),
        lambda h, m, i: ((h @ h.mT) * torch.ones(h.shape[1], h.shape[1]).tril()).mean(),
    ],
    "a softmax, and what is normalised": [
        lambda h, m, i: (F.softmax(h, 1) * h).sum() + h.logsumexp((0, 1)).sum() + F.log_softmax(h, 0).mean(),
        lambda h, m, i: h.masked_fill(~m[..., None], -1e9).softmax(1).mul(h).mean(),
        lambda h, m, i: normal(h.mT) + F.layer_norm(h, (D,)).mul(h).mean() + F.rms_norm(h, (D,)).mul(h).mean(),
        lambda h, m, i: h.permute(1, 2, 0).reshape(-1, h.shape[0]).softmax(-1).square().mean(),
        lambda h, m, i: (h.softmax(-1).mean((0, 1)) * F.one_hot(h.argmax(-1), D).double().mean((0, 1))).sum(),
    ],
    "attention": [
        lambda h, m, i: attend(h),
        lambda h, m, i: attend(h, is_causal=True),
        lambda h, m, i: attend(h, attn_mask=m[:, None, None, :]),
        lambda h, m, i: attend(h, dropout_p=1e-12) + attend(h, is_causal=True, dropout_p=1e-12),  # drops nothing
        lambda h, m, i: attend(h, attn_mask=m[:, None, None, :], dropout_p=1e-12),
        lambda h, m, i: (F.softmax(h @ h.mT, -1) @ h).square().mean(),
        lambda h, m, i: (h @ h.mT).masked_fill(torch.ones_like(h @ h.mT).triu(1) > 0, -1e9).softmax(-1).std(),
    ],
    "places of a dim": [
        lambda h, m, i: h[:, -1].square().mean() + h[:, -2].sum() + h[0].mean() + h[-1].mean(),
        lambda h, m, i: h[:, 0].square().mean() + h[:, 1].sum() + h[:, :3].mean(),
        lambda h, m, i: (h[:, 1:] - h[:, :-1]).square().mean() + (h[:, 2:] * h[:, :-2]).mean() + h[1:].mean(),
        lambda h, m, i: (m.cumsum(1)[..., None] * h).mean() + h.diff(dim=1).square().mean(),
        lambda h, m, i: (F.pad(h, (0, 0, 1, 0))[:, :-1] * h).mean() + F.pad(h, (0, 0, 0, 2), value=2.0).mean(),
        lambda h, m, i: F.pad(h, (0, 0, 1, 0), value=3.0).mean() + torch.cat([h, h * 2], 2).square().mean(),
        lambda h, m, i: h[T(h.shape[0]), m.sum(1) - 1].square().mean(),
        lambda h, m, i: (shifted(i)[..., None] * h).mean(),
        lambda h, m, i: h.gather(1, (m.sum(1) - 1)[:, None, None].expand(-1, 1, D)).square().mean(),
        lambda h, m, i: torch.zeros(10, D).index_add(0, i.flatten(), h.flatten(0, 1)).square().sum(),
    ],
    "losses": [
        lambda h, m, i: F.cross_entropy(h.flatten(0, 1), i.flatten() % D),
        lambda h, m, i: F.cross_entropy(h.transpose(1, 2), i % D, weight=T(1.0, D + 1)),
        lambda h, m, i: F.cross_entropy(h.flatten(0, 1), i.flatten() % D, label_smoothing=0.1),
        lambda h, m, i: F.cross_entropy(h.flatten(0, 1), i.flatten() % D, reduction="none").mean(),
        lambda h, m, i: F.cross_entropy(h[:, :-1].flatten(0, 1), i[:, 1:].flatten() % D),
        lambda h, m, i: F.cross_entropy(h[:, 0] @ h[:, 1].T, T(h.shape[0])),
        lambda h, m, i: F.binary_cross_entropy_with_logits(h, (h > 0).double()) + F.l1_loss(h, h.detach() - 0.3),
        lambda h, m, i: F.kl_div(F.log_softmax(h, -1), F.softmax(h.detach() + 1, -1), reduction="batchmean"),
        lambda h, m, i: F.smooth_l1_loss(h, h.detach() + 1.3) + F.huber_loss(h, h.detach() + 0.2),
        lambda h, m, i: (h + F.embedding(i, T(40.0).view(10, 4) / 10)).square().mean(),
    ],
}  # fmt: skip
REFUSED = {
    "sort": lambda h: h.sort(1).values[:, 0],
    "flip": lambda h: h.flip(1) * h,
    "prod": lambda h: h.prod(1),
    "median": lambda h: h.median(1).values,
    "convolution": lambda h: F.conv1d(h.transpose(1, 2), torch.ones(D, D, 3, dtype=h.dtype)),
    "linspace": lambda h: torch.linspace(0, 1, h.shape[1])[:, None] * h,
    "slice": lambda h: h[:, -3:],
    "roll": lambda h: h.roll(1, 0) * h,
}


class Step(gz.Graph):
    def __init__(self, layer, work, ranks=2, **fill):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.layer, self.work = layer, work
        self.add_optimizer(torch.optim.SGD(layer.parameters(), 1.0))
        self.config.set_shapes({"*": ("rows", "tokens")}, {"rows": ROWS, "tokens": [TOKENS]}, fill=fill)

    def build(self, x: Tensor, m: Tensor, i: Tensor):
        h, found = computed(self.layer, self.work, x, m, i)
        sum(found).backward()
        return h, found


def computed(layer, work, x, m, i):
    h = torch.tanh(layer(x))
    return h, [one(h, m, i) for one in work]


def batch(rows, tokens):
    made = torch.Generator().manual_seed(100 * rows + tokens)
    x = torch.randn(rows, tokens, D, dtype=torch.float64, generator=made)
    ends = torch.randint(2, tokens + 1, (rows,), generator=made)
    return x, T(tokens) < ends[:, None], torch.randint(0, 10, (rows, tokens), generator=made)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("group", EXACT)
def test_results_and_gradients_are_those_without_padding_though_it_is_nan(group):
    torch.manual_seed(0)
    layer = nn.Linear(D, D)
    plain, graph = copy.deepcopy(layer), Step(layer, EXACT[group], x=NAN, i=7)
    for rows, tokens in ((5, 9), (3, 6), (ROWS, TOKENS)):
        layer.load_state_dict(plain.state_dict())
        h, found = graph(*batch(rows, tokens))
        plain.zero_grad()
        wanted_h, wanted = computed(plain, EXACT[group], *batch(rows, tokens))
        sum(wanted).backward()
        torch.testing.assert_close(h, wanted_h.detach(), rtol=0, atol=1e-12)
        for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12, msg=lambda text, n=n: f"{n}: {text}")
        for stepped, param in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(stepped, param - param.grad, rtol=1e-9, atol=1e-10)
    assert len(graph._selection.programs.all) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_padding_cannot_be_kept_out_of_is_refused_with_the_op_and_the_line(name):
    graph = Step(nn.Linear(D, D), [lambda h, m, i: REFUSED[name](h).square().mean()])
    with pytest.raises(gz.CaptureError, match=f"padding cannot be tracked here: {name}") as caught:
        graph.compile(*batch(3, 8))
    assert "test_exact.py" in str(caught.value) and "> " in str(caught.value)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda h: h.mean() if h.shape[1] > 7 else h.sum(), "is another program at .*tokens=6"),
        (
            lambda h: h.sum() / torch.tensor([h.shape[0], 2]).prod(),
            "makes a tensor of numbers that depend on the sizes",
        ),
        (lambda h: h.sum() * (h.shape[1] // 2), "reads the number"),
        (lambda h: h.view(h.shape[0] // 2, 2, h.shape[1], D).mean(), "where it fails"),
    ],
)
def test_what_is_otherwise_at_other_sizes_is_refused(work, message):
    with pytest.raises(gz.CaptureError, match=message):
        Step(nn.Linear(D, D), [lambda h, m, i: work(h)]).compile(*batch(3, 8))


def test_a_size_of_the_model_is_refused_after_few_captures(monkeypatch):
    """A slice of all positions is no op, and two other sizes at which it is one suffice to say so."""
    table, trials = torch.zeros(TOKENS, D), []

    def captured(step, inputs):
        trials.append(inputs)
        return capture(step, inputs)

    monkeypatch.setattr("graphzero.plugins.ragged.unpadded.capture", captured)
    graph = Step(nn.Linear(D, D), [lambda h, m, i: (h + table[: h.shape[1]]).mean()])
    with pytest.raises(gz.CaptureError, match="is another program at .*tokens=9"):
        graph.compile(*batch(3, 8))
    assert len(trials) == 4  # other rows, which agree, and other tokens; twice


class Returns(gz.Graph):
    def __init__(self, work):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.work = work
        self.config.set_shapes({"x": ("rows", "tokens")}, {"rows": 4, "tokens": "powers"})

    def build(self, x):
        return self.work(x)


def test_outputs_are_cut_wherever_their_dims_went():
    def work(x):
        return (
            x * 2,
            x.transpose(0, 1),
            x.reshape(-1, 3),
            x.reshape(-1),
            x[:, 1:],
            x.sum(1),
            x @ x.mT,
            x.permute(2, 0, 1),
        )

    graph = Returns(work)
    for rows, tokens in ((5, 6), (3, 5), (8, 8), (1, 7)):
        x = torch.randn(rows, tokens, 3)
        for found, wanted in zip(graph(x), work(x), strict=True):
            torch.testing.assert_close(found, wanted)
    assert len(graph._selection.programs.all) == 2


def test_numbers_that_build_returns_must_not_be_those_of_padding():
    assert Returns(lambda x: (x.sum(), x.shape[2]))(torch.ones(3, 5, 2))[1] == 2
    with pytest.raises(gz.CaptureError, match="output 1, a number that depends on the sizes"):
        Returns(lambda x: (x.sum(), x.shape[1]))(torch.ones(3, 5, 2))


def test_a_batch_that_is_shorter_than_what_build_reads_is_refused():
    graph = Returns(lambda x: x[:, 3].sum())
    graph.config.set_shapes({"x": ("rows", "tokens")}, {"rows": 4, "tokens": [8]})
    assert graph(torch.ones(2, 5, 1)) == 2
    with pytest.raises(
        gz.ConfigError, match="build reads place 3 along 'tokens', counted from 0, and this batch has 2"
    ):
        graph(torch.ones(2, 2, 1))
