"""A step that was captured once, put on other ranks, with weights split in other ways, under other settings.

Shapes in a captured step are global and nothing in it knows of ranks; so whatever layout is asked for, ``build`` is
traced once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphzero.capture import Captured
from graphzero.config import Settings
from graphzero.config.stages import clear_stages, resolve_marks
from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.plan import Candidate
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S, Sbp
from graphzero.step.compile_step import prepare_for_passes
from graphzero.step.pass_settings import program_of

SPLIT_KINDS = ("param", "state")  # kinds of roles that are split as a weight is


@dataclass(frozen=True)
class CapturedStep:
    """A user's step, and what its layouts are made of.

    graph: captured, for ``graph.placement``.  placed: how what it reads lies there.  settings: the user's own.
    rows: of the global batch.  names: attribute of the Graph -> the names of its parameters and buffers, ties included.
    modules: of the Graph, by attribute.  auto_line: sets stages that the user has not set.
    """

    captured: Captured = field(repr=False)
    placed: Mapping[Role, Nd] = field(repr=False)
    graph: StepGraph = field(repr=False)
    settings: Settings = field(repr=False)
    rows: int
    names: Mapping[str, tuple[str, ...]] = field(repr=False)
    modules: Mapping[str, nn.Module] = field(repr=False)
    auto_line: str = ""

    @property
    def placement(self) -> Placement:
        return self.graph.placement

    @property
    def weights_axes(self) -> tuple[str, ...]:
        """Axes over which the user has split parameters, or pinned values of build, that are not for data."""
        taken = [nd for role, nd in self.placed.items() if role.kind == "param"]
        taken += [nd for node in self.graph.nodes if (nd := value.sbp_of(node)) and any(value.pins_of(node))]
        names = self.placement.names
        split = {i for nd in taken for i, sbp in enumerate(nd) if sbp is not None and sbp is not B}
        return tuple(name for i, name in enumerate(names) if i in split and name not in self.placement.data_axes)

    def on(self, placement: Placement, splits: Mapping[str, Sbp]) -> tuple[StepGraph, dict[Role, Nd]]:
        """The step on other ranks, and how what it reads lies there.

        placement: with the axes of the one that it was captured for, of which that of data may be cut in several, and
        perhaps one more after those, which is not for data; over the last one ``splits`` says how parameters, by path,
        are split.
        """
        origins = [self._origin(name) for name in placement.names]
        graph = self.graph.with_axes(placement, origins)
        placed = {role: tuple(B if i is None else nd[i] for i in origins) for role, nd in self.placed.items()}
        for role, nd in placed.items():
            if role.kind in SPLIT_KINDS and role.of in splits:
                placed[role] = (*nd[:-1], splits[role.of])
        return graph, placed

    def _origin(self, name: str) -> int | None:
        """Number of the axis of the capture that one of this name is, or is a part of; None for a new one."""
        if name in self.placement.names:
            return self.placement.axis(name)
        return self.placement.axis(self.placement.data_axes[0]) if name.startswith("dp") else None

    def program(self, placement: Placement, splits: Mapping[str, Sbp], settings: Settings) -> Candidate:
        """The program that a Graph with these ranks, ``pp`` among their axes, splits and settings compiles to.

        It is made to be priced, and not verified.  Raises ConfigError for settings that it cannot have.
        """
        graph, placed = self.on(placement.without_pipeline(), splits)
        return program_of(graph, settings, placed, None, False, self.modules, placement)


def captured_step(graph: Graph, example: tuple[Any, ...]) -> CapturedStep:
    """The step of a Graph for such arguments, which are what one rank passes.

    It is captured without the Graph's pipeline stages, which are layouts' to have.  Raises what ``graph.compile`` does.
    """
    settings = graph.config.settings
    clear_stages(graph.config)
    with graph.prepared_call(f"tuning of {graph.name}", example, {}) as prepared:
        call, program = prepared.call, prepared.program
        step, placed = prepare_for_passes(call, program.captured)
        batch = [leaf for leaf in call.inputs.tensors if leaf.shape and any(sbp is S(0) for sbp in leaf.nd)]
        rows = next((leaf.shape[0] for leaf in batch if leaf.shape), 1)
        modules = prepared.source.modules
    names = {
        attribute: tuple(
            name
            for name, _ in itertools.chain(
                module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
            )
        )
        for attribute, module in modules.items()
    }
    own = replace(call.settings, stages=settings.stages, auto_stages=settings.auto_stages)
    resolve_marks(settings.stages, modules)  # raises what no layout could answer
    return CapturedStep(program.captured, placed, step, own, rows, names, modules)


def with_rows(example: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """The arguments with another number of rows: those of the example, over and over.

    What has as many rows as the first tensor with dims is part of the batch; anything else stays.  Raises ConfigError
    where no tensor has rows.
    """
    tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise ConfigError("--batch needs a tensor with rows among the example arguments, and there is none")
    had = tensors[0].shape[0]

    def other(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != had:
            return x
        return x[torch.arange(rows, device=x.device) % had] if had else x.new_zeros(rows, *x.shape[1:])

    return pytree.tree_map(other, example)  # type: ignore[no-any-return]
