"""Activations wait for backward in the host's memory instead of the device's.

What forward leaves for backward goes to the host after its last reader of forward, and comes back right before
backward reads it first (vDNN, arXiv 1602.08124; ZeRO-Infinity, arXiv 2104.07857).

Contract: runs after ``fuse``: SBPs are settled, so a rank's own piece goes and comes back, and nothing moves between
ranks for it.  Every storage that forward leaves, of ``least_bytes`` or more, is offloaded once; views of it that
backward reads are made again of what comes back.  The same bits.  Left alone: what is smaller, what the update or the
caller reads too, and what backward reads less than ``apart`` ops after forward did, for that frees nothing.

      h      = tanh(a)         : f32[8, 4]  S(0)
      y      = mm(h, w)        : f32[8, 4]  S(0)
    + h_host = offload(h)      : f32[8, 4]  S(0)
    backward:
    + h_back = reload(h_host)  : f32[8, 4]  S(0)
    - ht     = t(h)            : f32[4, 8]  S(1)
    + ht     = t(h_back)       : f32[4, 8]  S(1)

On a GPU both copies run on a stream of their own, from and to pinned memory.  The copy out runs beside what forward
goes on to compute: nobody writes over what it reads, for all other readers stand above it, and until it is through the
allocator keeps the memory, which no plan shows.  The copy back is awaited where it stands.  None of this has run on a
GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx

import graphzero as gz
from graphzero.ir import value
from graphzero.ir.storage.liveness import Liveness, StorageSpan, liveness


@cache
def copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # on which copies run in order: what comes back has gone out


@torch.library.custom_op("examples::offload", mutates_args=())
def offload(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x.clone()
    side = copies(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    x.record_stream(side)  # its memory is not given away until the copy has run
    return host


@torch.library.custom_op("examples::reload", mutates_args=())
def reload(host: Tensor) -> Tensor:
    if not host.is_pinned():
        return host.clone()
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(copies(device)):
        x = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
    torch.cuda.current_stream(device).wait_stream(copies(device))
    x.record_stream(torch.cuda.current_stream(device))
    return x


for op in (offload, reload):
    op.register_fake(lambda x: torch.empty_like(x))
    gz.sbp.rule(op, "sum max min: ...->...")
gz.passes.host_memory(offload, reload)


@dataclass(frozen=True)
class Offload:
    """Keeps activations on the host.  least_bytes: of one rank's piece; apart: ops between its readers, at least."""

    least_bytes: int = 1 << 20
    apart: int = 8

    def __call__(self, graph: gz.StepGraph) -> gz.StepGraph:
        at = liveness(graph)
        for span in at.spans():
            if span.category == "activations" and span.nbytes >= self.least_bytes:
                self.move(graph, at, span)
        return graph

    def move(self, graph: gz.StepGraph, at: Liveness, span: StorageSpan) -> None:
        """Offload a storage of forward, and let backward read what comes back."""
        stored = [x for x in at.nodes if value.phase_of(x) == "forward" and span.storage in at.roots.get(x, ())]
        x, *views = [one for one in stored if value.is_tensor(one)]
        readers = sorted({user for one in stored for user in one.users}, key=at.position.__getitem__)
        late = [user for user in readers if user.op == "output" or value.phase_of(user) != "forward"]
        last = max(at.position[user] for user in (x, *readers) if user not in late)
        where = at.section[x][0], "backward"  # of the micro-batch that makes it, or of the step
        if {at.section[user] for user in late} != {where} or at.position[late[0]] - last < self.apart:
            return
        with graph.graph.inserting_after(at.nodes[last]):
            host = moved(graph, torch.ops.examples.offload.default, (x,), x, x, f"{x.name}_host")
        with graph.graph.inserting_before(late[0]):
            back = {x: moved(graph, torch.ops.examples.reload.default, (host,), x, late[0], f"{x.name}_back")}
            for view in shown_to(late, views):
                args = fx.map_arg(view.args, lambda one: back.get(one, one))
                back[view] = moved(graph, view.target, args, view, late[0], f"{view.name}_back")
        for user in late:
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda one: back.get(one, one))


def shown_to(readers: list[fx.Node], views: list[fx.Node]) -> list[fx.Node]:
    """The views of ``views``, each of the one before it, that lead to readers."""
    needed = set(readers)
    for view in reversed(views):
        needed |= {view} if needed & view.users.keys() else set()
    return [view for view in views if view in needed]


def moved(graph: gz.StepGraph, op: object, args: tuple, of: fx.Node, like: fx.Node, name: str) -> fx.Node:
    """An op whose result is as the value ``of``, in the phase of ``like``."""
    options = dict(of.kwargs) if op is of.target else {}
    return graph.call(op, args, value.type_of(of), sbp=value.nd_of(of), kwargs=options, like=like, name=name)
