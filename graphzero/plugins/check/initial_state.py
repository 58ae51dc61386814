"""State before one step: whole copies of everything that a program reads, on one device.

On real ranks every rank gathers the whole batch and the whole state, so each can run all ranks by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphzero.capture import Input, OptimizerSpec, Step
from graphzero.ir import value
from graphzero.plugins.check.float64_step import to_float64
from graphzero.runtime.state.modules import paths_by_id
from graphzero.runtime.state.seed import key_tensor
from graphzero.runtime.tensors.resplit import whole
from graphzero.runtime.tensors.shards import wrap
from graphzero.sbp.placement import Placement
from graphzero.step.input_transform import TransformedInputs
from graphzero.step.program_selector import PreparedCall


@dataclass
class StepStart:
    """Whole copies.  All tensors are fresh, floating ones in float64 if ``is_wide``.

    args, kwargs: of build, as they came; transformed: see ``Call``.  params, buffers: by path.
    states: (optimizer, path) -> its dict in ``optimizer.state``.
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
    transformed: TransformedInputs | None = None

    @property
    def optimizers(self) -> list[OptimizerSpec]:
        return self.step.optimizers


def start_of(prepared: PreparedCall, is_wide: bool) -> StepStart:
    """Collect the whole of what a call would read.  Every rank calls it."""
    source, call, program = prepared.source, prepared.call, prepared.program
    state, inputs = call.state, call.inputs
    copied = _Copies(source.placement, source.whole_placement, source.world.device, is_wide)
    leaves = {leaf.name: copied.copy_input(leaf) for leaf in inputs.leaves}
    entries = state.tensors()
    params = {path: copied.copy_value(entry.tensor) for path, entry in entries.items() if entry.kind == "param"}
    buffers = {path: copied.copy_value(entry.tensor) for path, entry in entries.items() if entry.kind == "buffer"}
    paths = paths_by_id(entries)
    states = {
        (i, paths[id(param)]): {key: x if _is_counter(x) else copied.copy_value(x) for key, x in state_of.items()}
        for i, optimizer in enumerate(state.optimizers)
        for param, state_of in optimizer.state.items()
        if id(param) in paths
    }
    stream = state.random
    seed = torch.initial_seed() if stream.seed is None else stream.seed  # a call would draw one; a check draws nothing
    key = key_tensor(seed, stream.step, copied.device) if program.uses_seed else None
    given = [copied.copy_value(_given(leaf, leaves[leaf.name], call.transformed)) for leaf in inputs.leaves]
    args, kwargs = pytree.tree_unflatten(given, inputs.spec)
    leaves |= {x.name: copied.copy_input(x) for x in (call.transformed.added_inputs if call.transformed else ())}
    start = StepStart(source.step, args, kwargs, params, buffers, states, {}, key, is_wide, call.transformed)
    start.values.update(_values(start, prepared, leaves, copied))
    return start


def _given(leaf: Input, whole: Any, transformed: TransformedInputs | None) -> Any:
    """The values of an input that the callers have passed, of all ranks together."""
    return transformed.restore_input(leaf, whole) if transformed is not None and isinstance(whole, Tensor) else whole


@dataclass(frozen=True)
class _Copies:
    """Makes whole tensors of their own on ``device``, in float64 if ``is_wide``.

    placement: of inputs; whole_placement: all ranks.
    """

    placement: Placement
    whole_placement: Placement
    device: torch.device
    is_wide: bool

    def copy_value(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = (whole(x, self.whole_placement) if isinstance(x, DTensor) else x).detach().to(self.device, copy=True)
        return to_float64(x) if self.is_wide else x

    def copy_input(self, leaf: Any) -> Any:
        """Copy an input of the whole batch, of which each rank may hold its share."""
        raw = leaf.raw
        if leaf.is_tensor and not isinstance(raw, DTensor) and not self.placement.virtual:
            raw = wrap(raw.detach().to(self.device), self.placement.mesh(), leaf.nd, leaf.shape)
        return self.copy_value(raw)


def _values(start: StepStart, prepared: PreparedCall, leaves: dict[str, Any], copied: _Copies) -> dict[str, Any]:
    """Value of each placeholder of the program as captured."""
    captured, numbers = prepared.program.captured, prepared.call.numbers
    owners = {spec.placeholder: spec for spec in reversed(captured.states)}
    values: dict[str, Any] = {}
    for node in prepared.program.history[0].before.placeholders():
        role = value.role_of(node)
        assert role is not None
        if role.kind == "state":
            spec = owners[node.name]
            state = start.states.get((spec.optimizer, spec.param), {}).get(spec.key)
            here = state if isinstance(state, Tensor) else torch.full(spec.shape, spec.fill, dtype=spec.dtype)
            values[node.name] = copied.copy_value(here.to(spec.dtype))
        elif role.kind in ("param", "buffer"):
            values[node.name] = copied.copy_value((start.params | start.buffers)[role.of])
        elif role.kind in ("batch", "scalar"):
            values[node.name] = leaves[role.of]
        elif role.kind == "constant":
            values[node.name] = copied.copy_value(captured.constants[node.name])
        else:
            values[node.name] = start.key if role.kind == "seed" else numbers[role]
    return values


def _is_counter(x: Any) -> bool:
    """A count of steps stays as it is: torch's fused kernels need it in float32."""
    return isinstance(x, Tensor) and x.dim() == 0 and not isinstance(x, DTensor)
