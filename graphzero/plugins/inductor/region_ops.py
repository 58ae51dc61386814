"""A program in which every region is one op of several results, so that the runtime handles it as any other op."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.aliases import is_name, is_view
from graphzero.ir.graph import StepGraph
from graphzero.plugins.inductor.regions import Region, form, work
from graphzero.runtime.execute.region_compiler import RegionOp

SHOWN = 5  # ops in the description of a region


class InductorRegion(RegionOp):
    """A joined op of a program; ``region`` consists of nodes of the program from which it was made."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region

    def __str__(self) -> str:
        nodes = self.region.nodes
        ops = dict.fromkeys(
            node.target._opname
            for node in nodes
            if isinstance(node.target, torch._ops.OpOverload) and not is_view(node.target)
        )
        shown = ", ".join([*ops][:SHOWN]) + (" ..." if len(ops) > SHOWN else "")
        source = next(filter(None, map(value.source_of, nodes)), "")
        return f"region of {len(nodes)} lines from '{nodes[0].name}' ({shown})" + (f", {source}" if source else "")


def join(graph: StepGraph) -> StepGraph:
    """The program with regions for ops."""
    joined = StepGraph(graph.name, graph.placement, fx.Graph(), graph.level)
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.placeholders():
        of[node] = joined.graph.node_copy(node)
    for item in form(graph):
        if isinstance(item, Region):
            _add(joined, item, of)
        else:
            of[item] = joined.graph.node_copy(item, of.__getitem__)
    joined.graph.output(fx.node.map_arg(graph.output.args[0], of.__getitem__))
    return joined


def _add(graph: StepGraph, region: Region, of: dict[fx.Node, fx.Node]) -> None:
    """Add one op, the nodes that select its results, and their aliases."""
    main = max(region.nodes, key=work)
    types, nds = zip(*((value.tensor_type(x), value.nd_of(x)) for x in region.results), strict=True)
    inputs = tuple(of[x] for x in region.inputs)
    call = graph.call(InductorRegion(region), inputs, types, sbp=nds, like=main, name="region")
    for i, result in enumerate(region.results):
        of[result] = graph.graph.create_node("call_function", getitem, (call, i), name=result.name)
        of[result].meta = dict(result.meta)
    members = set(region.nodes)
    for node in region.nodes:
        if is_name(node.target) and any(user not in members for user in node.users):
            of[node] = graph.graph.node_copy(node, of.__getitem__)
