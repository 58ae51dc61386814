"""A traced optimizer step without Python objects: ops and constants only."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero import _compat
from graphzero.capture.problems import problem


def pure_module(module: fx.GraphModule) -> fx.GraphModule:
    """Without writes into inputs, which are results too, and without tensors that it holds."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            module.graph.erase_node(node)
        elif node.op == "get_attr":
            _write_out(module, node)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise problem(
                f"an optimizer's step draws random numbers ({node.target}), which would differ between ranks",
                "draw them before the first step, into optimizer.state, or in build",
            )
    return module


def _write_out(module: fx.GraphModule, node: fx.Node) -> None:
    """A tensor that step makes of Python numbers, as torch.tensor(0.0), becomes an op that makes it."""
    attribute: Any = getattr(module, str(node.target))
    tensor = attribute.constant if isinstance(attribute, _compat.FakeTensor) else attribute
    if tensor is None or tensor.numel() != 1:
        raise problem(
            f"an optimizer's step reads a tensor of shape {list(attribute.shape)} that is neither state nor parameter",
            "keep it in optimizer.state, or write it as numbers",
        )
    with module.graph.inserting_before(node):
        full = module.graph.call_function(
            torch.ops.aten.full.default, (list(attribute.shape), tensor.item()), {"dtype": attribute.dtype}
        )
    full.meta = dict(node.meta, val=attribute)
    node.replace_all_uses_with(full)
    module.graph.erase_node(node)
