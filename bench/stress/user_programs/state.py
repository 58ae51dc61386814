"""What forward keeps in modules: buffers, attributes, hooks, parameters that it binds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stress.user_programs.program import Program, built_by, floats, mlp, program, trained


def on(model: nn.Module) -> Program:
    """A program that trains a module of five features and four classes."""
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


def of_class(model_class: type[nn.Module]) -> Program:
    return on(model_class())


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@built_by(of_class)
class BufferBoundAnew(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


@built_by(of_class)
class BufferThatIsNoneAtFirst(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().sum(0) if self.seen is None else self.seen + x.detach().sum(0)
        return super().forward(x - 0.01 * self.seen)


@built_by(of_class)
class BufferThatBecomesNone(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        shift, self.first = self.first, None
        return super().forward(x if shift is None else x + shift)


@built_by(of_class)
class ParameterBoundAnewInForward(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.a.bias = nn.Parameter(self.a.bias.detach() * 0.5)
        return super().forward(x)


@built_by(of_class)
class OneBufferUnderTwoNames(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("alias", self.count)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + 0.1 * self.alias)


@built_by(of_class)
class OneOfTwoNamesBoundAnew(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("alias", self.count)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x) * (1 + 0.1 * self.count + 0.1 * self.alias)


@built_by(of_class)
class CounterOfCalls(Body):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 2 else 0.5)


@program()
def last_activation_kept_as_an_attribute() -> Program:
    class Model(Body):
        last = None

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            self.last = h.detach().mean()
            return self.b(h)

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(x), y) + 0 * m.last))


@program()
def auxiliary_loss_passed_by_an_attribute() -> Program:
    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).softmax(-1)
            self.balance = (out.mean(0) ** 2).sum()
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.body = Gate(5, 4), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x) * self.body(x)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        return trained(loss + 0.1 * model.gate.balance)

    return Program(Model(), step)


@program()
def gradient_hook_of_a_parameter() -> Program:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return on(model)


@program()
def hook_after_accumulation() -> Program:
    model = mlp()

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    model[2].weight.register_post_accumulate_grad_hook(halve)
    return on(model)


@built_by(of_class)
class WeightMadeOfDataUnderNoGrad(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
        return super().forward(x)


@built_by(of_class)
class ModuleMadeWithinForward(Body):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Softplus()(super().forward(nn.LayerNorm(5)(x)))


@built_by(of_class)
class LearntScalar(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature.exp().clamp(max=100)


@program(floats(5), floats(5))
def module_called_twice_with_a_buffer() -> Program:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            return super().forward(x / self.largest)

    return Program(Model(), lambda m, x, z: trained(F.mse_loss(m(x), m(z))))


@program()
def subclass_of_a_parameter() -> Program:
    class Scaled(nn.Parameter):
        factor = 0.5

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.a.weight = Scaled(self.a.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            is_scaled = isinstance(self.a.weight, Scaled)
            return super().forward(x) * (self.a.weight.factor if is_scaled else 1.0)

    return on(Model())
