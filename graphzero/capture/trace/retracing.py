"""The user's build, traced as often as it takes to learn what it must be told, and what its float inputs are to it."""

from __future__ import annotations

import math
import warnings

from torch import nn

from graphzero.capture.spec import Inputs, Step
from graphzero.capture.trace.build_trace import BuildTrace, TracedBuild
from graphzero.capture.trace.is_compiling import CompilingAnswers, is_raised
from graphzero.errors import GraphZeroError


def trace_build(step: Step, root: nn.Module, inputs: Inputs) -> TracedBuild:
    """A step's build, with one warning where it may be another function than plain PyTorch's."""
    traced = _with_floats(step, root, inputs)
    lines = [*traced.asks_whether_traced][:4]
    if lines:
        warnings.warn(
            f"build of {step.name} asks whether it is being traced ({', '.join(lines)}) and got the "
            "answer yes, because it otherwise depends on values that a graph does not have. What it does then need "
            "not be what plain PyTorch computes: gz.check(graph, *inputs) compares the two",
            stacklevel=6,
        )
    return traced


def _with_floats(step: Step, root: nn.Module, inputs: Inputs) -> TracedBuild:
    """Build with its float inputs as symbols of finite numbers, or as constants where it depends on their values in
    ways that symbols cannot express; the trace then holds for these values only.
    """
    values = {leaf.name: leaf.raw for leaf in inputs.floats}
    if not all(map(math.isfinite, values.values())):
        return _traced(step, root, inputs, values)
    try:
        traced = _traced(step, root, inputs, {})
    except Exception:
        if not values:
            raise
        return _traced(step, root, inputs, values)  # works, or fails as plain PyTorch does
    return _traced(step, root, inputs, values) if traced.goes_by_values else traced


def _traced(step: Step, root: nn.Module, inputs: Inputs, fixed: dict[str, float]) -> TracedBuild:
    """Build traced until every place that must see itself traced is known."""
    answers, refused = CompilingAnswers(), None
    while True:
        try:
            traced = BuildTrace(step, root, inputs, answers, fixed).trace()
            traced.asks_whether_traced = answers.told
            return traced
        except GraphZeroError as error:
            refused = refused or error
            if not answers.learns(error):
                raise
        except Exception as error:
            if not answers.learns(error):
                if refused is None or is_raised(error):
                    raise
                raise refused from error  # the way that is not plain PyTorch's leads nowhere
