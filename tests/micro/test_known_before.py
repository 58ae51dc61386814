"""What a loss divides by is that of the whole batch wherever it can be known before micro-batches run."""

import random
import warnings

import pytest
import torch
from jobs_in_parts import WIDE
from torch import nn
from torch.nn import functional as F

import graphzero as gz

ROWS, WIDTH, CLASSES = 16, 6, 5
WEIGHT = torch.linspace(0.4, 1.7, CLASSES, dtype=WIDE)  # a tensor that losses close over


class Model(nn.Module):
    """A classifier beside what a step reads and does not train: a teacher, weights of classes, a count of labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.scale = nn.Parameter(torch.ones(2))
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.frozen = nn.Parameter(torch.rand(CLASSES) + 0.2, requires_grad=False)
        self.register_buffer("weight", torch.rand(CLASSES) + 0.2)
        self.register_buffer("seen", torch.ones(CLASSES))
        self.to(WIDE)

    def forward(self, x, t):
        self.seen = 0.9 * self.seen + F.one_hot(t, CLASSES).sum(0)
        return self.net(x)


class Step(gz.Graph):
    def __init__(self, loss, parts, stage=0, ranks=2):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model, self.loss = Model(), loss
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.add_optimizer(torch.optim.SGD(trained, lr=0.1))
        self.config.enable_zero(stage > 0, stage=stage or 2)
        self.config.set_gradient_accumulation_steps(parts)

    def build(self, x, t):
        loss = self.loss(self.model, self.model(x, t), x, t)
        loss.backward()
        return loss


def batches(steps=2):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, dtype=WIDE, generator=generator)
        yield x, torch.randint(0, CLASSES, (ROWS,), generator=generator).sort()[0]


def trained(loss, parts, stage=0, ranks=2):
    """Losses, and what the model holds after them; a warning that a loss gives is an error."""
    graph = Step(loss, parts, stage, ranks)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*statistics of a micro-batch")
        warnings.filterwarnings("ignore", message=".*get no gradient")
        losses = [graph(*batch) for batch in batches()]
    return {**{f"loss {i}": x for i, x in enumerate(losses)}, **graph.full_state_dict()["modules"]["model"]}


def plain(loss):
    model, losses = Model(), {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i, (x, t) in enumerate(batches()):
        optimizer.zero_grad()
        losses[f"loss {i}"] = value = loss(model, model(x, t), x, t)
        value.backward()
        optimizer.step()
    return {**losses, **model.state_dict()}


def is_plain(loss, *layouts):
    wanted = plain(loss)
    for layout in layouts:
        found = trained(loss, *layout)
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x.detach(), rtol=1e-10, atol=1e-10, msg=f"{name} differs: {layout}")


def smoothed(weight):
    def loss(model, y, x, t):
        return F.cross_entropy(y, t, weight=weight(model), label_smoothing=0.05, ignore_index=2)

    return loss


def by_hand(weight):
    def loss(model, y, x, t):
        each, mine = F.cross_entropy(y, t, reduction="none"), weight(model)[t]
        return (each * mine).sum() / mine.sum()

    return loss


def focal(model, y, x, t):
    p, alpha = y.softmax(-1).gather(1, t[:, None]).squeeze(1), model.weight[t]
    return -(alpha * (1 - p) ** 2 * p.log()).sum() / alpha.sum()


def distilled(model, y, x, t):
    """Rows weigh what a teacher that is not trained is sure of."""
    taught = model.teacher(x)
    sure = taught.softmax(-1).max(-1)[0]
    each = F.kl_div(y.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (each * sure).sum() / sure.sum()


@pytest.mark.parametrize(
    "loss",
    [
        *(make(weight) for make in (smoothed, by_hand) for weight in (
            lambda model: WEIGHT, lambda model: model.weight, lambda model: model.frozen, lambda model: model.seen,
        )),
        focal,
        distilled,
    ],
)  # fmt: skip
def test_weights_of_classes_and_rows_add_up_over_the_whole_batch(loss):
    is_plain(loss, (2,), (4, 3), (8, 2, 1))


def learned_scale(model, y, x, t):
    """The gradients of these two scales are of losses that all micro-batches make together."""
    taught = (y - model.teacher(x)).square().sum()
    return F.cross_entropy(y, t) * model.scale[0].exp() + taught * model.scale[1] + model.scale.sum()


def cut_in_two(model, y, x, t):
    cut = y.detach().requires_grad_()
    loss = F.cross_entropy(cut, t) * model.scale[0]
    loss.backward()
    y.backward(cut.grad * model.scale[0].detach())
    return loss.detach() + (model.scale[1] * 0.1).square()


@pytest.mark.parametrize("loss", [learned_scale, cut_in_two])
def test_a_gradient_of_what_all_micro_batches_make_is_no_statistic_of_one(loss):
    is_plain(loss, (2,), (4, 3), (8, 2, 1))


def test_a_batch_norm_that_is_not_trained_is_that_of_the_batch():
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(WIDE).requires_grad_(False)

    def loss(model, y, x, t):
        return F.cross_entropy(model.net(norm(x)), t)

    for parts in (2, 4):
        graph = Step(loss, parts)
        graph.norm = norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [graph(*batch) for batch in batches()]
        torch.testing.assert_close(
            torch.stack(found), torch.stack([plain(loss)[f"loss {i}"] for i in range(2)]).detach()
        )


def test_what_a_micro_batch_reads_of_the_model_over_all_rows_is_warned_of_at_its_line():
    def loss(model, y, x, t):
        return F.cross_entropy(y - y.mean(0).expand(ROWS, CLASSES), t)

    with pytest.warns(UserWarning, match=r"statistics of a micro-batch.*test_known_before.py:\d+ in loss"):
        Step(loss, 2)(*next(batches()))


class InAnotherOrder(gz.Graph):
    """Every rank has all rows of ``x``: their best two numbers, in another order, lie opposite those of ``y``."""

    def __init__(self):
        super().__init__(gz.placement("cpu", [0], virtual=True))
        self.model = nn.ModuleList([nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, CLASSES)])
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_input("x", sbp=gz.sbp.B)
        self.config.set_gradient_accumulation_steps(4)

    def build(self, x, y, weights):
        z = self.model[0](x)
        best = self.model[1](z).tanh().topk(2, -1)[0][x[:, 0].argsort()]
        each = (best - y).square().mean(1) + z.tanh().square().mean(1)
        loss = (each * weights).sum() / weights.sum()
        loss.backward()
        return loss


def test_rows_that_all_micro_batches_add_up_to_are_no_statistic_of_one():
    """Gradients of rows in another order, of which a micro-batch knows its own; they were taken for a mean of all."""
    problem = r"'tanh_backward_1' has rows that a sum over the micro-batches makes"
    advice = r"Each micro-batch has all rows of x, and its own of y, weights: with an axis .* begins with dp"
    with pytest.raises(gz.ConfigError, match=rf"{problem}(.|\n)*{advice}"):
        InAnotherOrder()(torch.rand(8, WIDTH), torch.rand(8, 2), torch.rand(8))


class Biased(nn.Module):
    """Scores with a bias from a table, each of whose entries several classes read, as positions of a window do."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.rand(3))
        self.register_buffer("index", torch.arange(CLASSES) % 3)

    def forward(self, x):
        return self.inner(x) + self.table[self.index]


def test_a_table_on_a_stage_is_added_up_beside_a_count_of_labels():
    """Zeros that its gradient begins with were taken for a result of all micro-batches, since the count is one."""
    torch.manual_seed(0)
    model = nn.Sequential(Biased(), nn.Linear(CLASSES, CLASSES)).to(WIDE)

    class Staged(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", [0, 1], names=("pp",), virtual=True))
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(2)
            for stage, layer in enumerate(model):
                self.config.set_stage(layer, stage)

        def build(self, x, t):
            loss = F.cross_entropy(self.model(x), t)
            loss.backward()
            return loss

    report = gz.check(Staged(), *next(batches()), rtol=1e-9)
    assert report, str(report)


class RandomTerms:
    """Sums over rows of what the model makes, weighed and divided by what depends on nothing that is trained."""

    def __init__(self, seed, model, x, t):
        self.random, self.model, self.x, self.t = random.Random(seed), model, x, t

    def loss(self, y):
        return sum(self._term(y) for _ in range(self.random.randint(1, 3)))

    def _pick(self, *makers):
        return self.random.choice(makers)()

    def _term(self, y):
        each = self._pick(
            lambda: F.cross_entropy(y, self.t, reduction="none"),
            lambda: F.cross_entropy(y, self.t, weight=self._classes(1), label_smoothing=0.1, reduction="none"),
            lambda: (y - self.model.teacher(self.x).detach()).square().mean(-1),
            lambda: (1 - y.softmax(-1).gather(1, self.t[:, None]).squeeze(1)) ** 2,
            lambda: F.binary_cross_entropy_with_logits(
                y, F.one_hot(self.t, CLASSES).to(y), pos_weight=self._classes(1), reduction="none"
            ).sum(-1),
        )
        rows = self._rows(2)
        return self._pick(
            lambda: (each * rows).sum() / (rows.sum().abs() + 0.5),
            lambda: (each * rows).mean() * self._number(2),
            lambda: (each / (rows.abs() + 0.5)).sum() / (self._number(2).abs() + 1),
            lambda: F.cross_entropy(y, self.t, weight=self._classes(2), ignore_index=self.random.randint(-1, 4)),
            lambda: F.cross_entropy(y, self.t, weight=self._classes(2), label_smoothing=0.2),
            lambda: (each * self._number(1)).mean() * self.model.scale[0].exp() + self.model.scale.square().sum(),
        )

    def _classes(self, depth):
        """A positive number for each class."""
        if depth == 0:
            return self._pick(
                lambda: WEIGHT, lambda: self.model.weight, lambda: self.model.frozen, lambda: self.model.seen
            )
        return self._pick(
            lambda: self._classes(0),
            lambda: F.one_hot(self.t, CLASSES).sum(0) + self._classes(depth - 1),
            lambda: self._classes(depth - 1) / self._classes(depth - 1).sum(),
            lambda: self.model.teacher(self.x).softmax(-1).mean(0),
            lambda: self._classes(depth - 1) / (self._number(depth - 1).abs() + 1),
            lambda: torch.stack([(self.t == i).sum() for i in range(CLASSES)]).clamp(min=1).to(WIDE).reciprocal(),
        )

    def _rows(self, depth):
        if depth == 0:
            return self._pick(
                lambda: self.x[:, self.random.randrange(WIDTH)], lambda: (self.t > self.random.randrange(4)).to(WIDE),
                lambda: torch.rand_like(self.x[:, 0]), lambda: self.model.teacher(self.x).logsumexp(-1),
            )  # fmt: skip
        return self._pick(
            lambda: self._classes(depth - 1)[self.t],
            lambda: self._rows(0) * self._rows(depth - 1),
            lambda: self._rows(depth - 1) - self._number(depth - 1),
            lambda: (self.model.teacher(self.x) * self._classes(depth - 1)).amax(-1),
            lambda: (self.x - self.x.mean(0)).square().sum(-1) / (self.x.var(0).sum() + self._number(0)),
        )

    def _number(self, depth):
        return self._pick(
            lambda: self._rows(depth and depth - 1).sum(),
            lambda: self._rows(depth and depth - 1).mean(),
            lambda: self._rows(depth and depth - 1).std(),
            lambda: self._rows(depth and depth - 1).amax(),
            lambda: self._rows(depth and depth - 1).norm(),
            lambda: self._classes(depth and depth - 1).amin(),
        )


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 32))])
def test_random_losses_over_counts_and_constants_are_those_of_the_whole_batch(seed):
    def loss(model, y, x, t):
        return RandomTerms(seed, model, x, t).loss(y)

    parts, stage, ranks = random.Random(seed).choice([(2, 0, 2), (4, 3, 2), (8, 2, 1), (16, 0, 1), (2, 3, 4)])
    torch.manual_seed(seed)
    wanted = trained(loss, 1, 0, 1)
    torch.manual_seed(seed)
    found = trained(loss, parts, stage, ranks)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9, msg=f"{name} differs")
