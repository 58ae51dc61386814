"""Programs, how they are registered, and the ways to build them.

A program is a factory: called, it returns a model, its optimizers and a step function, all made again.  Its text is the
same in plain PyTorch and in a Graph.  Tensors are made in the default dtype, which the caller sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from stress.user_programs.parts import Maker, classes, floats, mlp, trained


@dataclass
class Program:
    """A model and how it is trained.

    step: (model, *inputs) -> outputs; calls backward.  optimizer: by default SGD with momentum.
    between: called after each step with the program and the step's number.
    writes: whether ``between`` reads or writes whole parameters.  watched: objects that the step may change, by name.
    """

    model: nn.Module
    step: Callable[..., Any]
    optimizer: Optimizer = field(default=None)  # type: ignore[assignment]
    between: Callable[[Program, int], None] | None = None
    writes: bool = False
    watched: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Source:
    """A registered program."""

    name: str
    make: Callable[[], Program]
    makers: tuple[Maker, ...]

    def batch(self, step: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(100 + step)
        return tuple(maker(generator) for maker in self.makers)


PROGRAMS: dict[str, Source] = {}


def built_by(build: Callable[[Any], Program], *makers: Maker) -> Callable[[Any], Any]:
    """Register what is decorated, such as a step or a module's class, as the program that ``build`` makes of it.

    Its name is that of the function, or of the class in lower case with underscores.  Without makers its batch is ``x``
    of five features and four classes ``y``.
    """

    def register(part: Any) -> Any:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", part.__name__).lower()
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Source(name, partial(build, part), makers or (floats(5), classes(4)))
        return part

    return register


def program(*makers: Maker) -> Callable[[Callable[[], Program]], Any]:
    """Register a factory of programs."""
    return built_by(lambda factory: factory(), *makers)


def by_step(step: Callable[..., Any]) -> Program:
    return Program(mlp(), step)


def by_loss(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    """A program of a function of four logits, inputs and a target."""
    return Program(mlp(), lambda m, x, y: trained(loss(m(x), x, y)))


def by_model(model_class: Callable[[], nn.Module]) -> Program:
    """A program of a module that returns its loss."""
    return Program(model_class(), lambda m, *inputs: trained(m(*inputs)))


def by_classifier(model_class: Callable[[], nn.Module], **facts: Any) -> Program:
    """A program that trains a module of five features and four classes."""
    return Program(model_class(), lambda m, x, y: trained(F.cross_entropy(m(x), y)), **facts)
