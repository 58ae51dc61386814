"""Placements: the ranks that run a program, and their arrangement.

A placement is a fact, cheap to make and to compare; it opens no connection.  Only ``mesh()`` touches
torch.distributed.  How a tensor lies on a placement is ``types``; who runs where is the runtime.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphzero.errors import PlacementError, shorten_repr
from graphzero.sbp.meshes import ascend, keep, mesh_of, stage_mesh_of

DEVICE_TYPES = ("cpu", "cuda")
MICRO_BATCHES = "mb"  # the axis whose members run one after the other on the same ranks: time, as an axis
PIPELINE = "pp"  # the axis whose members hold the stages of a pipeline
_DEFAULT_NAMES: dict[int, tuple[str, ...]] = {1: ("dp",), 2: ("dp", "tp")}


class Placement:
    """Ranks in a hierarchy with one name per axis.  Made by ``placement``; equal by value; not to be changed.

    hierarchy: ranks along each axis.
    """

    device_type: str
    ranks: np.ndarray[Any, np.dtype[np.int64]]
    names: tuple[str, ...]
    virtual: bool
    hierarchy: tuple[int, ...]

    def __init__(self, device_type: str, ranks: np.ndarray[Any, Any], names: tuple[str, ...], virtual: bool) -> None:
        self.device_type = device_type
        self.ranks = ranks
        self.names = names
        self.virtual = virtual
        self.hierarchy = tuple(int(n) for n in ranks.shape)
        self._coordinates: dict[int, tuple[int, ...]] = {}
        self._mesh: tuple[weakref.ref[Any], weakref.ref[DeviceMesh]] | None = None  # with the world it was made in
        ranks.setflags(write=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.ranks.size)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Names of the axes over which a batch is split: those that begin with ``dp``."""
        return tuple(name for name in self.names if name.startswith("dp"))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Names of the axes over which a batch is split, in space or in time: the data axes and ``mb``."""
        return tuple(name for name in self.names if name.startswith("dp") or name == MICRO_BATCHES)

    def with_micro_batches(self, count: int) -> Placement:
        """The same ranks with an axis ``mb`` after the last data axis, along which each rank occurs ``count`` times.

        Programs speak of it up to the pass ``micro_batches``; nothing runs on such a placement.
        """
        at = max((self.axis(name) + 1 for name in self.data_axes), default=0)
        ranks = np.repeat(np.expand_dims(self.ranks, at), count, axis=at)
        return Placement(self.device_type, ranks, (*self.names[:at], MICRO_BATCHES, *self.names[at:]), self.virtual)

    def without_micro_batches(self) -> Placement:
        """The ranks themselves."""
        return self._without(MICRO_BATCHES, 0)

    def _without(self, name: str, member: int) -> Placement:
        """The ranks of one member of an axis; of that axis alone, one data rank."""
        at = self.axis(name)
        ranks, names = (
            np.ascontiguousarray(np.take(self.ranks, member, axis=at)),
            (*self.names[:at], *self.names[at + 1 :]),
        )
        return Placement(self.device_type, ranks.reshape(ranks.shape or (1,)), names or ("dp",), self.virtual)

    @property
    def pipeline_members(self) -> int:
        """Number of ranks along ``pp``; 1 where there is no such axis."""
        return self.hierarchy[self.names.index(PIPELINE)] if PIPELINE in self.names else 1

    def without_pipeline(self, member: int = 0) -> Placement:
        """The ranks of one member of ``pp``, on the other axes; of a pipeline alone, one data rank."""
        return self._without(PIPELINE, member) if PIPELINE in self.names else self

    def pipeline_member(self, rank: int) -> int:
        """The coordinate of ``rank`` along ``pp``; 0 where there is no such axis."""
        return self.coordinate(rank)[self.axis(PIPELINE)] if PIPELINE in self.names else 0

    def stage_mesh(self, member: int) -> DeviceMesh:
        """The DeviceMesh of one member of ``pp``: tensors on it are held by the ranks of that member only.

        Every rank may ask for it.  Names of its dims say the member, ``dp_of_pp1``: ``mesh["dp"]``, on which other
        members have replicas of a tensor, is another mesh.
        """
        stage = self.without_pipeline(member)
        return stage_mesh_of(stage.device_type, stage.ranks, tuple(f"{n}_of_{PIPELINE}{member}" for n in stage.names))

    def axis(self, name: str) -> int:
        """Position of the axis called ``name``."""
        if name not in self.names:
            raise PlacementError(f"no axis is called {name!r} in {self!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of ``rank``, one number per axis."""
        if not self._coordinates:
            self._coordinates.update({int(self.ranks[at]): at for at in np.ndindex(self.ranks.shape)})
        if rank not in self._coordinates:
            raise PlacementError(f"rank {rank} is not in {self!r}")
        return self._coordinates[rank]

    def line(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks that ``rank`` meets along the axis of that number, itself among them, in the axis' order."""
        at: tuple[Any, ...] = self.coordinate(rank)
        return tuple(map(int, self.ranks[(*at[:axis], slice(None), *at[axis + 1 :])]))

    def mesh(self) -> DeviceMesh:
        """The torch DeviceMesh of these ranks, each of which must call it: the first of equal placements that is asked
        makes process groups, and all of them share these as long as the world lasts."""
        if self.virtual:
            raise PlacementError(
                f"{self!r} is virtual: all its ranks live in this process, so it has no DeviceMesh; "
                "leave out virtual=True and start one process per rank with torchrun"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise PlacementError(
                f"the DeviceMesh of {self!r} needs a process group: start with `torchrun --nproc-per-node="
                f"{self.size}` and call torch.distributed.init_process_group(), or use virtual=True in one process"
            )
        if int(self.ranks.max()) >= dist.get_world_size():
            raise PlacementError(
                f"{self!r} names rank {int(self.ranks.max())}, but the world has ranks 0 to "
                f"{dist.get_world_size() - 1}; start more processes or place on fewer ranks"
            )
        if dist.get_rank() not in self.ranks:
            raise PlacementError(
                f"this process is rank {dist.get_rank()}, which is not in {self!r}; "
                "run the program on the ranks of its placement only"
            )
        mesh = self._known_mesh()
        if mesh is None:
            if self.size < dist.get_world_size() and not ascend(self.ranks):
                raise PlacementError(
                    f"{self!r} is a part of the world; name its ranks in ascending order along each axis"
                )
            mesh = mesh_of(self.device_type, self.ranks, self.names)
            self._mesh = weakref.ref(dist.group.WORLD), weakref.ref(mesh)
        return mesh

    def _known_mesh(self) -> DeviceMesh | None:
        if self._mesh is None or self._mesh[0]() is not dist.group.WORLD:
            return None
        return self._mesh[1]()

    def axes_of(self, mesh: DeviceMesh) -> tuple[int, ...] | None:
        """The placement's axes that the dims of ``mesh`` correspond to, seen from this process; None where the mesh is
        not part of it.

        A part is all of it, or some axes in their order with this process' place on the others, as ``mesh["tp"]`` is.
        Names decide between axes that would do.
        """
        if self.virtual or not dist.is_initialized() or dist.get_rank() not in self.ranks:
            return None
        if self._known_mesh() is mesh:
            return tuple(range(len(self.names)))
        at, count = self.coordinate(dist.get_rank()), len(self.names)
        fits = []
        for axes in itertools.combinations(range(count), mesh.ndim):
            line = self.ranks[tuple(slice(None) if axis in axes else at[axis] for axis in range(count))]
            if line.shape == tuple(mesh.shape) and line.tolist() == mesh.mesh.tolist():
                fits.append(axes)
        named = [axes for axes in fits if tuple(self.names[axis] for axis in axes) == mesh.mesh_dim_names]
        return next(iter(named or fits), None)

    def _key(self) -> tuple[Any, ...]:
        return self.device_type, self.hierarchy, tuple(self.ranks.ravel().tolist()), self.names, self.virtual

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        tail = ", virtual=True" if self.virtual else ""
        text = f"placement('{self.device_type}', {_ranks_text(self.ranks)}, names={self.names!r}{tail})"
        return text.replace("'", '"')

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}


def placement(device_type: str, ranks: Any, names: Sequence[str] | None = None, virtual: bool = False) -> Placement:
    """The placement of ``ranks``, a nested list, range or array whose shape is the hierarchy.

    ``names`` has one name per axis, by default ``("dp",)`` or ``("dp", "tp")``.  A batch is split over the axes whose
    name begins with ``dp``; an axis ``pp`` has pipeline stages.  With ``virtual=True`` all ranks live in this process.
    Raises PlacementError for another device type, ranks that repeat or are not whole numbers, and names that do not
    fit the hierarchy.
    """
    if not (isinstance(device_type, str) and device_type in DEVICE_TYPES):
        raise PlacementError(f"unknown device type {device_type!r}; write one of {', '.join(DEVICE_TYPES)}")
    if not isinstance(virtual, bool):
        raise PlacementError(f"virtual={virtual!r}: say True or False")
    array = _checked_ranks(ranks)
    return Placement(device_type, array, _checked_names(names, array.ndim), virtual)


def from_mesh(mesh: DeviceMesh) -> Placement:
    """The placement of a DeviceMesh, which ``.mesh()`` then gives back."""
    result = placement(mesh.device_type, mesh.mesh.cpu().numpy(), mesh.mesh_dim_names)
    if dist.is_initialized():
        keep(mesh)
        result._mesh = weakref.ref(dist.group.WORLD), weakref.ref(mesh)
    return result


def as_placement(x: Placement | DeviceMesh) -> Placement:
    """A placement, from itself or from a DeviceMesh."""
    if isinstance(x, Placement):
        return x
    if isinstance(x, DeviceMesh):
        return from_mesh(x)
    raise PlacementError(
        f'{x!r} is neither a placement nor a DeviceMesh; make one, for example placement("cpu", range(4))'
    )


def _checked_ranks(ranks: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    text = shorten_repr(ranks)
    try:
        array = np.array(list(ranks))
    except ValueError:
        raise PlacementError(f"ragged ranks {text}: every row needs the same number of ranks") from None
    except TypeError:  # also a 0-d tensor, which only seems to be iterable
        raise PlacementError(f"ranks {text} are not a list; for ranks 0 to n-1 write range(n)") from None
    if array.size == 0:
        raise PlacementError(f"no ranks in {text}; name at least one")
    if not np.issubdtype(array.dtype, np.integer):
        raise PlacementError(f"ranks {text} are not whole numbers")
    if (array < 0).any():
        raise PlacementError(f"negative ranks in {text}; ranks count from 0")
    values, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        twice = ", ".join(str(v) for v in values[counts > 1])
        raise PlacementError(f"ranks {twice} occur more than once in {text}; a rank has one place")
    return array.astype(np.int64)


def _checked_names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...]:
    if names is None:
        if ndim not in _DEFAULT_NAMES:
            raise PlacementError(f"ranks with {ndim} axes need names=, one per axis; only 1 or 2 axes have defaults")
        return _DEFAULT_NAMES[ndim]
    text = shorten_repr(names)
    try:
        chosen = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        raise PlacementError(f"names={text}: give the name of each axis, a list of texts") from None
    if len(chosen) != ndim:
        raise PlacementError(f"{len(chosen)} names {text} for ranks with {ndim} axes; give one name per axis")
    for name in chosen:
        if not isinstance(name, str) or not name.isidentifier():
            name = shorten_repr(name)
            raise PlacementError(f"axis name {name} is not an identifier: letters, digits and _, no leading digit")
    if len(set(chosen)) != len(chosen):
        raise PlacementError(f"an axis name occurs twice in {text}")
    return chosen


def _ranks_text(ranks: np.ndarray[Any, Any]) -> str:
    flat = ranks.ravel()
    if flat.size > 8 and (np.diff(flat) == 1).all():
        text = f"range({flat[0]}, {flat[-1] + 1})" if flat[0] else f"range({flat[-1] + 1})"
        return text if ranks.ndim == 1 else f"numpy.reshape({text}, {list(ranks.shape)})"
    return str(ranks.tolist())
