"""All models of the zoo, by name: of which package, and how they are made."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from zoo.trial import Trial

PARTS = ("zoo.peft_models", "zoo.diffusers_models", "zoo.transformers_models", "zoo.image_models")


@functools.cache
def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    """name -> family, and how the trial is made; of the packages that are installed."""
    found: dict[str, tuple[str, Callable[[], Trial]]] = {}
    for part in PARTS:
        try:
            found |= importlib.import_module(part).cases()
        except ImportError as error:
            print(f"without {part}: {error}")
    return found
