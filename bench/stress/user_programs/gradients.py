"""How gradients come to be: several backwards, penalties, functions with their own backward, recomputation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from stress.user_programs.program import Program, built_by, by_step, floats, mlp, program, sgd, square, trained


@built_by(by_step)
def two_backwards(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    first, second = F.cross_entropy(out, y), square(out)
    first.backward(retain_graph=True)
    second.backward()
    return first, second


@built_by(by_step)
def backward_with_a_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    out.backward(torch.full_like(out, 0.25) * x[:, :4].detach())
    return out


@built_by(by_step)
def backward_of_a_list(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    losses = [F.cross_entropy(out, y), 0.1 * square(out)]
    torch.autograd.backward(losses)
    return sum(losses)


@built_by(by_step)
def cut_between_two_halves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model[0](x)
    cut = h.detach().requires_grad_()
    loss = trained(F.cross_entropy(model[2](torch.tanh(cut)), y))
    h.backward(cut.grad)
    return loss


@built_by(by_step)
def gradients_by_autograd_grad(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    parameters = list(model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = grad
    return loss


@built_by(by_step)
def gradient_penalty_of_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return trained(F.cross_entropy(out, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean())


@built_by(by_step)
def gradient_penalty_of_parameters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return trained(loss + 0.1 * sum(grad.pow(2).sum() for grad in grads))


@built_by(by_step)
def hessian_vector_product(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    product = torch.autograd.grad(sum(grad.sum() for grad in grads), list(model.parameters()), retain_graph=True)
    trained(loss)
    return loss, sum(one.abs().sum() for one in product)


@built_by(by_step)
def adversarial_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    probe = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(probe), y), probe)
    return trained(F.cross_entropy(model(x + 0.1 * slope.sign()), y))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit), None


@program()
def function_with_its_own_backward() -> Program:
    return Program(mlp(), lambda m, x, y: trained(F.cross_entropy(Clipped.apply(m(x), 0.5), y)))


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx, grad):
        return grad


@built_by(by_step)
def straight_through_rounding(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = F.linear(x, Round.apply(model[0].weight), model[0].bias)
    return trained(F.cross_entropy(model[2](torch.tanh(h)), y))


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


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


@program()
def gradient_reversal() -> Program:
    model = nn.ModuleDict({"body": nn.Linear(5, 8), "task": nn.Linear(8, 4), "domain": nn.Linear(8, 1)})

    def step(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(m["body"](x))
        task = F.cross_entropy(m["task"](h), y)
        logits = m["domain"](Reversed.apply(h))[:, 0]
        domain = F.binary_cross_entropy_with_logits(logits, (y > 1).to(x.dtype))
        trained(task + domain)
        return task, domain

    return Program(model, step)


@program()
def checkpointed_block() -> Program:
    return Program(mlp(), lambda m, x, y: trained(F.cross_entropy(m[2](checkpoint(m[:2], x, use_reentrant=False)), y)))


@program()
def checkpointed_sequence() -> Program:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return Program(
        model, lambda m, x, y: trained(F.cross_entropy(checkpoint_sequential(m, 2, x, use_reentrant=False), y))
    )


@built_by(by_step)
def reentrant_checkpoint(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=True)
    return trained(F.cross_entropy(model[2](h), y))


@program()
def checkpointed_batch_norm() -> Program:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m[3](checkpoint(m[:3], x, use_reentrant=False)), y)))


@built_by(by_step)
def saved_tensors_packed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, 1), lambda packed: packed[0]):
        loss = F.cross_entropy(model(x), y)
    return trained(loss)


@program()
def frozen_first_layer() -> Program:
    model = mlp()
    model[0].requires_grad_(False)
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def unused_layer() -> Program:
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m["used"](x), y)), [optimizer])


@program()
def layer_used_only_after_detach() -> Program:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m["a"](x) + m["b"](x).detach(), y)))


@program()
def tied_embedding_and_head() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
            self.head.weight = self.words.weight

        def forward(self, y: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(self.words(y))))

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(y), y.roll(1))))


@program()
def tied_by_transposing() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t())

    return Program(Model(), lambda m, x, y: trained(F.mse_loss(m(x), x)))


@built_by(lambda step: Program(nn.ModuleDict({"same": nn.Linear(5, 5), "head": nn.Linear(5, 4)}), step))
def one_layer_many_times(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = x + torch.tanh(m["same"](x))
    return trained(F.cross_entropy(m["head"](x), y))


@built_by(by_step)
def gradients_cleared_within_the_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    first = F.cross_entropy(model(x), y)
    first.backward()
    model.zero_grad()
    return trained(F.cross_entropy(model(2 * x), y))


@built_by(by_step)
def gradient_clipped_within_the_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = trained(F.cross_entropy(model(x), y))
    return loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@built_by(by_step)
def gradient_values_clipped_within_the_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(F.cross_entropy(model(x), y))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


@built_by(by_step)
def gradient_centralised_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(F.cross_entropy(model(x), y))
    for p in model.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
    return loss


@built_by(by_step)
def gradient_noise_scale_returned(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = trained(F.cross_entropy(model(x), y))
    return {"loss": loss, **{name: p.grad.norm() for name, p in model.named_parameters()}}


@built_by(by_step)
def gradient_set_to_none_for_one(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = trained(F.cross_entropy(model(x), y))
    model[0].bias.grad = None
    return loss


@program()
def losses_of_tasks_weighted_by_learnt_variances() -> Program:
    model = nn.ModuleDict({"body": mlp(5, 8), "a": nn.Linear(8, 4), "b": nn.Linear(8, 1)})
    model["logs"] = nn.ParameterList([torch.zeros(()), torch.zeros(())])

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m["body"](x)
        losses = [F.cross_entropy(m["a"](h), y), F.mse_loss(m["b"](h)[:, 0], x.sum(1))]
        return trained(sum(loss * torch.exp(-log) + log for loss, log in zip(losses, m["logs"], strict=True)))

    return Program(model, step)


@built_by(by_step)
def no_gradient_for_a_part_of_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    kept = (y > 1)[:, None]
    return trained(F.cross_entropy(torch.where(kept, out, out.detach()), y))


@program(floats(5))
def inference_mode_for_the_target() -> Program:
    model = nn.ModuleDict({"online": mlp(), "target": mlp()})

    def step(m: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            wanted = m["target"](x)
        return trained(F.mse_loss(m["online"](x), wanted.clone()))

    return Program(model, step, [sgd(model["online"].parameters())])


@built_by(by_step)
def set_grad_enabled_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        h = model[:2](x)
    with torch.enable_grad():
        return trained(F.cross_entropy(model[2](h), y))


@built_by(by_step)
def twice_differentiable_activation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = F.softplus(model(x)).sum(1)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return trained(square(out) + square(curve))
