"""A traced graph without writes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.capture.problems import problem
from graphzero.capture.rewrite.inplace_to_pure import rewrite_inplace_ops

_WRITE_HINT = "Write the line without an in-place op: x = x.mul(2) in place of x.mul_(2)"


def functionalize_writes(
    module: fx.GraphModule, inputs: list[Any], table: dict[Any, Callable[..., Any]], mode: _compat.FakeTensorMode
) -> fx.GraphModule:
    """The same graph without writes in place: a written value becomes a new one, which later readers read."""
    writes = [node for node in module.graph.nodes if _writes(node)]
    if rewrite_inplace_ops(module.graph, writes, table, mode):
        return module
    for node in module.graph.nodes:
        node.meta = {"custom": node.meta["custom"]} if "custom" in node.meta else {}
    constants = _constants_as_inputs(module)
    run = fx.Interpreter(module).run
    of_real = mode.fake_tensor_converter.from_real_tensor
    fakes = [x if isinstance(x, _compat.FakeTensor) else of_real(mode, x) for x in constants.values()]
    with torch.no_grad():  # the backward is in the graph already
        pure = torch.func.functionalize(lambda *values: run(*values), remove="mutations")
        traced = _compat.make_fx(pure, table)(*inputs, *fakes)
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            traced.graph.erase_node(node)
    _inputs_as_constants(traced, constants)
    for node in traced.graph.nodes:
        if _writes(node):
            source = node.meta.get("custom", {}).get("source", "")
            raise problem(f"{node.target} writes in place to memory that a graph cannot follow", _WRITE_HINT, [source])
    return traced


def _constants_as_inputs(module: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that the graph closes over become its last inputs; else functionalize would not see what is made of them
    alone, and leave writes to that as they are."""
    graph, constants = module.graph, {}
    placeholders = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in list(graph.find_nodes(op="get_attr")):
        name, constant = str(node.target), getattr(module, str(node.target))
        if not isinstance(constant, Tensor):
            continue
        if name not in constants:
            constants[name] = constant
            with graph.inserting_after(last):
                last = placeholders[name] = graph.placeholder(name)
        node.replace_all_uses_with(placeholders[name])
        graph.erase_node(node)
    module.recompile()
    return constants


def _inputs_as_constants(module: fx.GraphModule, constants: dict[str, Tensor]) -> None:
    graph = module.graph
    for (name, tensor), node in zip(
        reversed(constants.items()), reversed(graph.find_nodes(op="placeholder")), strict=False
    ):
        setattr(module, f"given{name}", tensor)
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", f"given{name}")
        node.replace_all_uses_with(constant)
        graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
