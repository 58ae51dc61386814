"""Modules: layers, modes, shared weights, what they keep in buffers and attributes, and changes between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from stress.user_programs.parts import flags, floats, mlp, square, trained
from stress.user_programs.program import PROGRAMS, Program, Source, built_by, by_classifier, by_model, program


def register(name: str, build: Callable[[], nn.Module], *shape: int) -> None:
    """A program around a module of one input; each row counts differently."""

    def step(model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = square(out * weight.view(-1, *[1] * (out.dim() - 1))) + 0.01 * out.sum()
        return trained(loss), out

    PROGRAMS[name] = Source(name, lambda: Program(build(), step), (floats(*shape), floats()))


def add_tanh(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for one in modules for part in (one, nn.Tanh())))


register("batch_norm", lambda: add_tanh(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), 5)
register(
    "sync_batch_norm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(add_tanh(nn.Linear(5, 8), nn.BatchNorm1d(8))), 5
)
register("convolutions_and_pools", lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(4, 4, 3, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), 2, 8, 8)  # fmt: skip
register("convolution_of_channels_last", lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), 2, 6, 6)
register("rnn_of_relu_sequence_last", lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True), 3, 5)
register("old_weight_norm", lambda: add_tanh(nn.utils.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
register("spectral_norm", lambda: add_tanh(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
register("old_spectral_norm", lambda: add_tanh(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
register("orthogonal", lambda: add_tanh(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)), 4)
register("encoder_norm_first", lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2,
    enable_nested_tensor=False), 4, 8)  # fmt: skip
register("dropout_of_zero", lambda: add_tanh(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 4)), 5)
register("dropout_evaluating", lambda: add_tanh(nn.Linear(5, 8), nn.Dropout(0.5).eval(), nn.Linear(8, 4)), 5)
register("prelu_and_glu", lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 8), nn.GLU()), 5)
register("unflatten_and_pixel_shuffle", lambda: nn.Sequential(
    nn.Linear(5, 32), nn.Unflatten(1, (8, 2, 2)), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1)), 5)  # fmt: skip
register("upsampling", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")), 2, 4, 4)
register("local_response_norm", lambda: nn.Sequential(nn.Conv2d(2, 6, 1), nn.LocalResponseNorm(2)), 2, 4, 4)


@built_by(by_model, floats(4, 8), flags(4))
class AttentionWithPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out, weights = self.attend(x, x, x, key_padding_mask=~keep)
        return square((out * keep[..., None]).sum(1) / keep.sum(1, keepdim=True) + weights.mean((1, 2))[:, None])


@built_by(by_model, floats(6, 5))
class RecurrentStateCarriedBetweenSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, 6, batch_first=True)
        self.register_buffer("h", torch.zeros(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.rnn(x, self.h.expand(1, len(x), 6).contiguous())
        self.h.copy_(h.detach().mean(1, keepdim=True))
        return square(out)


@built_by(lambda step: Program(nn.ModuleDict({"gate": nn.Linear(5, 2), "a": mlp(), "b": mlp()}), step))
def expert_chosen_by_argmax(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first = m["gate"](x).argmax(-1, keepdim=True) == 0
    out = torch.where(first, m["a"](x), m["b"](x))
    return trained(F.cross_entropy(out, y))


@built_by(by_classifier)
class OneModuleUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 4)
        self.blocks = nn.ModuleList([self.first, self.first])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


@program()
def weight_of_no_elements() -> Program:
    model = nn.ModuleDict({"body": mlp(), "none": nn.Linear(5, 0)})
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m["body"](x), y) + m["none"](x).sum()))


@built_by(by_classifier)
def deep_copies_of_a_block() -> nn.Module:
    block = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.GELU())
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(3)), nn.Linear(5, 4))


@built_by(by_model, floats(5))
class VectorQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = mlp(5, 4), mlp(4, 5), nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(1)
        code = self.codes(distances.argmin(1))
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + commitment


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Gate(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x).softmax(-1)
        self.balance = (out.mean(0) ** 2).sum()
        return out


@built_by(by_model)
class AuxiliaryLossPassedByAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = Gate(5, 4), Body()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.gate(x) * self.body(x), y) + 0.1 * self.gate.balance


@built_by(by_classifier)
class WeightMadeOfDataUnderNoGrad(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
        return super().forward(x)


@built_by(by_classifier)
class LearntScalar(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature.exp().clamp(max=100)


@built_by(lambda cls: Program(cls(), lambda m, x, z: trained(F.mse_loss(m(x), m(z)))), floats(5), floats(5))
class ModuleCalledTwiceWithABuffer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x / self.largest)


def between(action: Callable[[Program, int], None], **facts: Any) -> Program:
    return by_classifier(mlp, between=action, **facts)


@built_by(between)
def parameter_bound_anew_in_between(program: Program, number: int) -> None:
    if number == 1:
        program.model[2].bias = None


@built_by(lambda action: by_classifier(lambda: nn.Sequential(mlp(5, 5, 5), nn.Tanh(), nn.Linear(5, 4)), between=action))
def weights_tied_in_between(program: Program, number: int) -> None:
    if number == 0:
        program.model[0][2].weight = program.model[0][0].weight


@built_by(partial(between, writes=True))
def pruned_in_between(program: Program, number: int) -> None:
    if number == 0:
        prune.l1_unstructured(program.model[0], "weight", amount=0.3)


@program()
def model_copied_in_between() -> Program:
    copies: list[Tensor] = []

    def action(program: Program, number: int) -> None:
        copies.append(copy.deepcopy(program.model)[0].weight.detach())

    return between(action, writes=True, watched={"copies": copies})
