"""Losses: weights, masks, pairs over the whole batch, teachers, rewards; and ways to gradients, such as torch.func."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from stress.user_programs.parts import classes, flags, floats, mlp, square, trained
from stress.user_programs.program import Program, built_by, by_loss, by_step, program


@built_by(by_loss)
def class_weights_of_the_batch(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=4).to(out.dtype) + 1
    return F.cross_entropy(out, y, weight=len(y) / counts)


@built_by(by_loss, floats(6, 5), classes(4, 6))
def cross_entropy_of_tokens(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, ignore_index=3)


@built_by(by_step, floats(6, 5), classes(4, 6), flags(6))
def labels_masked_with_minus_hundred(m: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    labels = y.masked_fill(~keep, -100)
    logits, labels = m(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (labels != -100).sum().clamp(min=1)
    return trained(F.cross_entropy(logits, labels, reduction="sum") / count)


@built_by(by_step, floats(6, 5), classes(4, 6), flags(6))
def mean_of_rows_of_means(m: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    rows = F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    return trained(((rows * keep).sum(1) / keep.sum(1)).mean())


@built_by(by_loss)
def hard_examples_only(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none").topk(8).values.mean()


@built_by(by_loss)
def loss_above_a_quantile(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(out, y, reduction="none")
    chosen = (rows >= rows.detach().median()).to(rows.dtype)
    return (rows * chosen).sum() / chosen.sum()


@built_by(by_step, floats(5), floats(5))
def nt_xent(m: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    both = F.normalize(torch.cat([m(x), m(z)]), dim=1)
    alike = both @ both.t() / 0.5
    alike = alike.masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    pairs = torch.arange(len(both)).roll(len(x))
    return trained(F.cross_entropy(alike, pairs))


@built_by(by_step, floats(5), floats(5))
def barlow_twins(m: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    a, b = m(x), m(z)
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.t() @ b / len(x)
    off = c.pow(2).sum() - c.diagonal().pow(2).sum()
    return trained((c.diagonal() - 1).pow(2).sum() + 0.01 * off)


@built_by(by_loss)
def hardest_triplets(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    apart = torch.cdist(out, out + 1e-3)
    same = y[:, None] == y[None]
    far = apart.masked_fill(~same, -1.0).amax(1)
    near = apart.masked_fill(same, 1e9).amin(1)
    return F.relu(far - near + 1.0).mean()


@built_by(by_step, floats(5), classes(4), floats())
def policy_gradient(m: nn.Module, x: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    policy = torch.distributions.Categorical(logits=m(x))
    return trained(-(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean())


@program(floats(5), classes(4), floats(), floats())
def clipped_policy_ratio() -> Program:
    model = nn.ModuleDict({"actor": mlp(), "critic": mlp(outputs=1)})

    def step(m: nn.Module, x: Tensor, action: Tensor, reward: Tensor, before: Tensor) -> dict[str, Tensor]:
        logs = m["actor"](x).log_softmax(-1)[torch.arange(len(x)), action]
        value = m["critic"](x)[:, 0]
        advantage = (reward - value).detach()
        ratio = (logs - before.abs().neg()).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        clipped = ((ratio - 1).abs() > 0.2).to(x.dtype).mean()
        trained(policy + 0.5 * F.mse_loss(value, reward))
        return {"policy": policy, "clipped": clipped}

    return Program(model, step)


@program(floats(5), floats(5))
def preference_pairs() -> Program:
    model = nn.ModuleDict({"policy": mlp(outputs=1), "reference": mlp(outputs=1).requires_grad_(False)})

    def step(m: nn.Module, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = m["reference"](chosen) - m["reference"](rejected)
        margin = m["policy"](chosen) - m["policy"](rejected) - before
        return trained(-F.logsigmoid(0.5 * margin).mean()), (margin > 0).to(margin.dtype).mean()

    return Program(model, step)


@program(floats(3, 8), floats(3, 8), classes(10))
def diffusion() -> Program:
    model = nn.ModuleDict({"net": nn.Conv1d(3, 3, 3, padding=1), "time": nn.Embedding(10, 3)})
    keep = torch.linspace(0.9, 0.1, 10)

    def step(m: nn.Module, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        share = keep[t][:, None, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        predicted = m["net"](noisy + m["time"](t)[..., None])
        weight = torch.minimum(share / (1 - share), torch.tensor(5.0))
        return trained((weight * F.mse_loss(predicted, noise, reduction="none")).mean())

    return Program(model, step)


@built_by(lambda step: Program(mlp(outputs=12), step), floats(5), floats(4))
def mixture_density(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits, mean, log = m(x).chunk(3, -1)
    parts = torch.distributions.Normal(mean, log.exp()).log_prob(y[:, :1]) + logits.log_softmax(-1)
    return trained(-torch.logsumexp(parts, -1).mean())


@built_by(by_step, floats(5), classes(4))
def accuracy_and_confusion_returned(m: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = m(x)
    guess = out.argmax(-1)
    confusion = torch.zeros(4, 4, dtype=torch.long).index_put_((y, guess), torch.ones_like(y), accumulate=True)
    return {"loss": trained(F.cross_entropy(out, y)), "right": (guess == y).sum(), "confusion": confusion}


# ---- gradients


class Scaled(torch.autograd.Function):
    """With contexts set up apart, two outputs, and a gradient that is not needed at times."""

    @staticmethod
    def forward(x, weight):
        return x @ weight, weight.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, other):
        x, weight = ctx.saved_tensors
        return (grad @ weight.t() if ctx.needs_input_grad[0] else None), x.t() @ grad


@built_by(lambda step: Program(nn.ParameterDict({"w": torch.randn(5, 4), "b": torch.zeros(4)}), step))
def function_of_two_outputs(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, _ = Scaled.apply(x, m["w"])
    return trained(F.cross_entropy(out + m["b"], y))


@program()
def checkpointed_batch_norm() -> Program:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m[3](checkpoint(m[:3], x, use_reentrant=False)), y)))


@built_by(by_step)
def set_grad_enabled_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        h = model[:2](x)
    with torch.enable_grad():
        return trained(F.cross_entropy(model[2](h), y))


@built_by(by_step)
def private_gradients_clipped_per_row(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in m.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(m, weights, (x[None],)), y[None])

    rows, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    factor = (0.5 / norms).clamp(max=1.0)
    for name, p in m.named_parameters():
        p.grad = torch.einsum("b,b...->...", factor, rows[name]) / len(x)
    return losses.mean()


@built_by(by_step, floats(5))
def jacobian_penalty(m: nn.Module, x: Tensor) -> Tensor:
    return trained(square(m(x)) + vmap(jacrev(lambda row: m(row[None])[0]))(x).pow(2).sum((1, 2)).mean())


@built_by(lambda step: Program(mlp(3, 1), step), floats(3))
def laplacian_of_a_network(m: nn.Module, x: Tensor) -> Tensor:
    curves = vmap(hessian(lambda row: m(row[None]).sum()))(x)
    return trained(square(torch.diagonal(curves, dim1=1, dim2=2).sum(1) - x.sum(1)))


@program()
def ensemble_by_vmap() -> Program:
    models = nn.ModuleList(mlp() for _ in range(3))
    base = copy.deepcopy(models[0]).to("meta")

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        named = [dict(one.named_parameters()) for one in m]
        weights = {name: torch.stack([one[name] for one in named]) for name in named[0]}
        out = vmap(lambda w: functional_call(base, w, (x,)))(weights)
        return trained(F.cross_entropy(out.flatten(0, 1), y.repeat(3)))

    return Program(models, step)
