"""What a Graph ran last, for tests that look inside, and steps of it that end with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import graphzero as gz
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.execute.program import Program
from graphzero.runtime.execute.steps import Barrier, Env


def executor_of(graph: gz.Graph) -> Executor:
    """What runs the program of the graph's last call."""
    return graph._selection.last.part.executor(graph._source.world)


def program_of(graph: gz.Graph) -> Program:
    return executor_of(graph).program


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
