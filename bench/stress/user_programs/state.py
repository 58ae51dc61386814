"""What forward keeps in modules: buffers, attributes, hooks, parameters that it binds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stress.user_programs.program import Program, built_by, by_step, floats, mlp, program, square, trained


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return trained(square(model(x)) + F.cross_entropy(model(x), y))


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
class RunningMeanOfFeatures(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


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
class IntegerStepBuffer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return super().forward(x) / self.step.to(x.dtype).sqrt()


@built_by(of_class)
class RingOfPastFeatures(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(32, 8))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        rows = (self.at + torch.arange(len(x))) % 32
        logits = self.b(h) + (h @ self.queue.clone().t()).mean(1, keepdim=True)
        with torch.no_grad():
            self.queue[rows] = h.detach().to(self.queue.dtype)
            self.at.add_(len(x)).remainder_(32)
        return logits


@built_by(of_class)
class BufferThatIsNotPersistent(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.scale.lerp_(h.detach().abs().amax(0), 0.1)
        return self.b(h / self.scale)


@built_by(of_class)
class CounterOfCalls(Body):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 2 else 0.5)


@built_by(of_class)
class PlainTensorAttribute(Body):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


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
def forward_hook_that_changes_the_output() -> Program:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 0.5 + out.mean(dim=1, keepdim=True))
    return on(model)


@program()
def forward_pre_hook_with_keywords() -> Program:
    class Model(Body):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    model = Model()
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {"scale": 0.25}), with_kwargs=True)
    return on(model)


@program()
def hook_that_collects_activations() -> Program:
    model, kept = mlp(), {}

    def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
        kept["hidden"] = out

    model[1].register_forward_hook(hook)
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y) + 0.1 * square(kept["hidden"])))


@program()
def full_backward_hook_that_scales() -> Program:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
    return on(model)


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


@built_by(by_step)
def gradient_hook_of_an_activation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = model[0](x)
    h.register_hook(lambda grad: grad * 2)
    return trained(F.cross_entropy(model[2](torch.tanh(h)), y))


@built_by(of_class)
class ModeThatForwardAsks(Body):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1.0 if self.training and torch.is_grad_enabled() else 0.0) * x[:, :4]


@program()
def teacher_updated_within_the_step() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), mlp().requires_grad_(False)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            wanted = model.teacher(x).softmax(-1)
        return trained(F.cross_entropy(model.student(x), wanted))

    return Program(Model(), step)


@built_by(of_class)
class WeightsClampedWithinForward(Body):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


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
class ParametersInContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(5, 5) * 0.3 for _ in range(3)])
        self.heads = nn.ParameterDict({"out": torch.randn(5, 4), "bias": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.heads["out"] + self.heads["bias"]


@built_by(of_class)
class LearntScalar(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature.exp().clamp(max=100)


@built_by(of_class)
class BufferReadByAnotherModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(5, momentum=0.3), Body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x - self.norm.running_mean) + self.norm(x)[:, :4]


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
def attribute_of_a_parameter() -> Program:
    model = mlp()
    model[0].weight.scale = torch.full((8, 1), 0.5)

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = F.linear(x, m[0].weight * m[0].weight.scale, m[0].bias)
        return trained(F.cross_entropy(m[2](torch.tanh(h)), y))

    return Program(model, step)


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
