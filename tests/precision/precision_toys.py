"""Models, a Graph with mixed precision, and the same training in plain PyTorch: masters, casts, autocast."""

import sys
from pathlib import Path

import torch
from graphs import TrainGraph, loss_of_model
from torch import nn
from torch.nn import functional as F

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from workloads import GPT, Shape  # noqa: E402

BF16, F16 = torch.bfloat16, torch.float16


class Mlp(nn.Module):
    """Two layers, a norm, and the mean squared error."""

    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.LayerNorm(4 * width), nn.GELU(), nn.Linear(4 * width, 8)
        )

    def forward(self, x, y):
        return F.mse_loss(self.body(x).float(), y)


def mlp(seed=0, width=16):
    torch.manual_seed(seed)
    return Mlp(width)


def gpt(seed=0):
    torch.manual_seed(seed)
    return GPT(Shape(vocabulary=32, width=16, layers=1, heads=2, batch=2, context=8, tied=True))


def batch_of(model, step, size=8):
    generator = torch.Generator().manual_seed(step % 4)
    if isinstance(model, GPT):
        tokens = torch.randint(32, (size, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    x = torch.randn(size, model.body[0].in_features, generator=generator)
    return x, torch.tanh(x[:, :8])


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def virtual(ranks):
    return gz.placement("cpu", range(ranks), virtual=True)


def amp_graph(
    model, stage=0, placement=None, dtype=BF16, optimizer=adamw, clip=None, scheduler=None, kind=TrainGraph, **amp
) -> TrainGraph:
    """A step of a model whose forward gives the loss."""
    layout = {"placement": placement, "stage": stage}
    graph = kind(model, loss_of_model, optimizer(model), clip=clip, scheduler=scheduler, **layout)
    if dtype is not None:
        graph.config.enable_amp(dtype=dtype, **amp)
    return graph


class Plain:
    """Plain PyTorch: the loss of the casts of fp32 parameters under autocast, and torch's GradScaler for float16."""

    def __init__(self, model, dtype=BF16, optimizer=adamw, clip=None, **scaling):
        self.model, self.dtype, self.clip = model, dtype, clip
        self.optimizer = optimizer(model)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is F16, **scaling)

    def step(self, *batch):
        casts = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        with torch.autocast("cpu", self.dtype):
            loss = torch.func.functional_call(self.model, casts, batch)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def losses(train, model, steps):
    return torch.stack([train(*batch_of(model, step)).float() for step in range(steps)])
