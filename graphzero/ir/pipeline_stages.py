"""Pipeline stages: on which stage of a pipeline each value of a program lives.

A placeholder says its stage in ``node.meta["stage"]``; the result of a ``move`` lives where it was moved to.  All
other values live where their operands do, and the operands of one op live on one stage.  So a pass that adds ops need
not say on which stage they are.  What depends on no placeholder of a stage, as masks and sizes of the batch, has no
stage: each stage that reads it computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from graphzero.ir import value
from graphzero.ops import MOVE

Stages = Mapping[fx.Node, int | None]


def is_staged(nodes: Iterable[fx.Node]) -> bool:
    """Whether any value of a program lives on a stage."""
    return any("stage" in node.meta for node in nodes)


def home_stage(node: fx.Node) -> int | None:
    """The stage whose ranks alone keep a parameter, buffer or state; None where all do: scalars, and those of no stage.

    So each rank can count steps and read the loss scale.
    """
    stage: int | None = node.meta.get("stage")
    return stage if value.tensor_type(node).shape else None


def is_of_params(node: fx.Node) -> bool:
    """Whether a value is a parameter, or computed of parameters alone."""
    return all(
        value.has_role(x, "param") if x.op == "placeholder" else x.all_input_nodes for x in value.ancestors(node)
    )


def stages_of(nodes: Iterable[fx.Node]) -> Stages:
    """Node -> its stage, None where it has none; of an op whose operands live on several stages the last of them."""
    known: dict[fx.Node, int | None] = {}
    for node in nodes:
        known[node] = None if node.op == "output" else stage_of(node, known)
    return known


def stage_of(node: fx.Node, known: Stages) -> int | None:
    """The stage of a node whose operands' are known."""
    if node.op == "placeholder":
        stage: int | None = node.meta.get("stage")
        return stage
    if node.target is MOVE:
        return node.args[1]  # type: ignore[return-value]
    return max((stage for x in node.all_input_nodes if (stage := known[x]) is not None), default=None)
