"""FuseAdam: the chain of elementwise ops that steps a parameter by Adam becomes the one kernel that does the same.

A chain is known by its text below: ops, order and constants must be the same, only what goes in may be anything.  So
a user's own optimizer that steps as Adam does is fused too, and what differs in one op stays as it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.ops import ADAM, ADAM_ROUNDED, STOCHASTIC_ROUND
from graphzero.passes.base import BuiltinPass

CHAIN = """
graph adam(dp=1) local
  param      = batch()  : f32[2]  B
  grad       = batch()  : f32[2]  B
  exp_avg    = batch()  : f32[2]  B
  exp_avg_sq = batch()  : f32[2]  B
  step       = batch()  : f64[]   B
  lr         = scalar() : float
  beta1      = scalar() : float
  beta2      = scalar() : float
  eps        = scalar() : float
update:
  keep1     = operator.sub(1.0, beta1)                                  : float
  new_avg   = lerp.Scalar(exp_avg, grad, keep1)                         : f32[2]  B
  decayed   = mul(exp_avg_sq, beta2)                                    : f32[2]  B
  keep2     = operator.sub(1.0, beta2)                                  : float
  new_sq    = addcmul(decayed, grad, grad, value=keep2)                 : f32[2]  B
  power1    = pow.Scalar(beta1, step)                                   : f64[]   B
  bias1     = rsub.Scalar(power1, 1)                                    : f64[]   B
  power2    = pow.Scalar(beta2, step)                                   : f64[]   B
  bias2     = rsub.Scalar(power2, 1)                                    : f64[]   B
  inverse1  = reciprocal(bias1)                                         : f64[]   B
  size      = mul(inverse1, lr)                                         : f64[]   B
  downhill  = neg(size)                                                 : f64[]   B
  root_bias = sqrt(bias2)                                               : f64[]   B
  root      = sqrt(new_sq)                                              : f32[2]  B
  scale     = mul(root_bias, downhill)                                  : f64[]   B
  scaled    = div(root, scale)                                          : f32[2]  B
  inverse   = reciprocal(downhill)                                      : f64[]   B
  shift     = mul(inverse, eps)                                         : f64[]   B
  divisor   = add(scaled, shift)                                        : f32[2]  B
  new_param = addcdiv(param, new_avg, divisor)                          : f32[2]  B
  return new_param, new_avg, new_sq
"""
DECAY = """
graph decay(dp=1) local
  param        = batch()  : f32[2]  B
  lr           = scalar() : float
  weight_decay = scalar() : float
update:
  share        = operator.mul(lr, weight_decay) : float
  kept         = operator.sub(1.0, share)       : float
  decayed      = mul(param, kept)               : f32[2]  B
  return decayed
"""
FUSED = (torch.float32, torch.float64)
_CAST = torch.ops.aten._to_copy.default
_parse_pattern = cache(parse)


@dataclass(frozen=True)
class FuseAdam(BuiltinPass):
    """Replaces the chain of ops of Adam by one kernel; changes no value beyond rounding.

    Where parameter and moments are cast for it, and all results are rounded stochastically, the kernel does that too.

    Requires: the chain of ops that torch's Adam is traced to; its operands may be anything.
    Ensures: the same new states, except for rounding.

    Example::

        fuse_adam

         graph adam(dp=2) local
           w = param() : f32[8]  B
           g = batch() : f32[8]  B
           m = state(w, m) : f32[8]  B
           v = state(w, v) : f32[8]  B
           n = state(w, n) : f64[]  B
           lr = hyper(o, lr) : float
           beta1 = hyper(o, beta1) : float
           beta2 = hyper(o, beta2) : float
           eps = hyper(o, eps) : float
         update:
        -  k1 = operator.sub(1.0, beta1) : float
        -  m1 = lerp.Scalar(m, g, k1) : f32[8]  B
        -  d = mul(v, beta2) : f32[8]  B
        -  k2 = operator.sub(1.0, beta2) : float
        -  v1 = addcmul(d, g, g, value=k2) : f32[8]  B
        -  p1 = pow.Scalar(beta1, n) : f64[]  B
        -  b1 = rsub.Scalar(p1, 1) : f64[]  B
        -  p2 = pow.Scalar(beta2, n) : f64[]  B
        -  b2 = rsub.Scalar(p2, 1) : f64[]  B
        -  i1 = reciprocal(b1) : f64[]  B
        -  s1 = mul(i1, lr) : f64[]  B
        -  s2 = neg(s1) : f64[]  B
        -  r2 = sqrt(b2) : f64[]  B
        -  r = sqrt(v1) : f32[8]  B
        -  s3 = mul(r2, s2) : f64[]  B
        -  q = div(r, s3) : f32[8]  B
        -  i2 = reciprocal(s2) : f64[]  B
        -  s4 = mul(i2, eps) : f64[]  B
        -  q1 = add(q, s4) : f32[8]  B
        -  w1 = addcdiv(w, m1, q1) : f32[8]  B
        -  return update(w=w1, m=m1, v=v1)
        +  adam = adam([w], [g], [m], [v], [], [n], lr, beta1, beta2, eps, 0.0) : (f32[8]  B, f32[8]  B, f32[8]  B)
        +  getitem = adam[0] : f32[8]  B
        +  getitem_1 = adam[1] : f32[8]  B
        +  getitem_2 = adam[2] : f32[8]  B
        +  return update(w=getitem, m=getitem_1, v=getitem_2)
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        last, position = _parse_pattern(CHAIN).outputs[0], liveness(graph).position
        instead: dict[fx.Node, fx.Node] = {}
        chains: list[fx.Node] = []
        for node in position:
            matched: dict[str, Any] = {}
            if (
                node.target is last.target
                and _matches_pattern(last, node, matched)
                and _may_fuse(node, matched, position)
            ):
                chains += _fuse(graph, node, matched, instead)
        graph.hand_out(instead)
        for node in reversed(chains):
            if not node.users:
                graph.graph.erase_node(node)
        _round_at_once(graph)
        _pick_at_once(graph)
        return graph


def _pick_at_once(graph: StepGraph) -> None:
    """Put an update's results right after it, those of an update that was captured as one op too.

    A gather that was between them could not arrive where the parameter was: the update's storage would still be read.
    """
    for target in (ADAM, ADAM_ROUNDED):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            for pick in reversed(list(node.users)):
                node.append(pick)


# ---- what is kept in bfloat16


def _round_at_once(graph: StepGraph) -> None:
    """Let an update of what is cast for it, and whose results are rounded stochastically, do both itself."""
    instead: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.find_nodes(op="call_function", target=ADAM):
        operands = [x for at in (0, 2, 3, 4) for x in node.args[at]]
        results = _rounded_results(node, len(operands))
        if results and all(_is_cast_for(x, node) for x in operands):
            _round_inside(graph, node, operands, results, instead)
    graph.hand_out(instead)
    for old in instead:
        _erase_with_operands(graph, old)


def _rounded_results(node: fx.Node, count: int) -> list[fx.Node]:
    """The rounding of each result of an update, if nothing else reads the result."""
    picks = {user.args[1]: list(user.users) for user in node.users}
    readers = [reader for i in range(count) for reader in picks.get(i, ())]
    alone = len(readers) == count == len(picks) and all(reader.target is STOCHASTIC_ROUND for reader in readers)
    return readers if alone and len({(x.args[1], str(x.args[3:])) for x in readers}) == 1 else []


def _is_cast_for(x: fx.Node, node: fx.Node) -> bool:
    plain = x.target is _CAST and x.kwargs.keys() == {"dtype"} and set(x.users) == {node}
    return plain and value.tensor_type(value.operand(x)).dtype is torch.bfloat16


def _round_inside(
    graph: StepGraph, node: fx.Node, states: list[fx.Node], results: list[fx.Node], instead: dict[fx.Node, fx.Node]
) -> None:
    _, key, _, start, total = results[0].args
    lists = [[x.args[0] if x in states else x for x in group] for group in node.args[:6]]  # type: ignore[union-attr]
    rounding = {"numbers": [x.args[2] for x in results], "start": start, "total": total}
    types, nds = tuple(map(value.type_of, results)), tuple(map(value.nd_of, results))
    with graph.graph.inserting_before(node):
        args = (*lists, *node.args[6:], key)
        fused = graph.call(
            ADAM_ROUNDED, args, types, sbp=nds, kwargs={**rounding, **node.kwargs}, like=node, name="adam"
        )
        for i, old in enumerate(results):
            result = graph.call(operator.getitem, (fused, i), types[i], sbp=nds[i], like=old)
            old.replace_all_uses_with(result, delete_user_cb=lambda user: user.op != "output")
            instead[old] = result


def _erase_with_operands(graph: StepGraph, node: fx.Node) -> None:
    """Take out what nothing reads, and what was there for it alone."""
    if node.users or node.op == "placeholder":
        return
    operands = node.all_input_nodes
    graph.graph.erase_node(node)
    for operand in operands:
        if operand.target in (operator.getitem, ADAM, _CAST):
            _erase_with_operands(graph, operand)


def _may_fuse(node: fx.Node, matched: dict[str, Any], position: dict[fx.Node, int]) -> bool:
    """Return whether all are tensors of one form that the kernel takes, and each result is needed only after the last
    is made."""
    tensors = [matched[name] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    if any(not value.is_tensor(x) for x in (*tensors, matched["step"])):
        return False
    forms = {(value.type_of(x), value.sbp_of(x)) for x in (*tensors, node, matched["new_avg"], matched["new_sq"])}
    is_plain = value.tensor_type(matched["step"]).shape == () and value.tensor_type(node).shape != ()
    if len(forms) > 1 or value.tensor_type(node).dtype not in FUSED or not is_plain:
        return False
    chain = set(_chain_nodes(matched))
    others = [user for name in ("new_avg", "new_sq") for user in matched[name].users if user not in chain]
    return all(position.get(user, -1) > position[node] for user in others)


def _chain_nodes(matched: dict[str, Any]) -> list[fx.Node]:
    """The nodes of the matched chain, in order."""
    return [matched[node.name] for node in _parse_pattern(CHAIN).nodes if node.op == "call_function"]


def _fuse(graph: StepGraph, node: fx.Node, matched: dict[str, Any], instead: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Write the kernel's call; returns what it takes the place of, in order.  ``instead`` gets what to hand out."""
    param, decay = matched["param"], 0.0
    before: dict[str, Any] = {"lr": matched["lr"]}
    if _matches_pattern(_parse_pattern(DECAY).outputs[0], param, before) and set(param.users) == {node}:
        param, decay = before["param"], before["weight_decay"]
    numbers = (matched["lr"], matched["beta1"], matched["beta2"], matched["eps"], decay)
    lists = [[param], [matched["grad"]], [matched["exp_avg"]], [matched["exp_avg_sq"]], [], [matched["step"]]]
    type_, nd = value.tensor_type(node), value.nd_of(node)
    chain = _chain_nodes(matched)
    with graph.graph.inserting_before(node):
        fused = graph.call(ADAM, (*lists, *numbers), (type_,) * 3, sbp=(nd,) * 3, like=node, name="adam")
        for i, old in enumerate((node, matched["new_avg"], matched["new_sq"])):
            result = graph.call(operator.getitem, (fused, i), type_, sbp=nd, like=old)
            old.replace_all_uses_with(result, delete_user_cb=lambda user: user.op != "output" and user not in chain)
            instead[old] = result
    return chain if param is matched["param"] else [matched["param"], *chain]


# ---- what is known by its text


def _matches_pattern(pattern: Any, given: Any, matched: dict[str, Any]) -> bool:
    """Return whether ``given`` is computed as ``pattern`` is; ``matched`` gets what stands for each of its values."""
    if not isinstance(pattern, fx.Node):
        if isinstance(pattern, (list, tuple)) and isinstance(given, (list, tuple)):
            return len(pattern) == len(given) and all(map(_matches_pattern, pattern, given, [matched] * len(given)))
        return type(pattern) is type(given) and pattern == given
    if pattern.name in matched:
        return bool(
            matched[pattern.name] is given or (not isinstance(given, fx.Node) and matched[pattern.name] == given)
        )
    matched[pattern.name] = given
    if pattern.op == "placeholder":
        return True
    if not isinstance(given, fx.Node) or given.target is not pattern.target:
        return False
    if len(given.args) != len(pattern.args) or given.kwargs.keys() != pattern.kwargs.keys():
        return False
    pairs = [
        *zip(pattern.args, given.args, strict=True),
        *((x, given.kwargs[name]) for name, x in pattern.kwargs.items()),
    ]
    return all(_matches_pattern(*pair, matched) for pair in pairs)
