"""A captured step equals plain PyTorch over several steps, in float64."""

import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program, assert_same, close, eager_step
from torch import nn

from graphzero.ops import ATTENTION

D = torch.float64


def sgd(owner):
    """Shows the scale of a gradient, which Adam does not."""
    return [torch.optim.SGD(owner.model.parameters(), lr=0.1, momentum=0.9)]


def train(loss_of):
    def build(self, *args, **kwargs):
        loss = loss_of(self, *args, **kwargs)
        loss.backward()
        return loss

    return build


def classify(self, x, y):
    return F.cross_entropy(self.model(x), y)


def targets(program):
    return {node.target for node in program.captured.graph.nodes}


def test_mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(D)
    batches = [((torch.randn(6, 8, dtype=D), torch.randint(4, (6,))), {}) for _ in range(3)]
    assert_same(Owner(train(classify), model=model), sgd, batches)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.groups, self.last = nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        x = F.silu(self.groups(self.second(x)))
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_conv_net_with_batch_norm(training):
    model = ConvNet().to(D).train(training)
    batches = [((torch.randn(4, 3, 12, 12, dtype=D), torch.randint(5, (4,))), {}) for _ in range(3)]
    program, _ = assert_same(Owner(train(classify), model=model), sgd, batches)
    if training:
        assert program.buffers()["model.norm.num_batches_tracked"] == 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_1d_keeps_running_statistics(momentum):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum or 0.3)).to(D)
    batches = [((torch.randn(5, 4, dtype=D),), {}) for _ in range(3)]
    assert_same(Owner(train(lambda self, x: self.model(x).pow(3).mean()), model=model), sgd, batches, atol=1e-7)


def language_model(self, ids):
    return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def token_batches():
    return [((torch.randint(64, (2, 8)),), {}) for _ in range(3)]


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config).to(D)
    program, _ = assert_same(Owner(train(language_model), model=model), sgd, token_batches(), atol=1e-7)
    assert ATTENTION in targets(program)
    assert "model.lm_head.weight" not in program.parameters()  # tied to wte


def test_llama_with_grouped_queries():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(D)
    program, _ = assert_same(Owner(train(language_model), model=model), sgd, token_batches(), atol=1e-7)
    assert ATTENTION in targets(program)


def test_transformer_encoder_layer_trains_and_evaluates_with_our_attention():
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=D)
    x = torch.randn(2, 4, 16, dtype=D)
    build = train(lambda self, x: self.model(x).pow(2).mean())
    program, _ = assert_same(Owner(build, model=model), sgd, [((x,), {})] * 2, atol=1e-7)
    assert ATTENTION in targets(program)
    model.eval()
    evaluated = Program(Owner(lambda self, x: self.model(x), model=model), [], (x,))
    close(evaluated(x), model(x), 1e-9)


@pytest.mark.parametrize("kind", ["bool mask", "float mask", "causal", "learned bias", "3-d", "gqa", "broadcast"])
def test_attention_is_torchs(kind):
    def attend(self, x):
        q, k, v = (part.view(2, 4, 4, 4).transpose(1, 2) for part in self.model(x).chunk(3, -1))
        options = {}
        if kind == "bool mask":
            options["attn_mask"] = torch.ones(4, 4, dtype=torch.bool).tril()
        elif kind == "float mask":
            options["attn_mask"] = torch.linspace(0, 1, 16, dtype=D).view(1, 1, 4, 4)
        elif kind == "causal":
            options.update(is_causal=True, scale=0.3)
        elif kind == "learned bias":
            options["attn_mask"] = self.model.bias[:16].view(4, 4)
        elif kind == "3-d":
            q, k, v = q[0], k[0], v[0]
        elif kind == "gqa":
            k, v, options["enable_gqa"] = k[:, :2], v[:, :2], True
        return F.scaled_dot_product_attention(q, k, v, **options).pow(2).mean()

    x = torch.randn(2, 4, 8, dtype=D)
    assert_same(Owner(train(attend), model=nn.Linear(8, 48).to(D)), sgd, [((x,), {})] * 2, atol=1e-8)


def test_lstm():
    model = nn.LSTM(4, 8, 2, batch_first=True).to(D)
    build = train(lambda self, x: self.model(x)[0].pow(2).mean())
    assert_same(Owner(build, model=model), sgd, [((torch.randn(2, 4, 4, dtype=D),), {})] * 2)


def test_checkpointing_recomputes():
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(D)
    build = train(lambda self, x: checkpoint(self.model, x, use_reentrant=False).pow(2).mean())
    assert_same(Owner(build, model=model), sgd, [((torch.randn(4, 8, dtype=D),), {})] * 2)


def test_autocast_in_build():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def build(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def sgd(owner):
        return [torch.optim.SGD(owner.model.parameters(), lr=0.1)]

    batches = [((torch.randn(4, 8), torch.randint(4, (4,))), {}) for _ in range(2)]
    assert_same(Owner(build, model=model), sgd, batches, atol=1e-2)


X, SOFT, HARD = torch.randn(6, 5, dtype=D), torch.rand(6, 5, dtype=D), torch.tensor([1, -100, 0, 4, 2, 2])
WEIGHT = torch.rand(5, dtype=D)
LOSSES = {
    "mse": lambda o: F.mse_loss(o, SOFT),
    "l1": lambda o: F.l1_loss(o, SOFT),
    "smooth l1": lambda o: F.smooth_l1_loss(o, SOFT),
    "huber": lambda o: F.huber_loss(o, SOFT),
    "binary": lambda o: F.binary_cross_entropy(o.sigmoid(), SOFT),
    "binary with logits": lambda o: F.binary_cross_entropy_with_logits(o, SOFT, weight=WEIGHT, pos_weight=WEIGHT),
    "kl": lambda o: F.kl_div(o.log_softmax(1), SOFT, reduction="batchmean"),
    "soft margin": lambda o: F.soft_margin_loss(o, SOFT),
    "weighted nll with ignored rows": lambda o: F.cross_entropy(o, HARD, weight=WEIGHT),
    "nll 2d": lambda o: F.cross_entropy(o.view(2, 3, 5).transpose(1, 2), HARD.view(2, 3)),
    "label smoothing": lambda o: F.cross_entropy(o, HARD, weight=WEIGHT, label_smoothing=0.1),
    "probabilities": lambda o: F.cross_entropy(o, SOFT),
    "cosine": lambda o: F.cosine_embedding_loss(o, SOFT, torch.ones(6)),
    "poisson": lambda o: F.poisson_nll_loss(o, SOFT),
    "triplet": lambda o: F.triplet_margin_loss(o, SOFT, o * 2),
    "variances": lambda o: o.var(1).sum() + o.std() + torch.var_mean(o, 0)[0].mean() + torch.std_mean(o, 1)[0].sum(),
    "norms": lambda o: (
        o.norm() + o.norm(1, dim=0).sum() + torch.linalg.vector_norm(o, 3) + o.norm(float("inf"), dim=1).sum()
    ),
    "normalized": lambda o: F.normalize(o).mean() + F.rms_norm(o, (5,)).pow(2).mean() * o.logsumexp(1).mean(),
    "written through a mask": lambda o: _written(o * 1),
}


def _written(x):
    x[SOFT > 0.5] = 0.0
    return x.sum()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_their_value_and_leave_no_mean_behind(name):
    build = train(lambda self, x: LOSSES[name](self.model(x)))
    program, _ = assert_same(Owner(build, model=nn.Linear(5, 5).to(D)), sgd, [((X,), {})] * 2)
    for node in program.captured.graph.nodes:
        name = getattr(node.target, "_opname", "")
        assert not any(word in name for word in ("mean", "var", "std", "norm", "mse", "with_logits")), name
        if name.startswith("binary_cross_entropy"):
            assert 1 not in node.args
        if name.startswith("nll_loss"):
            assert 1 not in (node.args[3:5] if "backward" not in name else node.args[4:5])


def test_gradient_penalty_takes_a_second_derivative():
    def penalty(self, x):
        x = x.clone().requires_grad_()
        out = self.model(x).pow(2).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return grad.pow(2).mean() + out

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(D)
    assert_same(Owner(train(penalty), model=model), sgd, [((torch.randn(4, 8, dtype=D),), {})] * 2)


def test_two_backwards_add_up():
    def build(self, x):
        first = self.model(x).pow(2).mean()
        first.backward()
        second = self.model(x + 1).abs().mean()
        torch.autograd.backward(second)
        return first, second

    model = nn.Linear(8, 4).to(D)
    assert_same(Owner(build, model=model), sgd, [((torch.randn(4, 8, dtype=D),), {})] * 2)


def test_steps_continue_from_an_eager_one():
    owner = Owner(train(lambda self, x: self.model(x).pow(2).mean()), model=nn.Linear(8, 4).to(D))
    x = torch.randn(4, 8, dtype=D)
    optimizer = torch.optim.SGD(owner.model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    eager_step(owner, [optimizer], x)
    program = Program(owner, [optimizer], (x,))
    for _ in range(3):
        close(program(x), eager_step(owner, [optimizer], x), 1e-9)
