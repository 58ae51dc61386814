"""Layers of torch.nn, modes of modules, ways to make and share weights, and small models of many layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stress.user_programs.program import Program, built_by, flags, floats, mlp, program, square, trained


def module(name: str, make: Callable[[], nn.Module], *shape: int) -> None:
    """A program around a module of one input; each row counts differently."""

    def factory() -> Program:
        def step(model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            out = out[0] if isinstance(out, tuple) else out
            loss = square(out * weight.view(-1, *[1] * (out.dim() - 1))) + 0.01 * out.sum()
            return trained(loss), out

        return Program(make(), step)

    factory.__name__ = name
    program(floats(*shape), floats())(factory)


def tanh(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for one in modules for part in (one, nn.Tanh())))


module("batch_norm", lambda: tanh(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), 5)
module("sync_batch_norm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(tanh(nn.Linear(5, 8), nn.BatchNorm1d(8))), 5)
module("convolutions_and_pools", lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(4, 4, 3, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), 2, 8, 8)  # fmt: skip
module("convolution_of_channels_last", lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), 2, 6, 6)
module("rnn_of_relu_sequence_last", lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True), 3, 5)
module("old_weight_norm", lambda: tanh(nn.utils.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("spectral_norm", lambda: tanh(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("old_spectral_norm", lambda: tanh(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("orthogonal", lambda: tanh(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)), 4)
module("encoder_norm_first", lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2,
    enable_nested_tensor=False), 4, 8)  # fmt: skip
module("dropout_of_zero", lambda: tanh(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 4)), 5)
module("dropout_evaluating", lambda: tanh(nn.Linear(5, 8), nn.Dropout(0.5).eval(), nn.Linear(8, 4)), 5)
module("prelu_and_glu", lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 8), nn.GLU()), 5)
module("unflatten_and_pixel_shuffle", lambda: nn.Sequential(
    nn.Linear(5, 32), nn.Unflatten(1, (8, 2, 2)), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1)), 5)  # fmt: skip
module("upsampling", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")), 2, 4, 4)
module("local_response_norm", lambda: nn.Sequential(nn.Conv2d(2, 6, 1), nn.LocalResponseNorm(2)), 2, 4, 4)


@program(floats(4, 8), flags(4))
def attention_with_padding() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            out, weights = self.attend(x, x, x, key_padding_mask=~keep)
            return (out * keep[..., None]).sum(1) / keep.sum(1, keepdim=True) + weights.mean((1, 2))[:, None]

    return Program(Model(), lambda m, x, keep: trained(square(m(x, keep))))


@program(floats(6, 5))
def recurrent_state_carried_between_steps() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(5, 6, batch_first=True)
            self.register_buffer("h", torch.zeros(1, 1, 6))

        def forward(self, x: Tensor) -> Tensor:
            out, h = self.rnn(x, self.h.expand(1, len(x), 6).contiguous())
            self.h.copy_(h.detach().mean(1, keepdim=True))
            return out

    return Program(Model(), lambda m, x: trained(square(m(x))))


@built_by(lambda step: Program(nn.ModuleDict({"gate": nn.Linear(5, 2), "a": mlp(), "b": mlp()}), step))
def expert_chosen_by_argmax(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first = m["gate"](x).argmax(-1, keepdim=True) == 0
    out = torch.where(first, m["a"](x), m["b"](x))
    return trained(F.cross_entropy(out, y))


@program()
def one_module_under_two_names() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 4)
            self.blocks = nn.ModuleList([self.first, self.first])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.last(x)

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weight_of_no_elements() -> Program:
    model = nn.ModuleDict({"body": mlp(), "none": nn.Linear(5, 0)})
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m["body"](x), y) + m["none"](x).sum()))


@program()
def deep_copies_of_a_block() -> Program:
    import copy

    block = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.GELU())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)), nn.Linear(5, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program(floats(5))
def vector_quantised() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode, self.codes = mlp(5, 4), mlp(4, 5), nn.Embedding(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encode(x)
            apart = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(1)
            code = self.codes(apart.argmin(1))
            kept = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
            return self.decode(z + (code - z).detach()), kept

    def step(m: nn.Module, x: Tensor) -> Tensor:
        made, kept = m(x)
        return trained(F.mse_loss(made, x) + kept)

    return Program(Model(), step)
