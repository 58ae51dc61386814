"""Masks of padded places of a value, and counts of given ones, as values of the program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.ragged import Along
from graphzero.ir.value import Role, TensorType
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.ragged.shapes import Ragged
from graphzero.plugins.ragged.sizes import Formula

aten = torch.ops.aten


class Masks:
    """Written on demand, ahead of all ops: each is small, and read again and again."""

    def __init__(self, graph: StepGraph, ragged: Mapping[str, Ragged]) -> None:
        self.graph, self.ragged = graph, ragged
        self.first = next(node for node in graph.nodes if node.op != "placeholder")
        self.given = {name: self._placeholder(dim) for name, dim in ragged.items()}
        self._made: dict[Any, fx.Node] = {}
        self._filled: dict[Any, fx.Node] = {}

    def _placeholder(self, dim: Ragged) -> fx.Node:
        with self.graph.graph.inserting_before(self.first):
            node = self.graph.graph.placeholder(dim.padding.replace(" ", "_"))
        node.meta = {"type": TensorType(torch.bool, (dim.size,)), "sbp": None, "phase": "input", "source": ""}
        node.meta["role"] = Role("batch", dim.padding)
        return node

    @property
    def _top(self) -> DefinitionWriter:
        return DefinitionWriter(self.graph, self.first)

    def _once(self, key: Any, make: Any) -> fx.Node:
        if key not in self._made:
            node = self._made[key] = make(self._top)
            node.meta["phase"] = "forward"
        return self._made[key]

    def vector(self, name: str, more: int = 0) -> fx.Node:
        """Whether each place is padded, bool[size], for a dim that has ``more`` places more than the ragged dim."""
        given, size = self.given[name], self.ragged[name].size
        if more < 0:
            return self._once((name, more), lambda w: w(aten.slice.Tensor, given, 0, -more, size))
        if more > 0:
            return self._once((name, more), lambda w: w(aten.constant_pad_nd.default, given, [more, 0], False))
        return given

    def along(self, dim: Along, shape: tuple[int, ...]) -> fx.Node:
        """The same for one dim of a value, with dims of size one for its others."""
        vector = self.vector(dim.name, dim.more)
        places, size = self.ragged[dim.name].size + dim.more, shape[dim.dim]
        inner = size // (dim.sections * places)
        if (dim.sections, inner) != (1, 1):
            vector = self._once((dim.name, dim.more, dim.sections, inner),
                                lambda w: _spread(w, vector, dim.sections, places, inner))  # fmt: skip
        around = [size if i == dim.dim else 1 for i in range(len(shape))]
        if around == [size]:
            return vector
        return self._once((vector, tuple(around)), lambda w: w(aten.view.default, vector, around))

    def filled(self, x: fx.Node, dims: Iterable[tuple[Along, float]], reader: fx.Node) -> fx.Node:
        """``x`` with a number wherever it is padded along any of ``dims``, for an op that reads it."""
        shape = value.tensor_type(x).shape
        for dim, number in dims:
            key = x, dim, number, math.copysign(1, number), value.phase_of(reader)
            if key not in self._filled:
                w = DefinitionWriter(self.graph, reader)
                self._filled[key] = w(aten.masked_fill.Scalar, x, self.along(dim, shape), number)
            x = self._filled[key]
        return x

    def last(self, name: str, more: int, back: int) -> fx.Node:
        """False at the place that is ``back`` places before the end of the given part of a dim, True elsewhere."""

        def make(w: DefinitionWriter) -> fx.Node:
            here, size = self.vector(name, more), self.ragged[name].size + more
            after = [self._shifted(w, here, by, size) for by in (back - 1, back)]
            return w(aten.bitwise_or.Tensor, after[0], w(aten.bitwise_not.default, after[1]))

        return self._once(("last", name, more, back), make)

    def _shifted(self, w: DefinitionWriter, padded: fx.Node, by: int, size: int) -> fx.Node:
        if not by:
            return padded
        rest = w(aten.slice.Tensor, padded, 0, by, size)
        return w(aten.constant_pad_nd.default, rest, [0, by], True)

    def count(self, name: str, more: int, dtype: torch.dtype) -> fx.Node:
        """Number of given places of a dim that has ``more`` places more than the ragged dim; 0-d."""

        def make(w: DefinitionWriter) -> fx.Node:
            given = w(aten.eq.Scalar, self.vector(name, more), 0)
            return w(aten.sum.dim_IntList, given, [0], dtype=dtype)

        return self._once(("count", name, more, dtype), make)

    def number(self, formula: Formula, dtype: torch.dtype) -> fx.Node:
        """A number that depends on sizes, at the sizes of what was given; 0-d."""

        def make(w: DefinitionWriter) -> fx.Node:
            product, *others = [self.count(name, more, dtype) for name, more in formula.sizes]
            w = self._top
            for other in others:
                product = w(aten.mul.Tensor, product, other)
            product = w(aten.mul.Tensor, product, formula.factor) if formula.factor != 1 else product
            product = w(aten.add.Tensor, product, formula.plus) if formula.plus else product
            return w(aten.pow.Tensor_Scalar, product, formula.power) if formula.power != 1 else product

        return self._once((formula, dtype), make)


def _spread(w: DefinitionWriter, vector: fx.Node, sections: int, places: int, inner: int) -> fx.Node:
    """Repeat one truth value for each of ``inner`` neighbours, over all sections."""
    expanded = w(aten.view.default, vector, [1, places, 1])
    expanded = w(aten.expand.default, expanded, [sections, places, inner])
    expanded = w(aten.clone.default, expanded, memory_format=torch.contiguous_format)
    return w(aten.view.default, expanded, [sections * places * inner])
