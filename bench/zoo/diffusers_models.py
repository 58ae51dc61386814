"""Models of diffusers, each with a small configuration and the arguments that its pipeline gives it.

They are in ``diffusers_models.json``: by name the arguments of the class, which has that name unless another is given,
and those of its forward.  An argument is drawn again for every step ("randn" of a shape, "ids" below a number, "time"
and "whole time" of each row), or is as it is in the file, with tuples in lists, or made of "zeros", "ones" or a "mask"
of a shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.inputs import BATCH, smooth
from zoo.trial import Trial

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
DRAWS: dict[str, Callable[..., Tensor]] = {
    "randn": torch.randn,
    "ids": lambda count, *shape: torch.randint(0, count, (BATCH, *shape)),
    "time": lambda: torch.randint(0, 1000, (BATCH,)).to(torch.float64),
    "whole time": lambda: torch.randint(0, 1000, (BATCH,)),
    "ones": torch.ones,
    "mask": lambda *shape: torch.ones(shape, dtype=torch.bool),
}


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    import diffusers  # noqa: F401

    return {f"diffusers/{name}": ("diffusers", lambda name=name: trial(name)) for name in MODELS}


class Denoiser(nn.Module):
    def __init__(self, body: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.body = body
        self.constants = constants

    def forward(self, **batch: Tensor) -> Tensor:
        constants = {
            name: torch.zeros(*numbers_of(x)) if isinstance(x, str) else x for name, x in self.constants.items()
        }
        return smooth(self.body(**batch, **constants))


def trial(name: str) -> Trial:
    import diffusers

    given = MODELS[name]
    model = getattr(diffusers, given.get("class", name))(**given["config"])
    inputs = given["inputs"]
    drawn = {name: x for name, x in inputs.items() if isinstance(x, str) and not x.startswith("zeros")}
    constants = {
        name: [*map(tuple, x)] if isinstance(x, list) else x for name, x in inputs.items() if name not in drawn
    }
    return Trial(Denoiser(model, constants), lambda step: {name: draw(x) for name, x in drawn.items()})


def draw(text: str) -> Tensor:
    return DRAWS[text.rstrip("0123456789,").rstrip()](*numbers_of(text))


def numbers_of(text: str) -> list[int]:
    last = text.split()[-1]
    return [int(number) for number in last.split(",")] if last[0].isdigit() else []
