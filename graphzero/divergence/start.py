"""What one step begins with: whole copies of everything that a program reads, on one device.

On real ranks every rank gathers the whole batch and the whole state, so each can run all ranks by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphzero.capture import OptimizerSpec, Step
from graphzero.compiled import Compiled
from graphzero.divergence.wide import wide
from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.runtime.inputs import Inputs
from graphzero.runtime.seed import key_tensor
from graphzero.runtime.shards import wrap


@dataclass
class Start:
    """Whole copies.  All tensors are fresh, floating ones in float64 if ``is_wide``.

    args, kwargs: of build.  params, buffers: by path.  states: (optimizer, path) -> its dict in ``optimizer.state``.
    values: by placeholder of the program; key: of the step's random draws, None where it draws nothing.
    """

    step: Step
    args: Any
    kwargs: Any
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    states: dict[tuple[int, str], dict[str, Any]]
    values: dict[str, Any]
    key: Tensor | None
    is_wide: bool

    @property
    def optimizers(self) -> list[OptimizerSpec]:
        return self.step.optimizers


def start_of(graph: Graph, program: Compiled, inputs: Inputs, numbers: Any, is_wide: bool) -> Start:
    """Collect the whole of what the next call of ``graph`` on ``inputs`` would read.  Every rank calls it."""
    state, placement = graph._state, graph.placement
    device = graph._world.device

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = (x.full_tensor() if isinstance(x, DTensor) else x).detach().to(device, copy=True)
        return wide(x) if is_wide else x

    def batch(leaf: Any) -> Any:
        if not leaf.is_tensor:
            return leaf.raw
        raw = leaf.raw
        if not isinstance(raw, DTensor) and not placement.virtual:
            raw = wrap(raw.detach().to(device), placement.mesh(), leaf.nd, leaf.shape)
        return copied(raw)

    leaves = {leaf.name: batch(leaf) for leaf in inputs.leaves}
    found = state.tensors()
    params = {path: copied(entry.tensor) for path, entry in found.items() if entry.kind == "param"}
    buffers = {path: copied(entry.tensor) for path, entry in found.items() if entry.kind == "buffer"}
    paths = {id(entry.tensor): path for path, entry in found.items()}
    states = {
        (i, paths[id(param)]): {key: x if _is_counter(x) else copied(x) for key, x in held.items()}
        for i, optimizer in enumerate(state.optimizers)
        for param, held in optimizer.state.items()
        if id(param) in paths
    }
    stream = state.random
    seed = torch.initial_seed() if stream.seed is None else stream.seed  # a call would draw one; a check draws nothing
    key = key_tensor(seed, stream.step, device) if program.uses_seed else None
    owners = {spec.placeholder: spec for spec in reversed(program.captured.states)}
    values: dict[str, Any] = {}
    for node in program.history[0].before.placeholders():
        role = value.role_of(node)
        assert role is not None
        if role.kind == "state":
            spec = owners[node.name]
            held = states.get((spec.optimizer, spec.param), {}).get(spec.key)
            here = held if isinstance(held, Tensor) else torch.full(spec.shape, spec.fill)
            values[node.name] = copied(here.to(spec.dtype))
        elif role.kind in ("param", "buffer"):
            values[node.name] = copied((params | buffers)[role.of])
        elif role.kind in ("batch", "scalar"):
            values[node.name] = leaves[role.of]
        elif role.kind == "constant":
            values[node.name] = copied(program.captured.constants[node.name])
        else:
            values[node.name] = key if role.kind == "seed" else numbers[role]
    args, kwargs = pytree.tree_unflatten([copied(leaves[leaf.name]) for leaf in inputs.leaves], inputs.spec)
    step = Step(graph.name, placement, graph.build, graph._modules(), graph._optimizers)
    return Start(step, args, kwargs, params, buffers, states, values, key, is_wide)


def _is_counter(x: Any) -> bool:
    """A count of steps stays as it is: torch's fused kernels want it in float32."""
    return isinstance(x, Tensor) and x.dim() == 0 and not isinstance(x, DTensor)
