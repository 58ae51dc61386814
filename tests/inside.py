"""What a Graph ran last, for tests that look inside, and steps of it that end with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import graphzero as gz
from graphzero.plugins.check import checking
from graphzero.plugins.check.report import Report
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.execute.program import Program
from graphzero.runtime.execute.steps import Barrier, Env


def executor_of(graph: gz.Graph) -> Executor:
    """What runs the program of the graph's last call."""
    return graph._selection.last.executor(graph._source.world)


def program_of(graph: gz.Graph) -> Program:
    return executor_of(graph).program


class _CheckOfEnds(checking._Check):
    """A check that takes all passes for one."""

    def __init__(self, start: Any, names: Any, program: Any, *options: Any) -> None:
        first, last = program.history[0], program.history[-1]
        joined = replace(last, packed=(first.packed[0], last.packed[1]))
        super().__init__(start, names, replace(program, history=[joined]), *options)


def check_ends(graph: gz.Graph, *args: Any, **options: Any) -> Report:
    """What ``gz.check`` says of the captured step and of the program that runs: those between take most of its time."""
    with patch.object(checking, "_Check", _CheckOfEnds):
        return gz.check(graph, *args, **options)


@contextmanager
def failing(
    graph: gz.Graph, at: int, error: BaseException, done: bool = True, meet: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Step number ``at`` of the graph's program ends with ``error``, after ``meet``; done: after what it does."""
    steps = program_of(graph).steps
    step = steps[at]

    def fail(envs: list[Env]) -> None:
        if done:
            step(envs)
        meet()
        raise error

    steps[at] = Barrier(step.node if isinstance(step, Barrier) else step.lines[0].node, fail)
    try:
        yield
    finally:
        steps[at] = step
