"""OffloadStates: optimizer states lie in host memory, and are on the device only while they are stepped.

States come and go in buckets, in the order in which the update reads them.  A bucket is the states of one parameter;
parameters whose states are small together share one.  While a bucket is stepped the next one is on its way, and a
bucket is awaited on the host before the next but one sets out, so that the device holds two (ZeRO-Infinity, arXiv
2104.07857, streams states in this way).  An update that reads states of several buckets at a time holds all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import reduce
from operator import attrgetter
from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.passes.base import BuiltinPass
from graphzero.passes.schedule.bucket import default_limit


@dataclass(frozen=True)
class OffloadStates(BuiltinPass):
    """Keeps optimizer states that are not 0-d in host memory; changes no value.

    bucket_bytes: of one rank's states in a bucket, at most, unless one parameter's are more; by default what
        ``Bucket`` takes for a bucket.

    Requires: each new state is an ``assign``.
    Ensures: states are read from copies on the device, and written back; at most two buckets are there at a time,
        unless the update itself reads more.

    Example::

        offload_states{bucket_bytes=128}

         graph step(dp=2) local
           w = param() : f32[64]  S(0)
           v = param() : f32[64]  S(0)
           wm = state(w, m) : f32[64]  S(0)
           vm = state(v, m) : f32[64]  S(0)
           g = batch() : f32[64]  S(0)
         update:
        -  w1 = add(wm, g) : f32[64]  S(0)
        -  assign = assign(wm, w1) : f32[64]  S(0)
        -  v1 = add(vm, g) : f32[64]  S(0)
        -  assign_1 = assign(vm, v1) : f32[64]  S(0)
        -  return update(wm=assign, vm=assign_1)
        +  to_device_launch = to_device_launch(wm) : f32[64]  S(0)
        +  to_device_launch_1 = to_device_launch(vm) : f32[64]  S(0)
        +  to_device_wait = to_device_wait(to_device_launch, wm) : f32[64]  S(0)
        +  w1 = add(to_device_wait, g) : f32[64]  S(0)
        +  to_host_launch = to_host_launch(wm, w1) : f32[64]  S(0)
        +  to_host_wait = to_host_wait(to_host_launch, w1) : f32[64]  S(0)
        +  to_device_wait_1 = to_device_wait(to_device_launch_1, vm) : f32[64]  S(0)
        +  v1 = add(to_device_wait_1, g) : f32[64]  S(0)
        +  to_host_launch_1 = to_host_launch(vm, v1) : f32[64]  S(0)
        +  to_host_wait_1 = to_host_wait(to_host_launch_1, v1) : f32[64]  S(0)
        +  return update(wm=to_host_wait, vm=to_host_wait_1)
    """

    bucket_bytes: int | None = None

    def __call__(self, graph: StepGraph) -> StepGraph:
        buckets = _buckets(graph, self.bucket_bytes or default_limit(graph))
        if not buckets:
            return graph
        buckets[0].launch(graph, _begin_of_update(graph, buckets[0].first))
        updates, after = dict(graph.updates), list[_Bucket]()  # buckets that are on their way back
        for i, bucket in enumerate(buckets):
            for back in [one for one in after if one.end < bucket.begin]:
                updates |= back.wait_on_host(graph, bucket.first)
                after.remove(back)
            if i + 1 < len(buckets):
                buckets[i + 1].launch(graph, bucket.first)
            bucket.wait(graph)
            bucket.put_back(graph)
            after.append(bucket)
        for back in after:
            updates |= back.wait_on_host(graph, graph.output)
        graph.set_output(graph.outputs, graph.aux, updates)
        for assign in (assign for bucket in buckets for assign in bucket.assigns.values()):
            graph.graph.erase_node(assign)
        return graph


@dataclass
class _Bucket:
    """States that travel together.

    states: with the first op that reads each, if any.  assigns: the op that writes each, of those that are written.
    nbytes: on one rank.  begin, end: positions of the first op that reads or writes one of them, and of the last;
    first, last: these nodes.  launches, returns: by state, the op that begins to copy it to the device, and back.
    """

    states: dict[fx.Node, fx.Node | None]
    assigns: dict[fx.Node, fx.Node]
    nbytes: int
    begin: int
    end: int
    first: fx.Node
    last: fx.Node
    launches: dict[fx.Node, fx.Node] = field(default_factory=dict)
    returns: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def joined(self, other: _Bucket) -> _Bucket:
        """One bucket of both, of which ``other`` begins later."""
        ends_last = max(self, other, key=lambda bucket: bucket.end)
        return _Bucket(
            self.states | other.states, self.assigns | other.assigns, self.nbytes + other.nbytes,
            self.begin, ends_last.end, self.first, ends_last.last,
        )  # fmt: skip

    def launch(self, graph: StepGraph, stop: fx.Node) -> None:
        """Begin to copy the states that are read to the device, before ``stop``."""
        with graph.graph.inserting_before(stop):
            for state, reader in self.states.items():
                if reader is not None:
                    self.launches[state] = _copy(graph, ops.to_device_launch, (state,), like=reader)

    def wait(self, graph: StepGraph) -> None:
        """Wait for the copies before the first reader, and let all readers have them."""
        for state, launched in self.launches.items():
            with graph.graph.inserting_before(self.first):
                copy = _copy(graph, ops.to_device_wait, (launched, state), like=launched)
            for user in [user for user in state.users if user not in (launched, copy)]:
                if user.target in ops.ASSIGNING and user.args[0] is state:
                    user.args = (state, copy if user.args[1] is state else user.args[1])
                else:
                    user.replace_input_with(state, copy)

    def put_back(self, graph: StepGraph) -> None:
        """Begin to copy new states to the host, after the last of them."""
        after = self.last
        for state, assign in self.assigns.items():
            with graph.graph.inserting_after(after):
                after = _copy(graph, ops.to_host_launch, (state, assign.args[1]), like=assign)
            self.returns[state] = after

    def wait_on_host(self, graph: StepGraph, stop: fx.Node) -> dict[str, fx.Node]:
        """Wait for new states to be on the host, before ``stop``; returns them by name."""
        with graph.graph.inserting_before(stop):
            return {
                state.name: _copy(graph, ops.to_host_wait, (launched, launched.args[1]), like=launched)
                for state, launched in self.returns.items()
            }


def _copy(graph: StepGraph, op: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """One of the four ops that copy a state, of the form of its first argument."""
    return graph.call(op, args, value.type_of(args[0]), sbp=value.sbp_of(args[0]), like=like)


def _buckets(graph: StepGraph, limit: int) -> list[_Bucket]:
    """The states that the step reads or writes, in buckets, in the order in which it needs them."""
    at = liveness(graph)
    by_param: dict[str, list[_Bucket]] = defaultdict(list)
    for state in graph.placeholders("state"):
        bucket = _bucket_of(at, state)
        role = value.role_of(state)
        if bucket is not None and role is not None:
            by_param[role.of].append(bucket)
    buckets: list[_Bucket] = []
    begin = attrgetter("begin")
    of_params = (reduce(_Bucket.joined, sorted(some, key=begin)) for some in by_param.values())
    for bucket in sorted(of_params, key=begin):
        if buckets and _fits(at, buckets[-1], bucket, limit):
            buckets[-1] = buckets[-1].joined(bucket)
        else:
            buckets.append(bucket)
    return buckets


def _bucket_of(at: Liveness, state: fx.Node) -> _Bucket | None:
    """A bucket of one state; None for one that is 0-d, that no op needs, or that is on the host already."""
    users = sorted((user for user in state.users if user.op != "output"), key=at.position.__getitem__)
    if not value.tensor_type(state).shape or not users:
        return None
    assigns = {user.args[0]: user for user in users if user.target is ops.assign and user.args[0] is state}
    if at.graph.updates.get(state.name) is not assigns.get(state):
        return None
    reader = next((user for user in users if user is not assigns.get(state) or user.args[1] is state), None)
    first, last = users[0], users[-1]
    return _Bucket({state: reader}, assigns, at.nbytes_of(state), at.position[first], at.position[last], first, last)


def _fits(at: Liveness, bucket: _Bucket, other: _Bucket, limit: int) -> bool:
    """Return whether two buckets may be one: small together, and needed in one section."""
    return bucket.nbytes + other.nbytes <= limit and at.section[bucket.first] == at.section[other.last]


def _begin_of_update(graph: StepGraph, first: fx.Node) -> fx.Node:
    """The first place where a bucket's copy may begin: the start of the update, if the update reads it."""
    at = liveness(graph)
    section = at.section[first]
    return next(node for node in at.nodes if at.section[node] == section) if section[1] == "update" else first
