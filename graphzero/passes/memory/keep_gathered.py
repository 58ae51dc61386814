"""KeepGathered: what forward gathers of a split parameter stays until backward has read it, and is gathered once.

It changes no value, only bytes on the wire against bytes of memory.  Views of what is gathered, and casts that make it
smaller, stay likewise.  Which parameters are worth it within a memory budget is not decided here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.aliases import is_copy, is_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.passes.base import BuiltinPass, is_pattern


@dataclass(frozen=True)
class KeepGathered(BuiltinPass):
    """Gathers some parameters once a step, not in forward and again in backward.

    keep_gathered: paths of parameters, ``model.head.weight``, or patterns as of a shell, ``model.layers.?.*``; all by
        default.
    Raises ConfigError for a name that no parameter has.

    Requires: gathers that are not in buckets yet.
    Ensures: a parameter that is kept is gathered only in forward; no value changes.

    Example::

        keep_gathered{keep_gathered=(w)}

         graph step(dp=2) local
           x = batch() : f32[8, 4]  S(0)
           w = param() : f32[4, 4]  S(0)
         forward:
           wf = all_gather(w, 0, 'dp') : f32[4, 4]  B  ; param(w)
           y = mm(x, wf) : f32[8, 4]  S(0)
         backward:
        -  wb = all_gather(w, 0, 'dp') : f32[4, 4]  B  ; param(w)
        -  t = t(wb) : f32[4, 4]  B
        +  t = t(wf) : f32[4, 4]  B
           dx = mm(y, t) : f32[8, 4]  S(0)
           return dx
    """

    keep_gathered: tuple[str, ...] = ("*",)

    def __call__(self, graph: StepGraph) -> StepGraph:
        self._check([role.of for node in graph.placeholders("param") if (role := value.role_of(node)) is not None])
        again_by_path = gathered_again(graph)
        for path in self.matching_paths(again_by_path):
            read_first(graph, again_by_path[path])
        return graph

    def matching_paths(self, paths: Iterable[str]) -> list[str]:
        """The paths among ``paths`` that are kept gathered."""
        exact, patterns = set(self.keep_gathered), [name for name in self.keep_gathered if is_pattern(name)]
        return [path for path in paths if path in exact or any(fnmatchcase(path, one) for one in patterns)]

    def _check(self, paths: list[str]) -> None:
        for name in self.keep_gathered:
            if name != "*" and name not in paths and not KeepGathered((name,)).matching_paths(paths):
                shown = ", ".join(paths[:8]) + (" ..." if len(paths) > 8 else "")
                raise ConfigError(f"keep_gathered={name!r}: there is no such parameter; the step reads {shown}")


def read_first(graph: StepGraph, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Let what forward has made of a parameter stand for what is made again: ``pairs`` of ``gathered_again``."""
    gone = {again for _, again in pairs}
    for first, again in pairs:
        again.replace_all_uses_with(first)
    for _, again in reversed(pairs):
        sources = again.all_input_nodes
        graph.graph.erase_node(again)
        for source in sources:
            if source.op == "call_function" and not source.users and source not in gone:  # a cast, of what a rank holds
                graph.graph.erase_node(source)


def gathered_again(graph: StepGraph, by_another: bool = False) -> dict[str, list[tuple[fx.Node, fx.Node]]]:
    """Path of a parameter -> (what forward makes of it, what backward makes again), gathers before what reads them.

    Of a lowered graph before ``bucket``.  by_another: what another micro-batch makes again is listed too, which is not
    this pass's to keep but ``MicroBatches``'.  Only what is gathered or follows from that is listed, in the order in
    which
    backward makes it.
    """
    path: dict[fx.Node, str] = {}  # of parameters and of all that is a move, a view or a cast of one
    like: dict[fx.Node, fx.Node] = {}  # the same in forward, or the node itself
    first: dict[tuple[Any, ...], fx.Node] = {}
    gathered: set[fx.Node] = set()
    pairs: dict[str, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    section = liveness(graph).section
    for node in graph.nodes:
        role = value.role_of(node)
        if node.op == "placeholder" and role is not None and role.kind == "param":
            path[node], like[node] = role.of, node
        source = _source(node)
        if source is None or source not in path:
            continue
        path[node] = path[source]
        key = (
            0 if by_another else section[node][0],
            node.target,
            repr(fx.map_arg((node.args, node.kwargs), lambda operand: like[operand])),
        )
        if value.phase_of(node) == "forward":
            first.setdefault(key, node)
        like[node] = first.get(key, node)
        if node.target in ops.COLLECTIVES or source in gathered:
            gathered.add(node)
            if (by_another or value.phase_of(node) == "backward") and like[node] is not node:
                pairs[path[node]].append((like[node], node))
    return dict(pairs)


def follows_parameter(graph: StepGraph) -> list[fx.Node]:
    """Values gathered from a parameter, and those that follow from one by ops that ``gathered_again`` lists; in
    order."""
    parameters = set(graph.placeholders("param"))
    gathered: dict[fx.Node, bool] = dict.fromkeys(parameters, False)
    for node in graph.nodes:
        source = _source(node)
        if source is not None and source in gathered:
            gathered[node] = gathered[source] or node.target in ops.COLLECTIVES
    return [node for node, is_gathered in gathered.items() if is_gathered]


def _source(node: fx.Node) -> fx.Node | None:
    """The operand that ``node`` moves, views, selects from, or casts to a smaller dtype."""
    operands = node.all_input_nodes
    if node.op != "call_function" or len(operands) != 1:
        return None
    (source,) = operands
    if is_copy(node.target):
        return source if value.tensor_type(node).nbytes <= value.tensor_type(source).nbytes else None
    return source if node.target in ops.MOVES or is_view(node.target) or value.is_multi(source) else None
