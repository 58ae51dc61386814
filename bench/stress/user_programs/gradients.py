"""How gradients come to be: several backwards, penalties, functions with their own backward, torch.func."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from stress.user_programs.parts import floats, mlp, square, trained
from stress.user_programs.program import Program, built_by, by_step, program
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint


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
