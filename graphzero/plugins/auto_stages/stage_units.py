"""Units of a step that may be on different stages: modules in the order in which build calls them.

They are found in the captured graph, of whose ops each knows its module: an entry of a list of blocks,
``model.layers.3``, is one unit with all that is in it; outside of such lists each module with parameters is one, what
is before and after the blocks.  What has no parameters, a mask or a dropout, is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import fx, nn

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.plan.seconds import READS_PLACES

Unit = tuple[str, ...]  # paths of modules that are on one stage


@dataclass(frozen=True)
class StageUnits:
    """Units of a step, in order.

    units: a unit is one module; where an earlier one reads what a later one makes, as layers that build calls twice,
    it is all from the one to the other.
    """

    graph: StepGraph
    units: tuple[Unit, ...]

    @classmethod
    def of_step(cls, graph: StepGraph, count: int, planned: Sequence[str]) -> StageUnits:
        """Units of a captured step: of lists within lists, those of the outermost that are ``count`` units or more.

        planned: modules between which a model's own configuration cuts; of the module around them no other is a unit.
        """
        paths = list(dict.fromkeys(_paths_with_parameters(graph)))
        deepest = max((sum(map(str.isdecimal, path.split("."))) for path in paths), default=0)
        for depth in range(1, max(deepest, 1) + 1):
            names = dict.fromkeys(name for path in paths if (name := _unit_of(path, depth, planned)))
            inner = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
            units = cls(graph, tuple((name,) for name in inner)).with_ties().in_order()
            if len(units.units) >= count:
                break
        return units

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that put each unit on a stage of its own."""
        return tuple(f"{path}@{i}" for i, unit in enumerate(self.units) for path in unit)

    @cached_property
    def unit_of_node(self) -> dict[fx.Node, int | None]:
        """Of each op of forward the unit that computes it: that of its module, or the last of what it reads."""
        marks, units = StageMarks(self.marks), dict[fx.Node, int | None]()
        for node in _forward_ops(self.graph):
            read = [units.get(x) for x in node.all_input_nodes if x not in self.params_of]  # those may be moved
            several = (marks.stage_of(value.module_of(node)), *read)
            units[node] = max((unit for unit in several if unit is not None), default=None)
        return units

    @cached_property
    def params_of(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Of parameters, and of what is made of them alone: the parameters."""
        return _params_of(self.graph)

    def in_order(self) -> StageUnits:
        """The same, with units that read of each other as one."""
        ends = list(range(len(self.units)))  # of each unit, the last one that is with it
        for node, marked in self._marked_ops():
            ends[marked] = max(ends[marked], self.unit_of_node[node] or 0)
        joined: list[Unit] = []
        end = -1
        for i, unit_paths in enumerate(self.units):
            if i <= end:
                joined[-1] = (*joined[-1], *unit_paths)
            else:
                joined.append(unit_paths)
            end = max(end, ends[i])
        return StageUnits(self.graph, tuple(joined))

    def with_ties(self) -> StageUnits:
        """The same, with what reads of others nothing but their parameters, as T5's second embedding, where these are:
        what it makes is moved, and not the weight.
        """
        reading = {
            marked
            for node, marked in self._marked_ops()
            if any(
                self.unit_of_node.get(x) not in (None, marked) for x in node.all_input_nodes if x not in self.params_of
            )
        }
        params, joined = self.read_elements(), dict[int, Unit]()
        for i, unit in enumerate(self.units):
            homes = [home for home in joined if i not in reading and params[i].keys() <= params[home].keys()]
            joined[homes[0] if homes else i] = (*(joined[homes[0]] if homes else ()), *unit)
        return StageUnits(self.graph, tuple(joined.values()))

    def _marked_ops(self) -> Iterator[tuple[fx.Node, int]]:
        """The ops of units' own modules, with the unit."""
        marks = StageMarks(self.marks)
        for node in self.unit_of_node:
            if (marked := marks.stage_of(value.module_of(node))) is not None:
                yield node, marked

    def read_elements(self) -> list[dict[fx.Node, float]]:
        """Of each unit, the parameters that it reads -> how many elements a micro-batch of a rank reads.

        Of a table in which it looks things up these are the rows that it finds, or the whole table.
        """
        placement, read = self.graph.placement, [dict[fx.Node, float]() for _ in self.units]
        rows = prod(placement.hierarchy[placement.axis(name)] for name in placement.batch_axes)
        for node, unit in self.unit_of_node.items():
            if node in self.params_of or not read:  # build calls no module that has parameters
                continue
            for x in node.all_input_nodes:
                for param in self.params_of.get(x, ()):
                    elements = float(value.tensor_type(param).numel)
                    if node.target in READS_PLACES and x is node.args[0]:
                        elements = min(elements, value.tensor_type(node).numel / rows)
                    read[unit or 0][param] = max(elements, read[unit or 0].get(param, 0.0))
        return read


def planned_modules(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Paths of the modules that a transformers configuration names as those that a pipeline is cut between.

    That is its ``base_model_pp_plan``; a list of blocks among them is cut between its entries.
    """
    for attribute, module in modules.items():
        for path, part in module.named_modules(prefix=attribute):
            plan = getattr(getattr(part, "config", None), "base_model_pp_plan", None)
            names = [*plan] if isinstance(plan, Mapping) else []
            if names and all(isinstance(getattr(part, name, None), nn.Module) for name in names):
                yield from (f"{path}.{name}" for name in names)


def _params_of(graph: StepGraph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Parameter, or what is made of parameters alone -> these parameters."""
    params = {node: frozenset([node]) for node in graph.placeholders("param") if not value.is_average(node)}
    for node in _forward_ops(graph):
        if node.all_input_nodes and all(x in params for x in node.all_input_nodes):
            params[node] = frozenset().union(*(params[x] for x in node.all_input_nodes))
    return params


def _forward_ops(graph: StepGraph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and value.phase_of(node) == "forward")


def _paths_with_parameters(graph: StepGraph) -> Iterator[str]:
    """The modules whose ops read parameters, in the order of these ops."""
    params = _params_of(graph)
    for node in _forward_ops(graph):
        path = value.module_of(node)
        if path and node.target is not ops.use and any(x in params for x in node.all_input_nodes):
            yield path


def _unit_of(path: str, depth: int, planned: Sequence[str]) -> str:
    """The unit that a module is in: up to the entry of the list number ``depth``; "" for none."""
    words = path.split(".")
    for name in planned:
        if path == name or path.startswith(f"{name}."):
            length = name.count(".") + 1
            return ".".join(words[: length + 1]) if words[length : length + 1] and words[length].isdecimal() else name
    if any(path.startswith(f"{name.rpartition('.')[0]}.") for name in planned):
        return ""
    entries = [i for i, word in enumerate(words) if word.isdecimal()]
    return ".".join(words[: entries[:depth][-1] + 1]) if entries else path
