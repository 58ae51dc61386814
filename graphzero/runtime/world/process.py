"""A world with one rank per process, over torch.distributed: NCCL, gloo or a fake group.

Between CPU tensors collectives are exchanges between pairs of ranks (``p2p_collectives``): ranks of one host read
each other's memory (``shared_memory``), others send through gloo (``gloo_transport``).  These connections belong
to the ranks, not to a program (``communicator``): all Graphs of these ranks share them, and they are made again after a
failure.

NCCL reduces in an order that is fixed for one size on one machine, but may change with the size: repeated runs
agree to the bit, stages only to rounding.  On two ranks any order is the same.

The communicator reports time-outs and peers that died; with NCCL, torch.distributed does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat
from graphzero.errors import PlacementError, RankError
from graphzero.runtime.transport.communicator import communicator
from graphzero.runtime.transport.failure_diagnosis import rank_list
from graphzero.runtime.transport.p2p_collectives import OPS, ContinuedHandle, PeerCollectives
from graphzero.runtime.transport.primitives import Handle
from graphzero.runtime.transport.process_group_transport import ProcessGroupTransport
from graphzero.runtime.transport.teardown import before_tear_down
from graphzero.runtime.transport.transport import MessageTransport
from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.runtime.world.launch import has_fake_world
from graphzero.runtime.world.shared_gpus import backend_of, check_own_gpus
from graphzero.runtime.world.world import World, device_of
from graphzero.sbp.placement import PIPELINE, Placement

GROUPED_DEVICES = {*ACCELERATORS}  # on which messages between stages go through process groups; tests add "cpu"
_MOVED_AS_BYTES = (torch.bool, torch.int16, torch.complex64, torch.complex128)


_worlds: weakref.WeakSet[ProcessWorld] = weakref.WeakSet()


def _release() -> None:
    for world in _worlds:
        world.close()


before_tear_down(_release)


class ProcessWorld(World):
    """This process' rank of ``placement``.  Every rank of the job constructs it, with equal placements.

    whole: with an axis ``pp``, of which ``placement`` is the member that has this rank.
    Raises PlacementError where this process is no rank of the placement, or there is no process group.
    """

    def __init__(self, placement: Placement, device: torch.device | None = None, whole: Placement | None = None):
        mesh = placement.mesh()
        rank = dist.get_rank()
        super().__init__(placement, device or device_of(placement), [placement.ranks.ravel().tolist().index(rank)])
        self._pipeline_line: list[int] = []  # the ranks along pp through this one
        if whole is not None and whole.pipeline_members > 1:
            self.whole, self.member = whole, whole.pipeline_member(rank)
            members = (whole.without_pipeline(i) for i in range(whole.pipeline_members))
            at = placement.coordinate(rank)
            self._pipeline_line = [int(member.ranks[at]) for member in members]
        flat = self.whole.ranks.ravel().tolist()
        self._groups = {name: mesh.get_group(i) for i, name in enumerate(placement.names)}
        self._communicator = communicator(flat)
        self._collectives: dict[str, PeerCollectives] = {}
        self._stage_transport: ProcessGroupTransport | None = None
        self._made_in = -1  # generation of the communicator
        _worlds.add(self)
        shared = [axis for axis, ranks in zip(placement.names, placement.hierarchy, strict=True) if ranks > 1]
        on_gloo = (axis for axis in shared if backend_of(self._groups[axis], self.device) == "gloo")
        self._peer_axes = [*on_gloo] if self.device.type == "cpu" else []  # nothing else reads the memory of a GPU
        for axis, group in self._groups.items():
            peers = self.peers(0, axis)
            if axis not in self._peer_axes and axis in shared and peers != sorted(peers):
                raise PlacementError(
                    f"the ranks {peers} of {placement!r} along {axis} do not ascend, but the process groups of "
                    f"{dist.get_backend(group)} are in the order of ranks; list them in ascending order"
                )

    def close(self) -> None:
        """Let go of process groups and connections; nothing runs any more."""
        self._groups.clear()
        self._collectives.clear()
        self._stage_transport = None

    def forget(self) -> None:
        if not self._peer_axes:
            super().forget()
        self.pending.clear()  # the connections on which it began are closed, and nothing more arrives

    @property
    def transports(self) -> dict[str, str]:
        return {axis: collectives.about for axis, collectives in self._collectives.items()}

    @property
    def under_way(self) -> str:
        return "" if self._peer_axes or self.member is not None else super().under_way

    def _collectives_of(self, axis: str) -> PeerCollectives | None:
        """The collectives between CPU ranks along an axis, None where they are the backend's."""
        if self._made_in != self._communicator.generation and not has_fake_world():
            self._connect()
        return self._collectives.get(axis)

    def _connect(self) -> None:
        """Connect at the first collective after the last failure; every rank calls it."""
        self._communicator.connect()
        backends = [backend_of(group, self.device) for group in self._groups.values()]
        backends += ["nccl"] * bool(self._pipeline_line)  # of messages between stages, whatever that of groups is
        check_own_gpus(self.whole, self.device, backends)
        self._collectives = {axis: self._communicator.collectives(self.peers(0, axis)) for axis in self._peer_axes}
        if self._pipeline_line and self.device.type in GROUPED_DEVICES:
            self._stage_transport = self._communicator.stage_transport(self._pipeline_line, self.device)
        elif self._pipeline_line:
            self._collectives[PIPELINE] = self._communicator.collectives(self._pipeline_line)
        self._made_in = self._communicator.generation

    # ---- messages between stages

    def open_messages(self, count: int, edges: Iterable[tuple[int, int]]) -> tuple[MessageTransport | None, int]:
        """The transport between members of ``pp``, from this rank's place on all other axes to the same place, and the
        first of ``count`` numbers of messages; None in a fake world.  Every rank calls it, before each step.

        edges: the members that send to each other, (from, to).
        """
        if has_fake_world():
            return None, 0
        if self._made_in != self._communicator.generation:
            self._connect()
        if self._stage_transport is not None:
            self._stage_transport.open_edges(edges)
            return self._stage_transport, 0
        collectives = self._collectives[PIPELINE]
        return collectives.transport, collectives.reserve_numbers(count)

    def note_doing(self, doing: str) -> None:
        """Say what this rank computes, for ranks that wait for it."""
        self._communicator.wait_state.doing = doing

    def wait_for_members(self, handle: Handle, members: Sequence[int], purpose: str) -> None:
        """Wait for a message to or from other members, each to do ``purpose``."""
        state, ranks = self._communicator.wait_state, [self._pipeline_line[member] for member in members]
        text = f"{rank_list(ranks)} {purpose}"
        state.begin(ranks, text)
        try:
            handle.wait()
        except RankError as error:
            raise RankError(f"{error} (it waits for {text})", error.ranks, error.is_silent) from error
        finally:
            state.end()

    def begin_transfer(
        self, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str
    ) -> Handle:
        (out,), (sent,) = outs, ins
        collectives = self._collectives_of(axis)
        if collectives is not None:
            return collectives.begin(kind, out, sent, reduction)
        return COLLECTIVE_FUNCTIONS[kind](out, sent, reduction, self._groups[axis])


# ---- one collective by torch.distributed


def _all_gather(out: Tensor, sent: Tensor, reduction: str, group: Any) -> Any:
    return _compat.all_gather_single(_as_bytes(out), _as_bytes(sent), group=group, async_op=True)


def _reduce_scatter(out: Tensor, sent: Tensor, reduction: str, group: Any) -> Handle:
    (known, given), op, narrow = _reducible((out, sent), reduction)
    work: Handle = _compat.reduce_scatter_single(known, given, op, group=group, async_op=True)
    return ContinuedHandle(work, lambda: out.copy_(known)) if narrow else work


def _all_reduce(out: Tensor, _: Tensor, reduction: str, group: Any) -> Handle:
    (known,), op, narrow = _reducible((out,), reduction)
    work: Handle = dist.all_reduce(known, op, group=group, async_op=True)
    return ContinuedHandle(work, lambda: out.copy_(known)) if narrow else work


def _all_to_all(out: Tensor, sent: Tensor, reduction: str, group: Any) -> Any:
    return dist.all_to_all_single(_as_bytes(out), _as_bytes(sent), group=group, async_op=True)


def _shift(out: Tensor, sent: Tensor, reduction: str, group: Any) -> Any:
    """An all-to-all that sends to the next rank alone."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    arrives, leaves = _as_bytes(out), _as_bytes(sent)
    before, after = ([leaves.numel() if q == (own + step) % ranks else 0 for q in range(ranks)] for step in (-1, 1))
    return dist.all_to_all_single(arrives, leaves, before, after, group=group, async_op=True)


COLLECTIVE_FUNCTIONS: dict[str, Callable[..., Handle]] = {
    "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all,
    "shift": _shift,
}  # fmt: skip


def _as_bytes(x: Tensor) -> Tensor:
    """View ``x`` as bytes where it is only moved: backends know few dtypes."""
    return x.view(torch.uint8) if x.dtype in _MOVED_AS_BYTES else x


def _reducible(xs: tuple[Tensor, ...], reduction: str) -> tuple[tuple[Tensor, ...], Any, bool]:
    """Tensors and reduction that a backend knows; whether the result must be cast back into the first tensor.

    The sum of bools is "any", as torch's own; complex numbers are summed as pairs of reals.
    """
    dtype = xs[0].dtype
    if dtype == torch.bool:
        return tuple(x.view(torch.uint8) for x in xs), OPS["max" if reduction == "sum" else reduction], False
    if dtype.is_complex:
        return tuple(torch.view_as_real(x).flatten() for x in xs), OPS[reduction], False
    if dtype == torch.int16:
        return tuple(x.to(torch.int32) for x in xs), OPS[reduction], True
    return xs, OPS[reduction], False
