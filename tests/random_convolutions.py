"""Random networks of convolutions, norms and pools for ``random_layouts``: ``convolutional(draw)`` is one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from random_models import CLASSES, ROWS, Residual
from torch import nn

if TYPE_CHECKING:
    from random_layouts import Draw

CHANNELS, SPACE = 3, 4  # of the input
PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_POOL = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOL = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
TO_ONE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class Stack:
    """Layers one after the other; ``channels`` and ``size`` are those of what the last one gives."""

    def __init__(self, draw: Draw):
        self.draw = draw
        self.dims = draw.pick(1, 2, 2, 2, 3)
        self.channels, self.size = CHANNELS, SPACE
        self.layers: list[nn.Module] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return (ROWS, self.channels, *(self.size,) * self.dims)

    def add(self, layer: nn.Module) -> None:
        self.draw.say(layer)
        self.layers += [layer, self.draw.pin(self.shape)]

    def convolution(self) -> None:
        draw, into = self.draw, self.draw.pick(4, 6, 8, 5)
        groups = draw.pick(1, 1, 1, *(n for n in (2, 3) if into % n == 0 and self.channels % n == 0))
        kernel = draw.pick(1, 3)
        kind = PLAIN if draw.chance(0.8) else TRANSPOSED
        made = kind[self.dims - 1](
            self.channels, into, kernel, padding=kernel // 2, bias=draw.chance(0.6), groups=groups
        )
        self.channels = into
        self.add(made)

    def residual(self) -> None:
        """One convolution after another around which the input passes."""
        draw, inner, kind = self.draw, self.draw.pick(4, 6), PLAIN[self.dims - 1]
        first = kind(self.channels, inner, 3, padding=1, bias=draw.chance(0.5))
        between = [draw.act()] if draw.chance(0.5) else []
        self.add(Residual(nn.Sequential(first, *between, kind(inner, self.channels, 1, bias=draw.chance(0.5)))))

    def norm(self) -> None:
        kind = self.draw.pick("batch", "batch", "frozen", "group", "instance", "layer")
        if kind == "group":
            divides = [n for n in (1, 2, 3) if self.channels % n == 0]
            self.add(nn.GroupNorm(self.draw.pick(*divides), self.channels))
        elif kind == "layer":
            self.add(nn.LayerNorm(self.shape[2:]))
        elif kind == "instance":
            if self.size > 1:
                self.add(INSTANCE_NORM[self.dims - 1](self.channels, affine=True))
        else:
            norm = BATCH_NORM[self.dims - 1](self.channels)
            self.add(norm.eval() if kind == "frozen" else norm)

    def activation(self) -> None:
        self.add(self.draw.act())

    def pool(self) -> None:
        if self.size > 1:
            kind = self.draw.pick(MAX_POOL, AVERAGE_POOL)
            self.size //= 2
            self.add(kind[self.dims - 1](2))

    def head(self) -> nn.Module:
        if self.draw.chance(0.5):
            self.size = 1
            self.add(TO_ONE[self.dims - 1](1))
        return nn.Linear(self.channels * self.size**self.dims, CLASSES)


def convolutional(draw: Draw) -> nn.Module:
    """Two to five layers of any kind between convolutions, and a head."""
    stack = Stack(draw)
    stack.convolution()
    for _ in range(draw.pick(1, 2, 3, 4)):
        draw.pick(stack.convolution, stack.convolution, stack.residual, stack.norm, stack.activation, stack.pool)()
    stack.convolution()
    for _ in range(draw.pick(0, 1, 2)):
        draw.pick(stack.norm, stack.activation, stack.pool)()
    head = stack.head()
    draw.say(head)
    draw.dims = stack.dims
    return nn.Sequential(*stack.layers, nn.Flatten(1), *draw.dropout(), head)
