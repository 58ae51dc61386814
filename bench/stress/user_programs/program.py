"""What a program is, and the makers of its batches.

A program is a factory: called, it returns a model, its optimizers and a step function, all made again.  Its text is the
same in plain PyTorch and in a Graph.  Tensors are made in the default dtype, which the caller sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ROWS = 16  # of a whole batch: four ranks of two micro-batches get two rows each
Maker = Callable[[torch.Generator, int], Any]  # of one input, from random numbers and the number of the step


@dataclass
class Program:
    """A model and how it is trained.

    step: (model, *inputs) -> outputs; calls backward.  optimizers: by default SGD with momentum.
    schedulers: one an optimizer, or None.  between: called after each step with the program and the step's number.
    writes: whether ``between`` reads or writes whole parameters.  watched: objects that the step may change, by name.
    """

    model: nn.Module
    step: Callable[..., Any]
    optimizers: Sequence[Optimizer] | None = None
    schedulers: Sequence[Any] = ()
    clip: float | None = None
    between: Callable[[Program, int], None] | None = None
    writes: bool = False
    watched: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizers is None:
            self.optimizers = [sgd(p for p in self.model.parameters() if p.requires_grad)]


@dataclass(frozen=True)
class Source:
    """A registered program."""

    name: str
    make: Callable[[], Program]
    makers: tuple[Maker, ...]
    named_makers: dict[str, Maker]

    def batch(self, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(100 + step)
        named = {name: maker(generator, step) for name, maker in self.named_makers.items()}
        return tuple(maker(generator, step) for maker in self.makers), named


PROGRAMS: dict[str, Source] = {}


def program(*makers: Maker, **named: Maker) -> Callable[[Callable[[], Program]], Any]:
    """Register a factory under its name; without makers its batch is ``x`` of five features and four classes ``y``."""

    def register(make: Callable[[], Program]) -> Callable[[], Program]:
        name = make.__name__
        assert name not in PROGRAMS, name
        given = makers if makers or named else (floats(5), classes(4))
        PROGRAMS[name] = Source(name, make, given, named)
        return make

    return register


def built_by(make: Callable[[Any], Program], *makers: Maker, **named: Maker) -> Callable[[Any], Any]:
    """Register what is decorated, such as a step or a module's class, as the program that ``make`` builds of it.

    Its name is that of the function, or of the class in lower case with underscores.
    """

    def register(part: Any) -> Any:
        def factory() -> Program:
            return make(part)

        factory.__name__ = re.sub(r"(?<!^)(?=[A-Z])", "_", part.__name__).lower()
        program(*makers, **named)(factory)
        return part

    return register


def by_step(step: Callable[..., Any]) -> Program:
    return Program(mlp(), step)


def floats(*shape: int) -> Maker:
    return lambda generator, step: torch.randn(ROWS, *shape, generator=generator)


def classes(count: int, *shape: int) -> Maker:
    return lambda generator, step: torch.randint(count, (ROWS, *shape), generator=generator)


def flags(*shape: int) -> Maker:
    """Booleans, of which each row has a true one first."""

    def make(generator: torch.Generator, step: int) -> Tensor:
        drawn = torch.rand(ROWS, *shape, generator=generator) > 0.4
        drawn[(slice(None), 0) if shape else 0] = True
        return drawn

    return make


def each(*values: Any) -> Maker:
    """The value of the step, one after the other."""
    return lambda generator, step: values[step % len(values)]


def mlp(given: int = 5, made: int = 4, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(given, hidden), nn.Tanh(), nn.Linear(hidden, made))


def sgd(parameters: Any, lr: float = 0.1) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adam(parameters: Any, lr: float = 0.01) -> Optimizer:
    return torch.optim.Adam(parameters, lr=lr, eps=1e-3)


def square(x: Tensor) -> Tensor:
    return x.pow(2).mean()


def trained(loss: Tensor) -> Tensor:
    loss.backward()
    return loss
