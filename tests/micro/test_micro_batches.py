"""A step in micro-batches is the step of the whole batch."""

import warnings

import numpy as np
import pytest
import torch
from graphs import TrainGraph
from jobs_in_parts import (
    WIDE,
    Images,
    Words,
    masked,
    micro_batch_graph,
    momentum,
    pictures,
    plain,
    same,
    sentences,
    smooth,
    tokens,
    trained,
    weighted,
)  # fmt: skip
from torch import nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.ir import ops, value
from graphzero.ir.verifier.verify import verify

pytestmark = pytest.mark.strict
B, S = gz.sbp.B, gz.sbp.S


def steps_are_plain(loss, layouts, names=("dp",), early=False, **options):
    """One Graph takes a step in each layout: a stage of ZeRO and a number of micro-batches."""
    graph = micro_batch_graph(Words, loss, names=names, **options)
    graph.config.set_optimizer_in_backward(early)
    if "tp" in names:
        split_over_tp(graph.model, graph.placement, names)
    batches = sentences(len(layouts))
    same(trained(graph, batches, layouts), plain(Words, loss, batches, clip=options.get("clip", 1.0)))


def test_token_means_over_ragged_rows_are_those_of_plain_torch():
    steps_are_plain(tokens, [(0, 1), (0, 2), (0, 4), (0, 8), (0, 8), (1, 8), (2, 4), (3, 2), (3, 8)])


@pytest.mark.parametrize("loss", [weighted, smooth, masked])
def test_so_are_other_means_over_what_counts(loss):
    steps_are_plain(loss, [(0, 8), (3, 4), (3, 4)])


def test_a_mean_of_means_is_something_else():
    """What a loop over micro-batches gives that divides each loss by its own tokens."""
    (x, t), *_ = sentences()
    torch.manual_seed(0)
    model = Words().to(WIDE)
    means = torch.stack([tokens(model(a), b) for a, b in zip(x.chunk(4), t.chunk(4), strict=True)])
    right = plain(Words, tokens, sentences(1))["loss 0"]
    assert abs(means.mean() - right) > 1e-3
    same(trained(micro_batch_graph(Words, tokens, 4, 2, ranks=1), sentences(1)), {"loss 0": right})


def test_dropout_masks_do_not_depend_on_the_number_of_micro_batches():
    def run(ranks, *parts):
        torch.manual_seed(7)
        graph = micro_batch_graph(lambda: Words(0.3), tokens, ranks=ranks)
        return trained(graph, sentences(), [(2, count) for count in parts])

    wanted = run(1, 1, 1, 1)
    for ranks, *parts in ((1, 2, 2, 2), (2, 4, 8, 4), (4, 2, 2, 2)):
        same(run(ranks, *parts), wanted, 1e-7)


def test_batch_norm_is_that_of_a_micro_batch_and_carries_its_buffers_as_a_loop_does():
    ranks, parts = 2, 4
    graph = micro_batch_graph(Images, F.cross_entropy, ranks=ranks)
    with pytest.warns(UserWarning, match=r"statistics of a micro-batch.*jobs_in_parts.py:\d+ in forward"):
        found = trained(graph, pictures(), [(stage, parts) for stage in (0, 2, 3)])
    same(found, by_hand(ranks, parts))
    assert found["model norm.num_batches_tracked"] == 3 * parts


def by_hand(ranks, parts):
    torch.manual_seed(0)
    model = Images().to(WIDE)
    optimizer = momentum(model.parameters(), lr=0.01)
    found = {}
    for step, (x, t) in enumerate(pictures()):
        optimizer.zero_grad()
        rows = torch.arange(len(x)).view(ranks, parts, -1)
        total = torch.zeros((), dtype=WIDE)
        for part in range(parts):
            mine = rows[:, part].flatten()  # each rank's micro-batch
            loss = F.cross_entropy(model(x[mine]), t[mine]) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found[f"loss {step}"] = total
    return found | {f"model {name}": x for name, x in model.state_dict().items()}


def test_pooled_tokens_whose_gradient_names_strides_are_cut_as_others():
    """PyTorch gives the mean over tokens in channels last the strides of an image: backward writes them by strides."""

    class Pooled(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.model = nn.ModuleList([nn.Linear(6, 4), nn.AdaptiveAvgPool1d(1), nn.Linear(4, 3)])
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            tokens, pool, head = self.model
            loss = head(pool(tokens(x).transpose(1, 2)).flatten(1)).square().mean()
            loss.backward()
            return loss

    report = gz.check(Pooled(), torch.rand(8, 5, 6), dtype=torch.float64, rtol=1e-9)
    assert report, str(report)


def test_norms_within_a_sample_need_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = plain(lambda: Images(nn.GroupNorm(2, 6)), F.cross_entropy, pictures())
        same(trained(micro_batch_graph(lambda: Images(nn.GroupNorm(2, 6)), F.cross_entropy, 4, 3), pictures()), wanted)


def split_over_tp(model, place, names):
    def on_tp(sbp):
        return tuple(sbp if name == "tp" else B for name in names)

    gz.to_global(model.layer.linear1, placement=place, sbp={"weight": on_tp(S(0)), "bias": on_tp(S(0))})
    gz.to_global(model.layer.linear2, placement=place, sbp={"weight": on_tp(S(1)), "bias": on_tp(B)})
    gz.to_global(model.head, placement=place, sbp={"weight": on_tp(S(0)), "bias": on_tp(S(0))})


@pytest.mark.parametrize(
    ("names", "stages"), [(("dp", "tp"), (0, 1, 2, 3)), (("tp", "dp"), (1, 2, 3)), (("tp",), (0,))]
)
def test_tensor_axes_stand_beside_micro_batches(names, stages):
    ranks = np.arange(4).reshape(2, 2) if len(names) == 2 else np.arange(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps_are_plain(tokens, [(stage, 4) for stage in stages], ranks=ranks, names=names)


def test_so_do_two_data_axes():
    graph = micro_batch_graph(Words, tokens, 4, ranks=np.arange(4).reshape(2, 2), names=("dp_replicate", "dp_shard"))
    graph.config.enable_zero(stage=3, axis="dp_shard")
    same(trained(graph, sentences()), plain(Words, tokens, sentences()))


def test_the_optimizer_may_step_while_the_last_micro_batch_runs():
    steps_are_plain(tokens, [(1, 4), (2, 4), (3, 4)], clip=None, early=True)


def matrices():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Muon])
def test_any_optimizer_steps_once(optimizer):
    wanted = plain(matrices, tokens, sentences(), optimizer)
    same(trained(micro_batch_graph(matrices, tokens, 2, 2, optimizer=optimizer), sentences()), wanted, 1e-7)


@pytest.mark.slow
def test_a_compiled_step_is_the_same():
    graph = micro_batch_graph(matrices, tokens, 4, 2)
    graph.config.set_executor("inductor")
    same(trained(graph, sentences()), plain(matrices, tokens, sentences()), 1e-7)


class Evaluate(gz.Graph):
    def __init__(self, model, parts, stage=0):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = model
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(parts)

    def build(self, x, t):
        y = self.model(x)
        return {"scores": y, "columns": y.movedim(0, -1), "hits": (y.argmax(-1) == t).sum(), "mean": y.mean()}


def test_an_evaluation_puts_its_outputs_together():
    torch.manual_seed(0)
    model = Words().to(WIDE).eval()
    (x, t), *_ = sentences()
    y = model(x)
    for stage, parts in ((0, 2), (3, 8)):
        found = Evaluate(model, parts, stage)(x, t)
        torch.testing.assert_close(found["scores"], y.detach())
        torch.testing.assert_close(found["columns"], y.detach().movedim(0, -1))
        assert found["hits"] == (y.argmax(-1) == t).sum()
        torch.testing.assert_close(found["mean"], y.mean().detach())


def test_inputs_that_are_not_cut_are_the_same_for_every_micro_batch():
    class Weighted(gz.Graph):
        def __init__(self, parts):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3).to(WIDE)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.config.set_input("weight", sbp=B)
            self.config.set_gradient_accumulation_steps(parts)

        def build(self, x, t, weight, scale):
            loss = F.cross_entropy(self.model(x) * scale, t, weight=weight)
            loss.backward()
            return loss

    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(12, 4, generator=generator, dtype=WIDE), torch.randint(0, 3, (12,), generator=generator)
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=WIDE)
    losses = [[graph(x, t, weight, 2.0) for _ in range(3)] for graph in (Weighted(1), Weighted(3), Weighted(6))]
    for some in losses[1:]:
        torch.testing.assert_close(torch.stack(some), torch.stack(losses[0]))


def test_a_program_says_what_is_repeated_and_reads_back():
    graph = micro_batch_graph(matrices, tokens, 4, 2)
    graph(*sentences()[0])
    text = str(graph.program)
    assert "forward x3:" in text and "backward x3:" in text and "mb=" not in text.splitlines()[0]
    assert str(gz.parse(text)) == text
    assert all(str(gz.parse(text)) == text for text in {str(record.after) for record in graph.history})
    assert {value.repeats_of(node) for node in graph.program.nodes} == {0, 3}


def test_what_hangs_on_the_batch_alone_is_computed_before_and_reduced_once():
    with gz.testing.fake_world(2):
        graph = micro_batch_graph(Words, tokens, 4, 0, real=True)
        x, t = sentences()[0]
        graph.compile(x[:8], t[:8])
        sums = [c for c in graph.plan.collectives if c.what_for == "other"]
        assert len(sums) == 2 and graph.program.gradients()  # of the tokens, before; of the loss, after


def test_another_number_of_micro_batches_is_another_program_of_the_same_run():
    graph = micro_batch_graph(Words, tokens, 1, 2)
    wanted = plain(Words, tokens, sentences(4))
    found = {}
    for i, (parts, batch) in enumerate(zip((1, 4, 2, 1), sentences(4), strict=True)):
        graph.config.set_gradient_accumulation_steps(parts)
        loss, y = graph(*batch)
        found |= {f"scores {i}": y, f"loss {i}": loss}
    found |= {f"model {name}": x for name, x in graph.full_state_dict()["modules"]["model"].items()}
    same(found, {name: x for name, x in wanted.items() if name in found})


def test_a_check_is_of_all_micro_batches_and_stops_the_step_before_anything_changes():
    class Checked(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.model = Images().to(WIDE)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(4)

        def build(self, x, t):
            y = self.model(x)
            assert y.isfinite().all(), "not finite"
            loss = F.cross_entropy(y, t)
            loss.backward()
            return loss

    graph, (x, t) = Checked(), pictures()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph(x, t)
    before = {name: value.clone() for name, value in graph.model.state_dict().items()}
    x[5] = float("nan")
    with pytest.raises(gz.CheckError, match="not finite"):
        graph(x, t)
    assert all(torch.equal(before[name], now) for name, now in graph.model.state_dict().items())


class Net(gz.Graph):
    """One matrix, and a loss of what it makes."""

    def __init__(self, loss, parts, ranks):
        super().__init__(gz.placement("cpu", ranks, names=("dp", "tp")[: np.ndim(ranks)], virtual=True))
        torch.manual_seed(0)
        self.model = nn.Linear(6, 2).to(WIDE)
        self.loss = loss
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_gradient_accumulation_steps(parts)

    def build(self, x):
        loss = self.loss(self.model(x))
        loss.backward()
        return loss


@pytest.mark.parametrize(("by", "turn"), [(4, 1), (10, -1), (12, 1), (15, -1), (16, 1), (20, -1)])
def test_a_number_that_a_sum_is_divided_by_is_the_users(by, turn):
    """Of equal rows the statistics of a micro-batch are those of the batch."""
    x = torch.ones(16, 6, dtype=WIDE)
    losses = (lambda y: (y.square().sum() / by).sqrt(), lambda y: (y - y.sum(0) / by).square().mean())
    for loss, several in zip(losses[::turn], ((2, 8), (4,)), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted, *found = (Net(loss, parts, range(2))(x) for parts in (1, *several))
        torch.testing.assert_close(found, [wanted] * len(found))


def test_an_axis_of_one_rank_cuts_nothing():
    x = torch.randn(16, 6, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    losses = (
        lambda y: y.relu().mean(),
        lambda y: torch.where(y > 0, y, 0.1 * y).mean(),
        lambda y: F.kl_div(y.log_softmax(-1), y.softmax(-1).detach() * 0.5 + 0.25, reduction="batchmean"),
    )
    for loss in losses:
        wanted = Net(loss, 1, range(2))(x)
        for ranks in (range(1), np.arange(2).reshape(1, 2), np.arange(1).reshape(1, 1)):
            torch.testing.assert_close(Net(loss, 4, ranks)(x), wanted)


def test_mixed_precision_recomputation_and_micro_batches_go_together():
    def run(memory):
        graph, losses, activations = micro_batch_graph(Words, tokens, 4), [], []
        graph.model.float()
        graph.config.enable_amp()
        graph.config.set_activation_memory(memory)
        for stage, batch in enumerate(sentences(4)):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            losses.append(graph(*batch)[0])
            activations.append(graph.plan.memory.activations)
        return torch.stack(losses), activations

    (wanted, kept), (found, fewer) = run(None), run("checkpoint")
    assert torch.equal(found, wanted)
    assert all(few < many for few, many in zip(fewer, kept, strict=True))


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_in_16_bit_are_added_up_in_float32(stage):
    """A rank adds 1 to each element 512 times; in bfloat16 the sum would stay at 256."""
    model = nn.Linear(4, 4, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"micro_batches": 512, "stage": stage, "dtype": torch.bfloat16}
    graph = TrainGraph(model, lambda model, x: model(x).float().sum(), optimizer, **options)
    graph(torch.ones(1024, 4))
    assert torch.allclose(start - graph.full_state_dict()["modules"]["model"]["weight"], torch.tensor(1024.0))


@pytest.mark.slow
def test_compiled_mixed_precision_is_the_same():
    def run(executor):
        graph = micro_batch_graph(lambda: matrices().float(), tokens, 4, 2)
        graph.model.float()
        graph.config.enable_amp()
        graph.config.set_executor(executor)
        return torch.stack([graph(*batch)[0] for batch in sentences()])

    torch.testing.assert_close(run("inductor"), run("eager"), rtol=1e-2, atol=1e-2)


# ---- what cannot be


def test_counts_in_integers_are_those_of_the_batch():
    """Among them some that are there before, of any sign, which are no multiples of the number of micro-batches."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.tensor([5, -3, 0, 7]))

        def forward(self, x):
            return self.layer(x)

    class Step(gz.Graph):
        def __init__(self, ranks):
            super().__init__(gz.placement("cpu", range(ranks), virtual=True))
            self.model = Counting()
            self.config.set_gradient_accumulation_steps(4)

        def build(self, x, y):
            self.model.seen.index_add_(0, y, torch.ones_like(y))
            table = torch.zeros(4, 4, dtype=torch.long).index_put_((y, self.model(x).argmax(1)), y + 1, accumulate=True)
            return table, torch.full((4,), -7).scatter_add(0, y, y)

    x, y = torch.randn(16, 4), torch.arange(16) * 7 % 4
    for ranks in (1, 2):
        step = Step(ranks)
        table, sums = step(x, y)
        wanted = torch.zeros(4, 4, dtype=torch.long)
        guess = step.model(x).argmax(1)
        assert torch.equal(table, wanted.index_put_((y, guess), y + 1, accumulate=True))
        assert torch.equal(sums, torch.full((4,), -7).scatter_add(0, y, y))
        assert step.model.seen.tolist() == [5 + 4, -3 + 4, 0 + 4, 7 + 4]


def test_a_share_that_does_not_divide_is_refused_with_its_numbers():
    graph = micro_batch_graph(Words, tokens, 3)
    with pytest.raises(
        gz.ConfigError, match=r"input x of shape \[16, 6\] gives each rank 8 rows.*3 micro-batches"
    ) as e:
        graph(*sentences()[0])
    assert "multiple of 6" in str(e.value)


def test_an_op_that_needs_all_rows_at_once_is_refused_at_its_line():
    def contrast(y, t):
        rows = F.normalize(y.flatten(1), dim=1)
        return F.cross_entropy(rows @ rows.t(), torch.arange(len(t)))

    with pytest.raises(gz.ConfigError, match="needs the whole batch at once") as e:
        micro_batch_graph(Words, contrast, 2)(*sentences()[0])
    assert "test_micro_batches.py" in str(e.value)


@pytest.mark.parametrize("hierarchy", [(2, 1), (2, 2)])
def test_draws_for_rows_in_sections_are_refused_at_their_line(hierarchy):
    class Dropped(gz.Graph):
        def __init__(self):
            ranks = np.arange(np.prod(hierarchy)).reshape(hierarchy)
            super().__init__(gz.placement("cpu", ranks, names=("dp", "tp"), virtual=True))
            self.config.set_input("x", sbp=(S(0), S(1)))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            x = x.transpose(0, 1) if hierarchy[1] == 1 else x
            return F.dropout(x.reshape(-1, 4))

    with pytest.raises(gz.ConfigError, match="in sections|in pieces of each row") as e:
        Dropped()(torch.randn(8, 6, 4))
    assert "test_micro_batches.py" in str(e.value)


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "4", None])
def test_a_number_that_is_none_is_refused(given):
    with pytest.raises(gz.ConfigError, match="give the number of micro-batches, 1 or more"):
        micro_batch_graph(Words, tokens).config.set_gradient_accumulation_steps(given)


def test_a_value_that_is_made_anew_may_not_be_read_after():
    graph = micro_batch_graph(Words, tokens, 4, 0)
    graph.compile(*sentences()[0])
    program = graph.history[-1].after
    inside = next(
        n
        for n in program.nodes
        if value.repeats_of(n) and n.target not in (*ops.IN_TURN, ops.micro_batch) and value.is_tensor(n)
    )
    program.set_output((*program.outputs[1:], inside), program.aux, program.updates)
    with pytest.raises(gz.VerifyError, match="made again each time"):
        verify(program)


def test_what_is_repeated_stands_together():
    graph = micro_batch_graph(Words, tokens, 4, 0)
    graph.compile(*sentences()[0])
    program = graph.history[-1].after
    inside = [n for n in program.nodes if value.repeats_of(n)]
    inside[len(inside) // 2].meta["repeat"] = 2
    with pytest.raises(gz.VerifyError, match="not repeated as often"):
        verify(program)
