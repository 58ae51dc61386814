"""Transforms of a call's inputs that plug-ins add: the extension point ``graphzero.inputs``.

A transform is on where the setting of its name is not its default.  It reads a call's arguments in place of
``BuildInputReader.read``, may add inputs, and rewrites the captured step so that the step still computes what it would
of the arguments as they came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from graphzero.capture import Captured, Input, Inputs, Step
from graphzero.config import Settings
from graphzero.errors import ConfigError
from graphzero.extensions import INPUTS, Extension, extensions
from graphzero.ir.ragged import Along
from graphzero.runtime.world.consensus import Ranks
from graphzero.step.build_inputs import BuildInputReader


class TransformedInputs(Protocol):
    """A transform's record of the inputs of one call."""

    @property
    def added_inputs(self) -> Sequence[Input]:
        """Inputs of the program that are not arguments of build."""

    def check_capture(self, captured: Captured) -> None:
        """Raise ConfigError where the captured step cannot run on these inputs."""

    def restore_input(self, leaf: Input, x: Tensor) -> Tensor:
        """The whole of an input as it came.  x: the global tensor.  Every rank calls it."""

    def restore_output(self, x: Tensor, padded: Iterable[Along], shape: Sequence[int], is_local: bool) -> Tensor:
        """An output as the untransformed step has it.

        padded: the dims along which it is padded.  shape: the global one.  is_local: whether ``x`` is a rank's part.
        """


class InputTransform(Protocol):
    """A plug-in at the extension point ``graphzero.inputs``."""

    def read_inputs(
        self,
        reader: BuildInputReader,
        ranks: Ranks,
        settings: Settings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        running: bool,
    ) -> tuple[Inputs, TransformedInputs]:
        """The inputs of a call, transformed.  Every rank calls it.  Arguments: see ``BuildInputReader.read``."""

    def rewrite_capture(self, step: Step, inputs: Inputs, transformed: Any, captured: Captured) -> Captured:
        """The step that was captured of transformed inputs, as it computes what the untransformed one would."""

    def uncut_inputs(self, settings: Settings) -> Collection[str]:
        """Names of added inputs that are alike for all micro-batches."""

    def capture_key(self, settings: Settings) -> tuple[str, object]:
        """A name, and the value that decides whether a capture is used again."""


def active_transform(settings: Settings) -> InputTransform | None:
    """The transform that is on.  Raises ConfigError for two of them."""
    if not settings.plugins:
        return None
    plugins = extensions(INPUTS)
    active = [plugin.name for plugin in settings.plugins if plugin.name in plugins]
    if len(active) > 1:
        raise ConfigError(
            f"config.{' and config.'.join(active)} each transform the inputs of a call, but only one may: leave the "
            "others as they are by default"
        )
    return _transform_of(plugins[active[0]]) if active else None


@cache  # it is asked for in every call
def _transform_of(plugin: Extension) -> InputTransform:
    transform: InputTransform = plugin.load()
    names = ("read_inputs", "rewrite_capture", "uncut_inputs", "capture_key")
    if missing := [name for name in names if not callable(getattr(transform, name, None))]:
        raise plugin.refusal(f"is not a transform of inputs: it has no {', '.join(missing)}")
    guarded: InputTransform = plugin.guard(transform)
    return guarded
