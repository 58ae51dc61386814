"""The setting of ragged shapes: ``config.set_shapes`` and ``config.shapes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphzero.config import Check, PluginSetting
from graphzero.plugins.ragged.shapes import Shapes, shapes_of


def set_shapes(
    inputs: Mapping[str, Mapping[int, str] | Sequence[str | None]] | None,
    sizes: Mapping[str, int | Sequence[int] | str] | None = None,
    *,
    fill: Mapping[str, float] | None = None,
) -> Shapes | None:
    """Pad inputs of many shapes to a few, so that a few programs serve all of them; results are as without padding.

    inputs: which dims of which inputs are ragged, by names of your own: ``{"input_ids": {0: "rows", 1: "tokens"}}``
        or, by the order of dims, ``{"*": ("rows", "tokens")}``.  Keys are the names of inputs as in the program,
        ``x`` or ``batch.labels``, or patterns, which mean those dims that an input has.  Dims of one name are of
        one size in each call.  None pads nothing.
    sizes: to what each of them is padded: a number, of which the least multiple; "powers", the least power of two;
        or a list of sizes, of which the least that is enough.  They are those of what a rank passes: of its share,
        or of the whole batch on a virtual placement; and they grow on to a multiple of ranks and micro-batches.
    fill: what inputs hold in padded places, 0 without it: ``{"labels": -100}``.  Only where a rank's batch is
        shorter than that of another one does it count: the global batch is as long as the longest, and its other
        rows are filled up.

    Padded rows and tokens have no part in losses, counts, statistics and gradients, whatever they hold: sums leave
    them out, means divide by what was given, and a softmax does not see them.  What cannot be kept apart raises
    CaptureError when the step is compiled, with the line.  Outputs are cut back to what was given.  Random draws
    are those of the padded shapes.
    """
    return shapes_of(inputs, sizes, fill) if inputs is not None else None


SHAPES = PluginSetting(
    default=None,
    check=Check(lambda x: x is None or isinstance(x, Shapes), "say which dims are ragged, and their sizes"),
    doc="Which dims of inputs are padded to which sizes, as ``set_shapes`` left it; None without it.",
    method=set_shapes,
)
