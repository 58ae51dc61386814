"""The pipeline stage that computes each value of a step, from the marks of modules; ``AssignStages`` writes it down."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name, is_view
from graphzero.ir.graph import StepGraph
from graphzero.ops import PIN
from graphzero.passes.stages.stage_marks import StageMarks

aten = torch.ops.aten
FREE = -1  # the stage of what depends on parameters that are not marked, until their readers decide it


class ValueStages:
    """The stage of each value of a step, as ``AssignStages`` describes it.

    stages: of each node; None for what each stage computes for itself.

    gradients: the values of backward that depend on a gradient, or that a module's mark has placed.
    recomputed: see ``_recomputed_values``.
    """

    def __init__(self, graph: StepGraph, marks: StageMarks) -> None:
        self.graph, self.marks = graph, marks
        self.stages: dict[fx.Node, int | None] = {}
        self.gradients: set[fx.Node] = set()
        self.needed: dict[fx.Node, int] = {}
        self.wanted: dict[fx.Node, set[int]] = {}
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.recomputed = _recomputed_values(self.nodes)
        self.params = {node.meta["role"].of: node for node in graph.placeholders("param")}
        self._assign()

    def _assign(self) -> None:
        for node in self.graph.placeholders():
            self.stages[node] = self._placeholder_stage(node)
        computed = [node for node in self.nodes if node.op != "placeholder"]
        forward = [node for node in computed if value.phase_of(node) == "forward"]
        for node in forward:
            self.stages[node] = self._stage_of(node, self._forward_stage)
        self._settle_free(forward)
        backward = [node for node in computed if value.phase_of(node) == "backward"]
        self.needed = self._needed_stages(backward)
        for node in backward:
            if node in self.recomputed:
                self.stages[node] = self.stages[self.recomputed[node]]
                continue
            if self._marked_stage(node) is not None or self.gradients & {*node.all_input_nodes}:
                self.gradients.add(node)
            self.stages[node] = self._stage_of(node, self._backward_stage)
        self._settle_saved(backward)
        self._settle_spread(backward)
        self._assign_update([node for node in computed if value.phase_of(node) == "update"])

    def _placeholder_stage(self, node: fx.Node) -> int | None:
        role = value.role_of(node)
        kind = role.kind if role is not None else ""
        if kind == "param" or (kind == "buffer" and node.name in self.graph.updates):
            marked = self.marks.stage_of(value.module_of(node))
            return FREE if marked is None else min([marked, *self._reading_marks(node)])
        return None  # of a state, when its parameter's is known

    def _reading_marks(self, param: fx.Node) -> list[int]:
        """The stages of the marked modules whose forward reads a parameter: of a tied one, others than its own."""
        uses = [user for user in param.users if value.phase_of(user) == "forward"]
        readers = [reader for use in uses for reader in (use.users if use.target is ops.use else (use,))]
        forward = (reader for reader in readers if value.phase_of(reader) == "forward")
        return _known(self.marks.stage_of(value.module_of(reader)) for reader in forward)

    def _marked_stage(self, node: fx.Node) -> int | None:
        """The mark of an op of backward: of the gradient of a tied parameter, where that lives."""
        marked = self.marks.stage_of(value.module_of(node))
        param = self.params.get(node.meta["role"].of) if value.has_role(node, "gradient") else None
        return marked if marked is None or param is None else self.stages[param]

    def _operand_stages(self, nodes: Iterable[fx.Node]) -> list[int]:
        return _known(self.stages[x] for x in nodes)

    def _stage_of(self, node: fx.Node, decide: Callable[[fx.Node], int]) -> int | None:
        """The stage of an op: as ``decide`` says, but of what follows its operand, and of what reads nothing of one."""
        if not self._operand_stages(node.all_input_nodes):
            return None
        return self.stages[node.all_input_nodes[0]] if self._follows(node) else decide(node)

    def _follows(self, node: fx.Node) -> bool:
        """Whether a node is where its operand is: a name of it, or one of its results."""
        return is_name(node.target) or value.is_multi(node.all_input_nodes[0]) if node.all_input_nodes else False

    def _forward_stage(self, node: fx.Node) -> int:
        last = max(self._operand_stages(node.all_input_nodes))
        marked = self.marks.stage_of(value.module_of(node))
        if marked is None:
            return last  # FREE where that is all it reads
        if last > marked:
            raise self._wrong_way(node, marked, last, "a value of forward")
        return marked

    def _settle_free(self, forward: list[fx.Node]) -> None:
        """Decide what depends on unmarked parameters alone: the first stage that reads it."""
        for node in reversed([*self.graph.placeholders("param", "buffer"), *forward]):
            if self.stages[node] == FREE:
                read_by = _known(self.stages.get(user) for user in node.users)
                is_of_update = node.op == "placeholder" and not read_by
                self.stages[node] = None if is_of_update else min((x for x in read_by if x != FREE), default=0)

    def _backward_stage(self, node: fx.Node) -> int:
        operands = node.all_input_nodes
        gradients = [x for x in operands if x in self.gradients]
        first = min(self._operand_stages(gradients), default=None)
        marked = self._marked_stage(node)
        if marked is not None:
            if first is not None and first < marked:
                if node.target is aten.add.Tensor and len(gradients) == 2:  # of a value that an earlier stage reads too
                    return first
                raise self._wrong_way(node, marked, first, "a gradient")
            return marked
        saved = self._operand_stages(x for x in operands if x not in self.gradients)
        stage = min(_known((max(saved, default=None), first)))
        return max(stage, self.needed.get(node, stage))

    def _needed_stages(self, backward: list[fx.Node]) -> dict[fx.Node, int]:
        """For what no mark places: the last stage of the marked values of backward that it leads to."""
        needed: dict[fx.Node, int] = {}
        for node in reversed(backward):
            marked = self._marked_stage(node)
            stage = needed.get(node) if marked is None else marked
            if stage is not None:
                for x in node.all_input_nodes:
                    needed[x] = max(stage, needed.get(x, stage))
        return needed

    def _settle_saved(self, backward: list[fx.Node]) -> None:
        """Compute what backward makes of values of forward alone, as their transposes, where it is read first."""
        for node in reversed(backward):
            stage, is_saved = self.stages[node], node not in self.gradients and node not in self.recomputed
            if is_saved and stage is not None and node.target is not ops.use:
                first = min(_known(self.stages.get(user) for user in node.users), default=stage)
                self.stages[node] = max(stage, first)
        for node in backward:
            if self._follows(node):
                self.stages[node] = self.stages[node.all_input_nodes[0]]

    def _settle_spread(self, backward: list[fx.Node]) -> None:
        """Compute what spreads a value of backward over more elements, as the gradient of a slice or of one of several
        pieces, where it is read.

        Not what is added to the gradient of a parameter, which is moved once a step.
        """
        shares = {*self.gradient_shares()}
        for node in reversed(backward):
            stage, read_by = self.stages[node], [self.stages.get(user) for user in node.users]
            if stage is not None and node not in shares and node not in self.recomputed and self._spreads(node):
                last = max((stage if reader is None else reader for reader in read_by), default=stage)
                self.stages[node] = min(stage, last)

    def _spreads(self, node: fx.Node) -> bool:
        """Whether a value has more bytes than the one value of backward on a stage that it is made of."""
        nodes = [node, *(x for x in node.all_input_nodes if self.stages[x] is not None)]
        if len(nodes) != 2 or not all(map(value.is_tensor, nodes)) or value.phase_of(nodes[1]) != "backward":
            return False
        return value.tensor_type(node).nbytes > value.tensor_type(nodes[1]).nbytes

    def _assign_update(self, update: list[fx.Node]) -> None:
        """Decide for the update, and for states whose parameter is not known: again for those that are found on the
        way to live on a stage."""
        for node in self.graph.placeholders("state"):
            param = self.params.get(node.meta["role"].of)
            self.stages[node] = self.stages[param] if param is not None else None
        placeholders = {node.name: node for node in self.graph.placeholders()}
        while True:
            self.wanted = self._wanted_stages(update, placeholders)
            for node in update:
                self.stages[node] = self._stage_of(node, self._update_stage)
            changed = False
            for name, new in self.graph.updates.items():
                if self.stages[placeholders[name]] is None and self.stages[new] is not None:
                    self.stages[placeholders[name]], changed = self.stages[new], True
            if not changed:
                return

    def _wanted_stages(self, update: list[fx.Node], placeholders: dict[str, fx.Node]) -> dict[fx.Node, set[int]]:
        """The stages of what an op of the update leads to."""
        wanted: dict[fx.Node, set[int]] = {}
        for name, new in self.graph.updates.items():
            stage = self.stages[placeholders[name]]
            if stage is not None:
                wanted.setdefault(new, set()).add(stage)
        for node in reversed(update):
            for operand in node.all_input_nodes:
                wanted.setdefault(operand, set()).update(wanted.get(node, ()))
        return wanted

    def _update_stage(self, node: fx.Node) -> int:
        wanted = self.wanted.get(node, set())
        return next(iter(wanted)) if len(wanted) == 1 else max(self._operand_stages(node.all_input_nodes))

    def gradient_shares(self) -> list[fx.Node]:
        """The summands of a parameter's gradient that are computed on another stage than the sum."""
        shares: list[fx.Node] = []
        sums = [node for node in self.nodes if (role := value.role_of(node)) is not None and role.kind == "gradient"]
        while sums:
            total = sums.pop()
            if total.target is PIN:
                sums.append(value.operand(total))
            elif total.target is aten.add.Tensor:
                for x in total.all_input_nodes:
                    if len(x.users) == 1 and value.phase_of(x) == "backward":
                        sums.append(x)
                        shares += [x] if self.stages[x] != self.stages[total] else []
        return shares

    def check_work(self) -> None:
        """Raise ConfigError for a stage on which nothing of forward runs."""
        working = {self.stages[node] for node in self.nodes if node.op != "placeholder"}
        for stage in range(self.marks.count):
            if stage not in working:
                marked = ", ".join(".".join(pattern) for pattern, at in self.marks.marks if at == stage) or "nothing"
                raise ConfigError(
                    f"stage {stage} of {self.marks.count} has no work: {marked} is marked for it, and no op of the "
                    "step runs there\n  Mark modules that build calls, by their paths: "
                    f"{', '.join(list(dict.fromkeys(map(value.module_of, self.nodes)))[1:5])}"
                )

    def _wrong_way(self, node: fx.Node, marked: int, other: int, what: str) -> ConfigError:
        way = "later" if other > marked else "earlier"
        source = value.source_of(node)
        return ConfigError(
            f"'{node.name}' of module {value.module_of(node)}{f' ({source})' if source else ''} is marked for stage "
            f"{marked} and reads {what} of the {way} stage {other}\n  Values of forward go to later stages, and "
            "gradients to earlier ones: mark modules in the order in which build calls them, config.set_stage(...)"
        )


def _known(stages: Iterable[int | None]) -> list[int]:
    return [stage for stage in stages if stage is not None]


def _recomputed_values(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Value that backward computes again, as ``torch.utils.checkpoint`` has it -> the same value of forward.

    It is made by the same op of the same operands.
    A view of what forward has computed is not among them, as backward makes views for itself; one of a value that is
    computed again is.  What has no operands, as a range, has no stage.
    """
    by_call: dict[tuple[object, str], fx.Node] = {}  # of forward
    equal: dict[fx.Node, fx.Node] = {}  # values of backward, those that are not recomputed among them
    recomputed: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        phase, operands = value.phase_of(node), node.all_input_nodes
        if phase not in ("forward", "backward"):
            continue
        key = node.target, repr(fx.map_arg((node.args, node.kwargs), lambda x: equal.get(x, x)))
        if phase == "forward":
            by_call.setdefault(key, node)
        elif key in by_call:
            equal[node] = by_call[key]
            is_computed = any(x in recomputed for x in operands) or (operands and not is_view(node.target))
            if is_computed and not value.has_role(node, "gradient"):
                recomputed[node] = by_call[key]
    return recomputed
