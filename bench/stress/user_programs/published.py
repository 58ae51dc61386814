"""Small copies of models as packages publish them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stress.user_programs.program import Program, adam, built_by, classes, flags, floats, mlp, program, square, trained


class Norm(nn.Module):
    """Root mean square norm that computes in float32 at least, as most language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        steps = 10000 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("steps", steps, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part[:, None].expand_as(q) for part in self.kv(x).chunk(2, -1))
        angles = torch.arange(x.shape[1]).to(self.steps.dtype)[:, None] * self.steps
        cos, sin = angles.cos().tile(1, 2), angles.sin().tile(1, 2)
        scores = rotated(q, cos, sin) @ rotated(k, cos, sin).transpose(-1, -2) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if mask is not None:
            scores = scores + (1 - mask[:, None, None].to(scores.dtype)) * -1e4
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.first, self.second = Attention(), Norm(8), Norm(8)
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((8, 12), (8, 12), (12, 8)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.first(x), mask)
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(10, 8), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(8), nn.Linear(8, 10, bias=False)
        self.apply(self.initialised)

    def initialised(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> dict:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        flat = logits[:, :-1].reshape(-1, 10), labels[:, 1:].reshape(-1)
        return {"loss": F.cross_entropy(*flat, ignore_index=-100), "logits": logits}


def speak(model: nn.Module, **inputs: Tensor) -> dict:
    out = model(**inputs)
    out["loss"].backward()
    return out


@program(input_ids=classes(10, 6), labels=classes(10, 6))
def language_model() -> Program:
    model = Language()
    return Program(model, speak, [adam(model.parameters())])


@program(input_ids=classes(10, 6), labels=classes(10, 6), attention_mask=flags(6))
def language_model_with_a_mask() -> Program:
    model = Language()
    return Program(model, speak, [adam(model.parameters())])


@program(floats(3, 8, 8), classes(4))
def vision_transformer() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
            self.places = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
            self.block, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.cut(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            return self.head(self.block(x)[:, 0])

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program(floats(3, 8, 8), classes(4))
def residual_network() -> Program:
    class Residual(nn.Module):
        def __init__(self, given: int, made: int, stride: int) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Conv2d(given, made, 3, stride, 1, bias=False),
                nn.Conv2d(made, made, 3, 1, 1, bias=False),
            )
            self.norm_a, self.norm_b = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
            self.short = nn.Conv2d(given, made, 1, stride) if stride > 1 else None

        def forward(self, x: Tensor) -> Tensor:
            same = x if self.short is None else self.short(x)
            return F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))) + same)

    model = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Residual(4, 4, 1), Residual(4, 6, 2), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(6, 4))  # fmt: skip
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program(floats(5), floats(5))
def self_distillation_with_centre() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), mlp().requires_grad_(False)
            self.register_buffer("centre", torch.zeros(1, 4))

    def step(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = m.teacher(a)
            soft = ((wanted - m.centre) / 0.5).softmax(-1)
            m.centre.mul_(0.9).add_(0.1 * wanted.mean(0, keepdim=True))
        loss = trained(-(soft * m.student(b).log_softmax(-1)).sum(-1).mean())
        with torch.no_grad():
            for slow, fast in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return loss

    return Program(Model(), step)


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


@program(floats(6, 5))
def state_space_scan() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out, self.decay = nn.Linear(5, 4), nn.Linear(4, 5), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            u, keep, h, made = self.into(x), torch.sigmoid(self.decay), torch.zeros(len(x), 4), []
            for t in range(x.shape[1]):
                h = keep * h + (1 - keep) * u[:, t]
                made.append(h)
            return self.out(torch.stack(made, 1))

    return Program(Model(), lambda m, x: trained(F.mse_loss(m(x)[:, :-1], x[:, 1:])))


@built_by(lambda step: Program(nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 3)]), step), floats(4, 5), flags(4))
def graph_convolution_over_masks(m: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    edges = (keep[:, :, None] & keep[:, None]).to(x.dtype)
    degree = edges.sum(-1).clamp(min=1).rsqrt()
    for layer in m:
        x = torch.tanh(layer((degree[..., None] * edges * degree[:, None]) @ x))
    pooled = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
    return trained(square(pooled - 0.1))


@program(classes(8), classes(8), floats())
def factorisation_of_users_and_items() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(8, 4), nn.Embedding(8, 4)
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, u: Tensor, i: Tensor) -> Tensor:
            return (self.users(u) * self.items(i)).sum(-1) + self.bias

    return Program(Model(), lambda m, u, i, r: trained(F.mse_loss(m(u, i), r)))


@program(floats(6, 5), classes(4, 6))
def conditional_random_field() -> Program:
    model = nn.ModuleDict({"body": mlp()})
    model["moves"] = nn.ParameterList([torch.randn(4, 4) * 0.1])

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, moves = m["body"](x), m["moves"][0]
        alpha = scores[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + scores[:, t]
        own = scores.gather(2, y[..., None]).sum((1, 2)) + moves[y[:, :-1], y[:, 1:]].sum(1)
        return trained((torch.logsumexp(alpha, 1) - own).mean())

    return Program(model, step)
