"""Outputs of ``build`` from the results of a program: values for the user, in the tree that build made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.ragged import Along
from graphzero.runtime.execute.executor import Results
from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import join, wrap
from graphzero.runtime.world.world import World
from graphzero.sbp.dtensor import annotate
from graphzero.sbp.types import Nd, S
from graphzero.step.input_transform import TransformedInputs


@dataclass(frozen=True)
class BuildOutput:
    """One output of build. nd, shape: of a tensor; no shape: a number. is_literal: the value is a constant.

    padded: along what it is padded.
    """

    nd: Nd = ()
    shape: tuple[int, ...] | None = None
    is_literal: bool = False
    padded: tuple[Along, ...] = ()

    def to_user(self, value: Any, world: World, as_global: bool, transformed: TransformedInputs | None) -> Any:
        """The value for the user, see ``Graph.__call__``.  value: one entry per local rank, or the literal."""
        if self.is_literal:
            return value
        if self.shape is None:
            return value[0]
        tensor = self._tensor(value, self.shape, world, as_global)
        if not self.padded or transformed is None:
            return tensor
        is_local = not world.placement.virtual and tensor.shape != torch.Size(self.shape)
        return transformed.restore_output(tensor, self.padded, self.shape, is_local)

    def _tensor(self, pieces: Sequence[Tensor], shape: tuple[int, ...], world: World, as_global: bool) -> Tensor:
        placement, nd = world.placement, self.nd
        if placement.virtual:
            whole = (join(pieces, nd, placement.hierarchy) if len(pieces) > 1 else pieces[0]).detach()
            if as_global:
                annotate(whole, placement, nd)
            return whole
        local = pieces[0].detach()
        batch_split = all(
            sbp.is_broadcast or sbp is S(0) and axis in placement.data_axes
            for axis, sbp in zip(placement.names, nd, strict=True)
        )
        if batch_split and not as_global:
            return local
        dtensor = wrap(local, placement.mesh(), nd, shape)
        return dtensor if as_global else resplit.whole(dtensor, world.whole)


class BuildOutputs:
    """All outputs. spec: the tree in which build returns them."""

    def __init__(self, graph: StepGraph, spec: pytree.TreeSpec, padded: Sequence[tuple[Along, ...]]) -> None:
        along = padded or [()] * len(graph.outputs)
        self._all, self._spec = [_output(x, dims) for x, dims in zip(graph.outputs, along, strict=True)], spec

    def to_user(self, results: Results, world: World, as_global: bool, transformed: TransformedInputs | None) -> Any:
        """The values that build returns.  as_global: tensors as global ones.  transformed: see ``BuildCall``."""
        pairs = zip(self._all, results.outputs, strict=True)
        values = [output.to_user(value, world, as_global, transformed) for output, value in pairs]
        return pytree.tree_unflatten(values, self._spec)


def _output(x: Any, padded: tuple[Along, ...]) -> BuildOutput:
    if not isinstance(x, fx.Node):
        return BuildOutput(is_literal=True)
    return (
        BuildOutput(value.nd_of(x), value.tensor_type(x).shape, padded=padded) if value.is_tensor(x) else BuildOutput()
    )
