"""A capture of padded inputs as the step without padding: captured at other sizes too, compared, and rewritten.

``TRANSFORM`` is what ``config.set_shapes`` turns on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphzero.capture import Captured, Inputs, Step, capture
from graphzero.config import Settings
from graphzero.errors import CaptureError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.packed_graph import PackedGraph
from graphzero.ir.ragged import PADDING
from graphzero.ir.text.printer import print_line
from graphzero.plugins.ragged.exact import exact
from graphzero.plugins.ragged.padding import Padded, Padding
from graphzero.plugins.ragged.shapes import Shapes
from graphzero.plugins.ragged.sizes import Differs, Sizes, trials
from graphzero.runtime.world.consensus import Ranks
from graphzero.step.build_inputs import BuildInputReader
from graphzero.step.input_transform import InputTransform

_TRIES = (1, 2, 3)  # how far off the first other size is; another one where sizes happen to be those of other dims


def unpadded(step: Step, inputs: Inputs, padded: Padded, captured: Captured) -> Captured:
    """``captured``, of padded inputs, rewritten so that it computes what it would without padding.

    Raises CaptureError for a step of which that is not known, or that is another one at other sizes.
    """
    if not padded.lengths:
        return captured
    graph = captured.graph
    sizes = _compared(step, inputs, padded, captured, graph)
    rewritten = exact(graph, sizes, padded.ragged, padded.dims)
    return replace(
        captured, packed=PackedGraph.from_graph(rewritten.graph), padded=rewritten.outputs, least=rewritten.least
    )


def _compared(step: Step, inputs: Inputs, padded: Padded, captured: Captured, graph: StepGraph) -> Sizes:
    """The step at other sizes too.  Captures are compared one by one, so that few are made of a step that is refused:
    two other sizes at which it is one program, and another one than here, suffice for that.
    """
    failure: CaptureError | None = None
    differing: list[StepGraph] = []
    for far in _TRIES:
        at, others = trials(padded.ragged, far), list[Captured]()
        try:
            for trial in at:
                others.append(_captured(step, _with(inputs, padded, trial), trial))
                sizes = Sizes([graph, *(other.graph for other in others)], padded.ragged, at[: len(others)])
        except Differs as differs:
            failure = failure or _other_program(differs, padded, at[: len(others)])
            if any(_is_alike(other, others[-1].graph) for other in differing):
                break
            differing.append(others[-1].graph)
            continue
        for other in others:
            _check_constants(captured, other)
        return sizes
    assert failure is not None
    raise failure


def _is_alike(one: StepGraph, other: StepGraph) -> bool:
    try:
        Sizes([one, other], [], [])
    except Differs:
        return False
    return True


def _with(inputs: Inputs, padded: Padded, sizes: Mapping[str, int]) -> Inputs:
    """Inputs of other sizes, of which capture asks nothing else."""
    leaves = []
    for leaf in inputs.leaves:
        dims = padded.dims.get(leaf.name, {})
        if leaf.shape is not None and dims:
            shape = tuple(sizes.get(dims.get(i, ""), size) for i, size in enumerate(leaf.shape))
            leaf = replace(leaf, shape=shape)
        leaves.append(leaf)
    return replace(inputs, leaves=tuple(leaves))


def _captured(step: Step, inputs: Inputs, sizes: Mapping[str, int]) -> Captured:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said by the capture itself
            return capture(step, inputs)
    except Exception as error:
        raise CaptureError(
            f"set_shapes pads, and to keep padding apart build is also traced at {_text(sizes)}, where it fails:\n  "
            f"{type(error).__name__}: {error}\n\n  A dim that may have certain sizes only cannot be padded from others"
        ) from error


def _other_program(differs: Differs, padded: Padded, at: Sequence[Mapping[str, int]]) -> CaptureError:
    node = differs.node
    where = (
        f"\n\n  > {print_line(node)}\n\n  at {value.source_of(node)}"
        if node is not None and node.op != "output"
        else ""
    )
    here = _text({dim.name: dim.size for dim in padded.ragged})
    return CaptureError(
        f"set_shapes pads, and build is another program at {' or '.join(map(_text, at))} than at {here}, so it is not "
        f"known what it does at the true sizes{where}\n\n  Sizes that are those of other dims can do that: choose some "
        "that differ from each other and from the model's. An `if` on a size must be outside of build"
    )


def _check_constants(captured: Captured, other: Captured) -> None:
    """Tensors that build makes of Python's numbers are constants, and must not be of sizes."""
    pairs = zip(captured.constants.values(), other.constants.values(), strict=True)
    for one, another in pairs:
        if one.shape != another.shape or not torch.equal(one, another):
            raise CaptureError(
                f"build makes a tensor of numbers that depend on the sizes of its inputs, {one.tolist()}; set_shapes "
                "pads them, so it would be that of padding. Count with tensors: mask.sum(), torch.ones_like(x).sum()"
            )


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


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
