"""The setting of ragged shapes: ``config.set_shapes`` and ``config.shapes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphzero.config import Check, PluginSetting
from graphzero.plugins.ragged.shapes import Shapes, shapes_of


def set_shapes(
    inputs: Mapping[str, Mapping[int, str] | Sequence[str | None]] | None,
    sizes: Mapping[str, int | Sequence[int] | str] | None = None, *, fill: Mapping[str, float] | None = None,
) -> Shapes | None:  # fmt: skip
    """Pad inputs of many shapes to a few, so that a few programs serve all of them; results are as without padding.

    inputs: which dims of which inputs are ragged, with names that you choose: ``{"input_ids": {0: "rows", 1:
        "tokens"}}`` or, in the order of dims, ``{"*": ("rows", "tokens")}``.  Keys are the names of inputs as in the
        program, ``x`` or ``batch.labels``, or patterns, which apply to the dims that an input has.  Dims of one name
        have one size in each call.  None pads nothing.
    sizes: the sizes to which each name is padded: a number, for its least multiple that is enough; "powers", for the
        least power of two; or a list of sizes, for the least one.  They are sizes of the tensors that a rank passes:
        of its share, or of the whole batch on a virtual placement.  They are rounded up to a multiple of ranks and
        micro-batches.
    fill: values of padding by input, 0 by default: ``{"labels": -100}``.  It matters only if a rank's batch is
        shorter than that of another rank: the global batch is as long as the longest, and its other rows are filled.

    Padding has no part in losses, counts, statistics and gradients, for any fill: sums leave it out, means divide by
    the numbers of given elements, and a softmax does not see it.  An op for which this is not known raises
    CaptureError when the step is compiled, with the line.  Outputs are cut back to the given sizes.  Random draws are
    those of the padded shapes.
    """
    return shapes_of(inputs, sizes, fill) if inputs is not None else None


SHAPES = PluginSetting(
    default=None,
    check=Check(lambda x: x is None or isinstance(x, Shapes), "say which dims are ragged, and their sizes"),
    doc="Which dims of inputs are padded to which sizes, as ``set_shapes`` left it; None without it.",
    method=set_shapes,
)
