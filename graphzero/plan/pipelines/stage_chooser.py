"""The extension point ``graphzero.stages``: stages that are chosen once the step is known, ``set_stage("NAME")``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from graphzero.errors import shorten_repr
from graphzero.extensions import STAGES, extensions
from graphzero.ir.graph import StepGraph
from graphzero.passes import Options, Pass
from graphzero.plan.device import Device

MARK = re.compile(r".+@\d+")


@dataclass(frozen=True)
class StageRequest:
    """A request for stages.

    count: of stages.  members: ranks along ``pp``.  device: whose seconds are evened out, if the user named one.
    modules: of the Graph, by attribute.
    nbytes: that a rank may have for parameters, gradients and states; None for any number.
    """

    count: int
    members: int = 1
    device: Device | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    nbytes: int | None = None


class StageChooser(Protocol):
    """A plug-in at the extension point ``graphzero.stages``."""

    def __call__(
        self, graph: StepGraph, options: Options, own: Sequence[tuple[Pass, str]], request: StageRequest
    ) -> tuple[tuple[str, ...], str]:
        """The marks of a captured step, "model.layers.0@1", and the decision in words, equal on all ranks.

        options: of the passes; its ``pipeline_stages`` are the user's marks, which are among those returned.
        own: the user's passes, each with the name of the one it follows.
        Raises ConfigError for a step that has no such stages.
        """
        ...


def chosen_stages(
    name: str, graph: StepGraph, options: Options, own: Sequence[tuple[Pass, str]], request: StageRequest
) -> tuple[tuple[str, ...], str]:
    """The marks of ``set_stage(name)`` and the decision in words, by the ``StageChooser`` of that name.

    It is given a copy of the graph.  Raises ConfigError for one that cannot be called, or gives no marks.
    """
    plugin = extensions(STAGES)[name]
    chooser = plugin.load()
    if not callable(chooser):
        raise plugin.refusal("is not a chooser of stages: it cannot be called")
    with plugin.name_errors():
        marks, decision = chosen = chooser(graph.clone(), options, own, request)
        are_marks = marks and all(map(MARK.fullmatch, marks)) and {*options.pipeline_stages} <= {*marks}
        if not are_marks or not isinstance(decision, str):
            raise plugin.refusal(
                f"chose {shorten_repr(chosen)}; give marks, ('model.0@0', 'model.1@1'), "
                "those of options.pipeline_stages among them, and words on the decision"
            )
    return tuple(marks), decision
