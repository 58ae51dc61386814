"""A parameter's update by Adam: a chain of elementwise ops becomes the one kernel that computes the same.

A chain is known by its text below: ops, order and constants must be the same, only what goes in may be anything.  So
a user's own optimizer that steps as Adam does is fused too, and what differs in one op stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import ADAM
from graphzero.passes.match import matches, read

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


def fuse_adam(graph: StepGraph) -> None:
    """Changes no value beyond rounding."""
    last = read(CHAIN).outputs[0]
    order = {node: i for i, node in enumerate(graph.nodes)}
    instead: dict[fx.Node, fx.Node] = {}
    chains: list[fx.Node] = []
    for node in order:
        found: dict[str, Any] = {}
        if node.target is last.target and matches(last, node, found) and _may_fuse(node, found, order):
            chains += _fuse(graph, node, found, instead)
    graph.hand_out(instead)
    for node in reversed(chains):
        if not node.users:
            graph.graph.erase_node(node)
    _pick_at_once(graph)


def _pick_at_once(graph: StepGraph) -> None:
    """Put an update's results right behind it, those of an update that was captured as one op too.

    A gather that stood between them could not arrive where the parameter was: the update's storage would still be read.
    """
    for node in graph.graph.find_nodes(op="call_function", target=ADAM):
        for pick in reversed(list(node.users)):
            node.append(pick)


def _may_fuse(node: fx.Node, found: dict[str, Any], order: dict[fx.Node, int]) -> bool:
    """Whether all are tensors of one form that the kernel takes, and no one needs a result before the last is made."""
    tensors = [found[name] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    if any(not value.is_tensor(x) for x in (*tensors, found["step"])):
        return False
    forms = {(value.type_of(x), value.sbp_of(x)) for x in (*tensors, node, found["new_avg"], found["new_sq"])}
    whole = value.tensor_type(found["step"]).shape == () and value.tensor_type(node).shape != ()
    if len(forms) > 1 or value.tensor_type(node).dtype not in FUSED or not whole:
        return False
    chain = set(_made(found))
    others = [user for name in ("new_avg", "new_sq") for user in found[name].users if user not in chain]
    return all(order.get(user, -1) > order[node] for user in others)


def _made(found: dict[str, Any]) -> list[fx.Node]:
    """What the chain computes, in order."""
    return [found[node.name] for node in read(CHAIN).nodes if node.op == "call_function"]


def _fuse(graph: StepGraph, node: fx.Node, found: dict[str, Any], instead: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Write the kernel's call; returns what it takes the place of, in order.  ``instead`` gets what to hand out."""
    param, decay = found["param"], 0.0
    before: dict[str, Any] = {"lr": found["lr"]}
    if matches(read(DECAY).outputs[0], param, before) and set(param.users) == {node}:
        param, decay = before["param"], before["weight_decay"]
    numbers = (found["lr"], found["beta1"], found["beta2"], found["eps"], decay)
    args: tuple[Any, ...] = (
        [param],
        [found["grad"]],
        [found["exp_avg"]],
        [found["exp_avg_sq"]],
        [],
        [found["step"]],
        *numbers,
    )
    type_, nd = value.tensor_type(node), value.nd_of(node)
    chain = _made(found)
    with graph.graph.inserting_before(node):
        fused = graph.call(ADAM, args, (type_,) * 3, sbp=(nd,) * 3, like=node, name="adam")
        for i, old in enumerate((node, found["new_avg"], found["new_sq"])):
            made = graph.call(operator.getitem, (fused, i), type_, sbp=nd, like=old)
            old.replace_all_uses_with(made, delete_user_cb=lambda user: user.op != "output" and user not in chain)
            instead[old] = made
    return [*_before(found["param"], param), *chain]


def _before(decayed: fx.Node, param: fx.Node) -> list[fx.Node]:
    return [] if decayed is param else [decayed]
