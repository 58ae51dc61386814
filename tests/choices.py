"""Choices that a random case is made of: drawn by Hypothesis, which makes a failing case small, or from a number.

Hypothesis draws the same cases in every run, and keeps no files in the tree.  A test that imports this has that
profile, and says how many cases it is about: ``@random_cases(20)``.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "graphzero-hypothesis")
settings.register_profile(
    "same in every run", derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example],
)  # fmt: skip
settings.load_profile("same in every run")


def random_cases(count: int) -> Callable[[Any], Any]:
    """So many cases in a test, with time to make one that fails small."""
    return lambda test: pytest.mark.timeout(900)(settings(max_examples=count)(test))


PARTS = 20  # of which a share is a number, as Hypothesis draws no floats evenly


class Choices(Protocol):
    def pick(self, *options: Any) -> Any: ...

    def chance(self, share: float) -> bool: ...


class Seeded:
    """Choices that follow from a number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        return self.random.random() < share


class Drawn:
    """Choices of Hypothesis; the smallest case has the first of all options, and nothing that is left to chance.

    ``sampled_from`` of less than a hundred options: the values that Hypothesis finds in sources come in above that, and
    depend on what has been imported.
    """

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def chance(self, share: float) -> bool:
        return self.pick(*range(PARTS)) >= round(PARTS * (1 - share))


SEEDS = st.sampled_from(range(90))  # of the values in a case
