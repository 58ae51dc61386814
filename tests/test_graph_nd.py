"""Graphs on placements of two and three axes: the steps are those of plain PyTorch, and plans are what runs."""

import gc
from collections import Counter
from math import prod

import pytest
import torch
from graphs import TrainGraph
from inside import executor_of
from test_plan_measured import Net, Storages
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.sbp import B, S

pytestmark = pytest.mark.strict
HYBRID = ("dp_replicate", "dp_shard")
D = torch.float64


def place(shape=(2, 2), names=HYBRID, virtual=True):
    ranks = torch.arange(prod(shape)).reshape(shape).tolist()
    return gz.placement("cpu", ranks, names=names, virtual=virtual)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.second, self.last = nn.Conv2d(5, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(F.relu(self.second(x)).mean((2, 3)))


class SequenceFirst(nn.Module):
    """Rows of the batch lie in dim 1 on the way.  What a layer norm ends is not averaged, which would be zero."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)

    def forward(self, x):
        return self.last(self.inner(x).transpose(0, 1)).transpose(0, 1).mean(1)


def mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 3))


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=8, n_embd=12, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=22, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch_of(model, seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    if hasattr(model, "config"):
        x = torch.randint(0, 37, (rows, 6), generator=generator)
        y = x.clone()
        y[0, 2:], y[5] = -100, -100  # ranks count unequal numbers of tokens
        return x, y
    shape = {"ConvNet": (3, 8, 8), "SequenceFirst": (5, 6)}.get(type(model).__name__, (6,))
    x = torch.randn(rows, *shape, generator=generator, dtype=D)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def loss_of(model, x, y):
    out = model(x)
    if hasattr(out, "logits"):
        return F.cross_entropy(out.logits.flatten(0, 1), y.flatten())
    return F.cross_entropy(out, y) if out.dim() > 1 else out.pow(2).mean()


def adamw_graph(
    make, placement, stage=0, axis=None, optimizer=torch.optim.AdamW, prepare=None, loss_fn=loss_of
) -> TrainGraph:
    torch.manual_seed(0)
    model = make().to(D)
    if prepare is not None:
        prepare(model, placement)
    optimizer = optimizer(model.parameters(), lr=1e-2)
    return TrainGraph(model, loss_fn, optimizer, placement=placement, clip=0.5, stage=stage, axis=axis)


def plain(make, steps=2, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = make().to(D)
    own, losses = optimizer(model.parameters(), lr=1e-2), []
    for step in range(steps):
        own.zero_grad()
        losses.append(loss_of(model, *batch_of(model, step)))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own.step()
    return model, losses


def check_stages(make, placement, axis):
    """One Graph, which is captured once, takes each step at another stage."""
    twin, losses = plain(make, steps=4)
    graph = adamw_graph(make, placement)
    for step, loss in enumerate(losses):
        graph.config.enable_zero(step > 0, stage=step or 2, axis=axis)
        found = graph(*batch_of(graph.model, step))
        torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, s=step: f"stage {s}: {m}")
    for (name, ours), theirs in zip(graph.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def check(make, placement, stage, axis=None, prepare=None):
    twin, losses = plain(make)
    graph = adamw_graph(make, placement, stage, axis, prepare=prepare)
    for step, loss in enumerate(losses):
        torch.testing.assert_close(graph(*batch_of(graph.model, step)), loss.detach(), rtol=1e-11, atol=1e-11)
    for (name, ours), theirs in zip(graph.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")
    return graph


MODELS = (ConvNet, gpt2, llama, SequenceFirst)
LAYOUTS = [
    pytest.param((HYBRID, None), id="all data axes"),
    pytest.param((HYBRID, "dp_shard"), id="hybrid"),
    pytest.param((("dp", "tp"), None), id="dp x tp"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [mlp, *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS)])
def test_models_on_two_axes_train_as_plain_pytorch_does_at_all_stages(make, layout):
    names, axis = layout
    check_stages(make, place(names=names), axis)


@pytest.mark.parametrize("make", [ConvNet, SequenceFirst])
def test_batch_statistics_and_reordered_rows_see_the_batch_of_both_axes(make):
    check(make, place(), 2)


@pytest.mark.parametrize(("shape", "axis"), [((2, 2, 2), None), ((2, 2, 2), ("dp_b", "dp_c"))])
def test_three_axes_shard_and_sum_over_all_three(shape, axis):
    check(mlp, place(shape, ("dp_a", "dp_b", "dp_c")), 3, axis)


def test_the_rows_of_a_batch_lie_on_the_data_axes_outermost_first():
    class Forward(gz.Graph):
        def build(self, x):
            return x * 2, x.sum()

    graph = Forward(place((2, 2, 2), ("dp_a", "tp", "dp_b")))
    x = torch.randn(8, 3)
    double, total = graph(x)
    torch.testing.assert_close(double, x * 2)
    torch.testing.assert_close(total, x.sum())
    assert gz.sbp.of(graph.program.node("x")) == (S(0), B, S(0))
    with pytest.raises(gz.CaptureError, match="over 4 ranks"):
        graph(x[:6])


def test_draws_do_not_depend_on_the_axes():
    class Drop(gz.Graph):
        def __init__(self, placement):
            super().__init__(placement)
            self.drop = nn.Dropout(0.5)

        def build(self, x):
            return self.drop(x)

    made = []
    for placement in (place((2, 3)), place((1,), ("dp",)), place((2, 2), ("dp", "tp"))):
        torch.manual_seed(3)
        made.append(Drop(placement)(torch.ones(12, 4)))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def traffic(graph, what):
    return Counter((c.phase, c.kind, c.axis) for c in graph.plan.collectives if c.what_for == what)


def test_each_axis_has_one_gather_and_one_scatter_of_a_bucket():
    graph = check(mlp, place(), 3)
    assert traffic(graph, "gradients") == {
        ("backward", "reduce_scatter", "dp_replicate"): 1,
        ("backward", "reduce_scatter", "dp_shard"): 1,
        ("backward", "all_reduce", "dp_shard"): 1,  # the smallest parameters stay whole
        ("backward", "all_reduce", "dp_replicate"): 1,
    }
    assert traffic(graph, "parameters") == {
        (phase, "all_gather", axis): 1 for phase in ("forward", "backward") for axis in HYBRID
    }


def test_hybrid_sharding_scatters_inside_and_sums_the_shards_outside():
    graph = check(lambda: nn.Linear(6, 64), place((2, 4)), 3, "dp_shard")
    assert gz.sbp.of(graph.model.weight) == (B, S(0))
    gradients = [(c.kind, c.axis, c.bytes) for c in graph.plan.collectives if c.what_for == "gradients"]
    nbytes = 7 * 64 * 8
    assert gradients == [
        ("reduce_scatter", "dp_shard", nbytes * 3 / 4),
        ("all_reduce", "dp_replicate", nbytes / 4),  # 2 (n-1)/n of a fourth, n = 2
    ]
    assert {c.axis for c in graph.plan.collectives if c.what_for == "parameters"} == {"dp_shard"}


def test_without_tensor_parallel_pins_nothing_is_sent_along_a_tensor_axis_at_any_stage():
    one, two = adamw_graph(mlp, place((2,), ("dp",))), adamw_graph(mlp, place((2, 2), ("dp", "tp")))
    for stage in (0, 1, 2, 3):
        for graph in (one, two):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            graph.compile(*batch_of(graph.model, 0))
        ours, theirs = ([c._replace(names=()) for c in graph.plan.collectives] for graph in (two, one))
        assert ours == theirs, f"stage {stage}"
        assert two.plan.memory == one.plan.memory, f"stage {stage}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
def test_parameters_split_over_a_tensor_axis_keep_that_and_shard_over_the_data_axis(names, stage):
    def prepare(model, placement):
        gz.to_global(model[0], placement, tuple(S(0) if name == "tp" else B for name in names))

    graph = check(mlp, place(names=names), stage, prepare=prepare)
    tensor, data = names.index("tp"), names.index("dp")
    weight, bias = gz.sbp.of(graph.model[0].weight), gz.sbp.of(graph.model[0].bias)
    assert weight[tensor] is S(0) and bias[tensor] is S(0)
    if stage == 3:
        assert weight[data] is S(1)
        # within the tensor axis the data axis cuts the same dim; outside it, a bias stays whole over the data axis
        assert bias[data] is (S(0) if names == ("tp", "dp") else B)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_program_on_two_axes_prints_and_reads_back(stage):
    graph = adamw_graph(mlp, place(), stage)
    graph.compile(*batch_of(graph.model, 0))
    text = str(graph.program)
    assert str(gz.parse(text)) == text


@pytest.mark.parametrize(
    ("shape", "names", "axis"),
    [
        ((2, 2), HYBRID, None),
        ((2, 3), HYBRID, "dp_shard"),
        ((2, 2), ("dp", "tp"), None),
        ((2, 2, 2), ("dp_a", "dp_b", "dp_c"), None),
    ],
)
def test_memory_and_traffic_are_the_plans_to_the_byte_at_all_stages(shape, names, axis):
    def token_loss(model, ids, labels):
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    with gz.testing.fake_world(prod(shape)):
        graph = adamw_graph(Net, place(shape, names, virtual=False), loss_fn=token_loss)
        batch = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
        for stage in (0, 1, 2, 3):
            graph.config.enable_zero(stage > 0, stage=stage or 2, axis=axis)
            graph(*batch)
            gc.collect()
            known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
            slots = [slot for (slot,) in executor_of(graph).slots.values()]
            with Storages([*batch, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
                graph(*batch)
            memory = graph.plan.memory
            assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16, stage
            sent = [(entry.kind, entry.axis, entry.nbytes) for entry in gz.testing.trace_step(graph, *batch)]
            assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives], stage


def test_checkpoints_of_virtual_grids_load_on_a_line_and_back():
    graph = adamw_graph(mlp, place(), 3)
    graph(*batch_of(graph.model, 0))
    for other in (adamw_graph(mlp, place((4,), ("dp",)), 2), adamw_graph(mlp, place((2, 4)), 1, "dp_shard")):
        other.load_state_dict(graph.state_dict())
        torch.testing.assert_close(other(*batch_of(graph.model, 1)), graph(*batch_of(graph.model, 1)))
        graph = other


@pytest.mark.parametrize("heads", [2, 3])
def test_no_rank_is_left_without_a_head_where_two_axes_cut_them(heads):
    class Attend(gz.Graph):
        def __init__(self):
            super().__init__(place(names=("tp", "cp")))
            self.scale = nn.ParameterList([nn.Parameter(torch.ones((), dtype=D))])
            self.config.set_input("x", sbp=(B, B))
            self.add_optimizer(torch.optim.SGD(self.scale, lr=0.1))

        def build(self, x):
            h = gz.to_global(x * self.scale[0], sbp=(S(1), S(1)))
            loss = F.scaled_dot_product_attention(h, h, h).square().sum()
            loss.backward()
            return loss

    x = torch.randn(4, heads, 3, 4, dtype=D)
    with pytest.warns(UserWarning, match="no axis of"):
        found = Attend()(x)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(x, x, x).square().sum())
