"""Binding: the tensors behind a program's placeholders, laid out as it needs them, with rank 0's values.

New tensors are put wherever the user holds the old ones, so that these stay the only truth.  How one tensor is laid
out is ``storage``'s; what is known of the user's tensors between calls is ``state``'s.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import is_

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.errors import CaptureError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import StateSpec
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state import preflight
from graphzero.runtime.state.host_states import HostStates
from graphzero.runtime.state.layout import TensorLayout, filled, lay_out
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import Binding, Moved, State, StepCounter
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.runtime.tensors.stage_tensors import connect_axes, has_stages


def bind(
    state: State, graph: StepGraph, specs: Sequence[StateSpec], constants: Mapping[str, Tensor],
    entries: Mapping[str, ModuleTensor], homes: Mapping[str, int], host: HostStates,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Lay out everything that ``graph`` keeps between calls; returns one tensor per local rank by placeholder.

    homes: placeholder -> the member of ``pp`` whose ranks alone keep it; all others are kept by all.
    host: where what the program has in host memory is kept.
    specs: its optimizer states.  found: ``state.tensors()``.  Every rank calls it for the same graph, when
    ``preflight`` has found nothing wrong, and the same on all ranks: when a plain tensor is first bound its values are
    taken from rank 0.
    """
    binder = _Binder(state, entries, graph.updates, homes, host)
    host.place_rooms()
    if has_stages(state.ranks.placement):
        connect_axes(state.ranks.placement)
    with torch.no_grad():
        values = {name: xs for name, xs in (binder.tensors(graph) | binder.states(graph, specs)).items() if xs}
        for node in graph.placeholders("constant"):
            given = constants[node.name].to(state.world.device)
            values[node.name] = lay_out(given, value.nd_of(node), state.world, node.name).ranks
        for entry in entries.values():  # those that the program does not read
            if not isinstance(entry.tensor, DTensor) and not entry.tensor.is_meta:
                state.first_values.take(entry.tensor, entry.path)
    state.set_binding(binder.bound)
    return values


class _Binder:
    def __init__(
        self, state: State, entries: Mapping[str, ModuleTensor], updates: Container[str], homes: Mapping[str, int],
        host: HostStates,
    ) -> None:  # fmt: skip
        """updates: names of the placeholders that the program writes."""
        self.state, self.entries, self.updates, self.homes = state, entries, updates, homes
        self.host = host
        self.world, self.optimizers = state.world, state.optimizers
        self.bound = Binding()

    def tensors(self, graph: StepGraph) -> dict[str, list[Tensor]]:
        """Parameters and buffers."""
        tensors_by_name = {}
        for node in graph.placeholders("param", "buffer"):
            role = value.role_of(node)
            assert role is not None
            tensors_by_name[node.name] = self._tensor(node, self.entries[role.of])
        return tensors_by_name

    def states(self, graph: StepGraph, specs: Sequence[StateSpec]) -> dict[str, list[Tensor]]:
        """States of optimizers; a placeholder may stand for the equal counters of many parameters."""
        members: dict[str, list[StateSpec]] = {}
        for spec in specs:
            members.setdefault(spec.placeholder, []).append(spec)
        values, counts = {}, preflight.counters(graph, specs, self.entries)
        for node in graph.placeholders("state"):
            here = members.get(node.name, [])
            if not here:
                raise CaptureError(f"nothing says how the optimizer state '{node.name}' begins")
            if node.name in counts:
                values[node.name] = self._counter(here)
            else:
                values[node.name] = self._state(node, here[0])
        return values

    def _tensor(self, node: fx.Node, entry: ModuleTensor) -> list[Tensor]:
        state = self.state
        if not isinstance(entry.tensor, DTensor):
            state.first_values.take(entry.tensor, entry.path)
        given_nd, current_nd, moved = state.given(entry), state.nd_of(entry.tensor), state.moved.get(entry.path)
        was_plain = (
            moved.was_plain if moved is not None and given_nd != current_nd else not isinstance(entry.tensor, DTensor)
        )
        home = self.homes.get(node.name)
        layout = lay_out(entry.tensor, value.nd_of(node), self.world, entry.path, plain=was_plain, home=home)
        old, is_same = entry.tensor, layout.tensor is entry.tensor

        def note_moved() -> None:
            if is_same or entry.tensor is not old:
                state.moved[entry.path] = Moved(TensorRef(entry.tensor), was_plain, given_nd, value.nd_of(node))

        with _compat.undoing(note_moved):  # also where an interrupt comes when the tensor has been replaced
            if not is_same:
                state.first_values.note(tree.replace_tensor(entry, layout.tensor, self.optimizers), entry.path)
        return self._ranks(node, layout)

    def _state(self, node: fx.Node, spec: StateSpec) -> list[Tensor]:
        what, nd, home = preflight.name_of(spec), value.nd_of(node), self.homes.get(node.name)
        param = self.entries[spec.param].tensor
        if spec.created:
            created = filled(spec.shape, spec.dtype, 0.0, nd, self.world, home)
            layout = self._lay_out_state(node, created, what)
            self.bound.created.append((self.optimizers[spec.optimizer], param, spec.key, layout.tensor))
            self.state.first_values.note(layout.tensor, what)
            return self._ranks(node, layout)
        state = self.optimizers[spec.optimizer].state[param]
        tensor = state.get(spec.key)
        if tensor is None:
            tensor = filled(spec.shape, spec.dtype, spec.fill, nd, self.world, home)
        elif tensor.dtype != spec.dtype:
            tensor = tensor.to(spec.dtype)
        tensor = self.host.for_device(node.name, tensor)
        if spec.key in state and not isinstance(tensor, DTensor):
            self.state.first_values.take(tensor, what)
        layout = self._lay_out_state(node, tensor, what)
        state[spec.key] = layout.tensor
        self.state.first_values.note(layout.tensor, what)
        self.bound.add(spec, param, state)
        return self._ranks(node, layout)

    def _lay_out_state(self, node: fx.Node, tensor: Tensor, what: str) -> TensorLayout:
        nd, home = value.nd_of(node), self.homes.get(node.name)
        layout = lay_out(tensor, nd, self.world, what, plain=True, home=home)
        settled = self.host.on_host(node.name, layout.tensor)
        return layout if settled is layout.tensor else lay_out(settled, nd, self.world, what, plain=True, home=home)

    def _counter(self, specs: Sequence[StateSpec]) -> list[Tensor]:
        """The count of a program; each parameter's own becomes an element of one tensor."""
        counts = [preflight.count_of(self.state, spec, self.entries) for spec in specs]
        key = tuple((spec.optimizer, spec.param, spec.key) for spec in specs)
        counter = self.state.counters.get(key)
        if counter is not None and all(map(is_, counts, counter.own)):
            counter.tensor.copy_(counter.copies[0])  # where it is, whichever program has run since
        else:
            # On the device, as torch's fused optimizers keep it: on the host a step would have to wait for it.
            count = torch.as_tensor(counts[0], dtype=specs[0].dtype).detach()
            tensor = count.to(self.world.device, copy=True)
            self.state.first_values.take_count(tensor, map(preflight.name_of, specs))
            copies = tensor.expand(len(specs)).clone()
            counter = self.state.counters[key] = StepCounter(tensor, copies, copies.unbind())
        for spec, own in zip(specs, counter.own, strict=True):
            optimizer, param = self.optimizers[spec.optimizer], self.entries[spec.param].tensor
            if spec.created:
                self.bound.created.append((optimizer, param, spec.key, own))
            else:
                optimizer.state[param][spec.key] = own
                self.bound.add(spec, param, optimizer.state[param])
        self.bound.counters.append(counter)
        return [counter.tensor] * len(self.world.local_ranks)

    def _ranks(self, node: fx.Node, laid: TensorLayout) -> list[Tensor]:
        self.bound.copies += laid.copies
        if node.name in self.updates:
            self.bound.written += laid.copies
        return laid.ranks
