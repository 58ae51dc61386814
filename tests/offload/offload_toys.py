"""A step whose optimizer states may lie in host memory, and what is left of it."""

import copy

import torch
from torch import nn

import graphzero as gz

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "rprop": lambda params: torch.optim.Rprop(params),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
}
BUCKET = 200  # bytes: some parameters share one, others do not


class OffloadGraph(gz.Graph):
    """A step of a small net.  average: whether an exponential average follows it.  deeper: more layers."""

    def __init__(self, optimizer="adamw", stage=0, where=None, steps=1, clip=None, average=False, dtype=torch.float32,
                 deeper=0):  # fmt: skip
        super().__init__(where or gz.placement("cpu", range(3), virtual=True))
        torch.manual_seed(0)
        middle = [layer for _ in range(deeper) for layer in (nn.Linear(7, 7), nn.Tanh())]
        self.model = nn.Sequential(
            nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), *middle, nn.Linear(7, 5)
        ).to(dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.add_optimizer(self.optimizer, clip_grad_norm=clip)
        if average:
            self.average = torch.optim.swa_utils.AveragedModel(
                self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            self.add_average(self.average, self.model)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(steps)
        self.config.bucket_bytes = BUCKET

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def batch(step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 12, generator=generator, dtype=dtype), torch.randn(12, 5, generator=generator, dtype=dtype)


def results_of(graph, steps=3, share=slice(None)):
    """The losses of some steps, and all that the Graph holds after them."""
    losses = [graph(*(x[share] for x in batch(step))) for step in range(steps)]
    return {"losses": losses, **copy.deepcopy(graph.full_state_dict())}


def differences(one, other, path=""):
    """Where two nested results are not equal to the bit."""
    if isinstance(one, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{path}/{i}")
        ]
    is_same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if is_same else [path]
