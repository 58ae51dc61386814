"""torch.func: functions of parameters, derivatives per row, models in ensembles, inner loops."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from stress.user_programs.program import Program, built_by, by_step, classes, floats, mlp, program, sgd, square, trained


@built_by(by_step)
def functional_call_of_scaled_weights(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = {name: 0.5 * p for name, p in m.named_parameters()}
    return trained(F.cross_entropy(functional_call(m, weights, (x,)), y))


@built_by(by_step)
def gradients_per_row(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    weights = {name: p.detach() for name, p in m.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(m, weights, (x[None],)), y[None])

    rows = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    return trained(F.cross_entropy(m(x), y)), norms


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


@built_by(by_step)
def inner_loop(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = dict(m.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(m, weights, (x,)), y)

    for _ in range(2):
        slopes = grad(loss)(weights, x)
        weights = {name: p - 0.1 * slopes[name] for name, p in weights.items()}
    return trained(loss(weights, -x))


@built_by(by_step, floats(5))
def jacobian_penalty(m: nn.Module, x: Tensor) -> Tensor:
    return trained(square(m(x)) + vmap(jacrev(lambda row: m(row[None])[0]))(x).pow(2).sum((1, 2)).mean())


@built_by(by_step, floats(5), floats(5))
def forward_derivative(m: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    out, slope = jvp(m, (x,), (v,))
    return trained(square(out) + square(slope))


@built_by(by_step, floats(5))
def vector_jacobian_product(m: nn.Module, x: Tensor) -> Tensor:
    out, pull = vjp(m, x)
    return trained(square(out) + square(pull(torch.ones_like(out))[0]))


@built_by(lambda step: Program(mlp(3, 1), step), floats(3))
def laplacian_of_a_network(m: nn.Module, x: Tensor) -> Tensor:
    curves = vmap(hessian(lambda row: m(row[None]).sum()))(x)
    return trained(square(torch.diagonal(curves, dim1=1, dim2=2).sum(1) - x.sum(1)))


@program()
def ensemble_by_vmap() -> Program:
    models = nn.ModuleList(mlp() for _ in range(3))
    base = copy.deepcopy(models[0]).to("meta")

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = {
            name: torch.stack([dict(one.named_parameters())[name] for one in m]) for name, _ in m[0].named_parameters()
        }
        out = vmap(lambda w: functional_call(base, w, (x,)))(weights)
        return trained(F.cross_entropy(out.flatten(0, 1), y.repeat(3)))

    return Program(models, step)


@program()
def stacked_state_of_an_ensemble() -> Program:
    models = [mlp() for _ in range(3)]
    weights, _ = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    model = nn.ParameterDict({name.replace(".", "_"): p for name, p in weights.items()})

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        given = {name: m[name.replace(".", "_")] for name in weights}
        out = vmap(lambda w: functional_call(base, w, (x,)))(given)
        return trained(F.cross_entropy(out.flatten(0, 1), y.repeat(3)))

    return Program(model, step)


@built_by(by_step, floats(4, 5), classes(4))
def vmap_over_rows(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def row(tokens: Tensor, label: Tensor) -> Tensor:
        out = m(tokens)
        weights = torch.softmax(out.sum(1), 0)
        return F.cross_entropy((weights[:, None] * out).sum(0), label)

    return trained(vmap(row)(x, y).mean())


@program(floats(5))
def implicit_layer() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.u = nn.Linear(4, 4), nn.Linear(5, 4)
            with torch.no_grad():
                self.w.weight.mul_(0.3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros(len(x), 4)
                for _ in range(8):
                    z = torch.tanh(self.w(z) + self.u(x))
            return torch.tanh(self.w(z) + self.u(x))

    return Program(Model(), lambda m, x: trained(square(m(x) - 0.1)))


@program(floats(5))
def neural_ode() -> Program:
    model = mlp(5, 5)

    def step(m: nn.Module, x: Tensor) -> Tensor:
        h = 0.1
        for _ in range(3):
            a = m(x)
            b = m(x + h / 2 * a)
            c = m(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + m(x + h * c))
        return trained(square(x))

    return Program(model, step, [sgd(model.parameters())])


@built_by(lambda step: Program(mlp(2, 1), step), floats(2))
def physics_informed(m: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = m(x)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return trained(square(slope[:, 1] + u[:, 0] * slope[:, 0] - 0.1 * curve[:, 0]))


@built_by(lambda step: Program(mlp(9, 1), step), floats(3, 3))
def energy_and_forces(m: nn.Module, places: Tensor) -> tuple[Tensor, Tensor]:
    places = places.clone().requires_grad_()
    apart = (places[:, :, None] - places[:, None]).pow(2).sum(-1) + torch.eye(3)
    energy = m(apart.flatten(1)).sum(1)
    forces = -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]
    return trained(F.mse_loss(energy, energy.detach() * 0.5) + square(forces - 0.1)), forces
