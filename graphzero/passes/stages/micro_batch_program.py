"""The program of one micro-batch on some stages: its forward, then its backward, as searches over memory read it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import Stages, stages_of
from graphzero.ir.value import Role
from graphzero.ops import MOVE


def micro_batch_program(graph: StepGraph, stages: Collection[int]) -> StepGraph:
    """Return the program of one micro-batch on ``stages``, of a program on which ``AssignStages`` has put stages.

    What it reads of other stages arrives by their moves, whose operands are ``saved`` placeholders, as is what the
    prologue makes; what it moves to other stages is read by the move alone.  Names are those of ``graph``.
    """
    return _Extraction(graph, stages).extract()


class _Extraction:
    def __init__(self, graph: StepGraph, stages: Collection[int]) -> None:
        self.whole = graph
        self.known: Stages = stages_of(graph.nodes)
        self.is_repeated = any(value.repeats_of(node) for node in graph.nodes)
        body = [node for node in graph.nodes if self._is_in_body(node)]
        own = {node for node in body if self.known[node] in stages}
        own |= {node for node in body if node.target is MOVE and self.known[value.operand(node)] in stages}
        for node in reversed(body):  # what no stage has, as a mask, is computed where it is read
            if self.known[node] is None and any(user in own for user in node.users):
                own.add(node)
        self.nodes = [node for node in body if node in own]
        self.own = own
        self.program = StepGraph(graph.name, graph.placement, fx.Graph(), graph.level)

    def _is_in_body(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        return bool(value.repeats_of(node)) if self.is_repeated else value.phase_of(node) != "update"

    def extract(self) -> StepGraph:
        copies: dict[fx.Node, fx.Node] = {}
        for x in dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in self.own):
            copies[x] = self._placeholder(x)
        graph = self.program.graph
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            copies[node].meta = {key: x for key, x in node.meta.items() if key != "repeat"}
        read_behind = {node.name: copies[node] for node in self.nodes if self._is_read_behind(node)}
        graph.output(((), read_behind, {}))
        return self.program

    def _is_read_behind(self, node: fx.Node) -> bool:
        """Whether the update or the caller reads a value."""
        return any(user.op == "output" or value.phase_of(user) == "update" for user in node.users)

    def _placeholder(self, node: fx.Node) -> fx.Node:
        copy = self.program.graph.create_node("placeholder", node.name, name=node.name)
        copy.meta = {**node.meta, "phase": "input"}
        copy.meta.pop("repeat", None)
        if node.op != "placeholder":
            copy.meta["role"] = Role("saved", node.name)
            if self.known[node] is not None:
                copy.meta["stage"] = self.known[node]
        return copy
