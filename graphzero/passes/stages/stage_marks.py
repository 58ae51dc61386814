"""Marks of pipeline stages: the stage of each module path, from "path.pattern@stage"."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property

from graphzero.errors import ConfigError


def matches_path(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether each part of a module's path matches its part of the pattern."""
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


class StageMarks:
    """The marks of a step, "model.layers.*@1": a module that matches, and all in it, lives on that stage.

    Each part of a pattern matches one part of a path.  The mark of the innermost module counts, and of two marks that
    match one module the one without wildcards.
    Raises ConfigError for two marks that give one module two stages.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = [
            (tuple(pattern.split(".")), int(stage)) for pattern, _, stage in (m.rpartition("@") for m in marks)
        ]
        self._stages: dict[tuple[str, ...], int | None] = {(): None}

    @cached_property
    def count(self) -> int:
        """The number of stages."""
        return 1 + max((stage for _, stage in self.marks), default=0)

    def stage_of(self, path: str) -> int | None:
        """The stage of a module, or None where neither it nor a module around it is marked."""
        return self._find(tuple(path.split("."))) if path else None

    def _find(self, path: tuple[str, ...]) -> int | None:
        if path not in self._stages:
            matching = [(pattern, stage) for pattern, stage in self.marks if matches_path(path, pattern)]
            exact = [(pattern, stage) for pattern, stage in matching if pattern == path]
            stages = {stage for _, stage in exact or matching}
            if len(stages) > 1:
                numbers = " and ".join(map(str, sorted(stages)))
                raise ConfigError(
                    f"the module {'.'.join(path)} is marked for the stages {numbers}, by "
                    f"{', '.join('.'.join(pattern) for pattern, _ in exact or matching)}\n"
                    "  Give it one stage: config.set_stage(module, stage)"
                )
            self._stages[path] = stages.pop() if stages else self._find(path[:-1])
        return self._stages[path]
