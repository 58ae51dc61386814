"""CastBeforeGather: a parameter that is read in 16 bit is cast where it lies; what is gathered of it is the cast."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_narrowing
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.passes.base import BuiltinPass

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class CastBeforeGather(BuiltinPass):
    """Moves casts of parameters before their uses, so that half of the bytes are sent.

    A cast computes each element by itself, so it changes no value.  What reads the parameter as it is goes on doing so.

    Requires: pins on uses; casts of a use to a smaller dtype, and to nothing else.
    Ensures: a 16-bit use reads the parameter's cast, with the same pins.

    Example::

        cast_before_gather

         graph step(dp=2) captured
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  S(0)!
         forward:
        -  wf = use(w) : f32[4, 2]  B!
        -  c = _to_copy(wf, dtype=torch.bfloat16) : bf16[4, 2]
        +  w_narrow = _to_copy(w, dtype=torch.bfloat16) : bf16[4, 2]  ; param(w)
        +  wf = use(w_narrow) : bf16[4, 2]  B!
           xc = _to_copy(x, dtype=torch.bfloat16) : bf16[8, 4]
        -  y = mm(xc, c) : bf16[8, 2]
        +  y = mm(xc, wf) : bf16[8, 2]
           return y
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for use in [node for node in graph.nodes if node.target is ops.use]:
            casts: dict[torch.dtype, list[fx.Node]] = defaultdict(list)
            for user in use.users:
                if is_narrowing(user):
                    casts[value.tensor_type(user).dtype].append(user)
            for same in casts.values():
                _cast_first(graph, use, same)
        return graph


def _cast_first(graph: StepGraph, use: fx.Node, casts: list[fx.Node]) -> None:
    """One cast of the parameter and one use of it, instead of ``casts`` of ``use``."""
    param, cast = use.args[0], casts[0]
    assert isinstance(param, fx.Node)
    role = value.role_of(param)
    type_ = value.tensor_type(cast)
    with graph.graph.inserting_before(use):
        new_cast = graph.call(_CAST, (param,), type_, kwargs=dict(cast.kwargs), like=use, name=f"{param.name}_narrow")
        new_cast.meta["role"] = Role("param", role.of) if role is not None else None
        narrow_use = use
        if set(use.users) != set(casts):
            narrow_use = graph.call(ops.use, (new_cast,), type_, sbp=value.sbp_of(use), like=use, name=use.name)
            narrow_use.meta["pins"] = value.pins_of(use)
    for old_cast in casts:
        old_cast.replace_all_uses_with(narrow_use)
        graph.graph.erase_node(old_cast)
    narrow_use.args = (new_cast,)
    narrow_use.meta["type"] = type_
