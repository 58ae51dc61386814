"""All models of the zoo, by name: of which package, and how they are made."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from zoo_trial import Trial

PARTS = ("zoo_recipes", "zoo_peft", "zoo_diffusers", "zoo_transformers", "zoo_images")


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
