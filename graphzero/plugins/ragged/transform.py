"""Padding as a transform of a call's inputs: what ``config.set_shapes`` turns on."""

from __future__ import annotations

from typing import Any

from graphzero.capture import Captured, Inputs, Step
from graphzero.config import Settings
from graphzero.ir.ragged import PADDING
from graphzero.plugins.ragged.padding import Padded, Padding
from graphzero.plugins.ragged.shapes import Shapes
from graphzero.plugins.ragged.unpadded import unpadded
from graphzero.runtime.world.consensus import Ranks
from graphzero.step.build_inputs import BuildInputReader
from graphzero.step.input_transform import InputTransform

SETTING = "shapes"


class PaddingTransform:
    """See ``InputTransform``."""

    def read_inputs(
        self, reader: BuildInputReader, ranks: Ranks, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any],
        running: bool,
    ) -> tuple[Inputs, Padded]:  # fmt: skip
        """The padded inputs, see ``Padding.read_inputs``."""
        return Padding(reader, ranks, settings).read_inputs(args, kwargs, running)

    def rewrite_capture(self, step: Step, inputs: Inputs, transformed: Padded, captured: Captured) -> Captured:
        """The captured step as it computes what it would without padding."""
        return unpadded(step, inputs, transformed, captured)

    def uncut_inputs(self, settings: Settings) -> set[str]:
        """The masks of dims other than the rows, which are those of every micro-batch."""
        shapes: Shapes = settings.plugin_value(SETTING)
        return {PADDING + name for name in shapes.names if not shapes.is_first(name)}

    def capture_key(self, settings: Settings) -> tuple[str, object]:
        """Captures are made for the sizes of buckets."""
        return "ragged dims", settings.plugin_value(SETTING)


TRANSFORM: InputTransform = PaddingTransform()
