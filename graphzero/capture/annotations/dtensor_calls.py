"""Calls of DTensor in a module's forward, recorded while build is traced.

``torch.distributed.tensor.parallel.parallelize_module`` leaves hooks that make DTensors of inputs, redistribute them,
and hand out local tensors.  Build is written for one device, where every value is whole: so ``from_local`` and
``to_local`` are the identity, and a redistribution pins the value on the axes of its mesh, as ``gz.to_global`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphzero import _compat
from graphzero.capture.annotations.pins import pin_value
from graphzero.sbp.dtensor import from_placements
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Sbp


def dtensor_calls(placement: Placement) -> AbstractContextManager[None]:
    """Tensors have a DTensor's methods here; see above."""
    last: list[DeviceMesh | None] = [None]  # of the last ``from_local``: a plain tensor knows of no mesh
    pinned: dict[Any, tuple[Tensor, Tensor]] = {}  # what q, k and v ask for alike is moved once

    def from_local(local: Tensor, device_mesh: DeviceMesh | None = None, *args: Any, **kwargs: Any) -> Tensor:
        last[0] = device_mesh
        return local

    def same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x

    def redistribute(
        x: Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **kwargs: Any
    ) -> Tensor:
        mesh = device_mesh or last[0]
        pins = None if mesh is None or placements is None else _pins(x, placement, mesh, placements)
        if pins is None:
            return x
        key = id(x), x._version, torch.is_grad_enabled(), tuple(pins)
        if key not in pinned:
            pinned[key] = x, pin_value(x, pins)  # with x, so that its id stays its own
        return pinned[key][1]

    return _compat.patched_all(
        [
            (DTensor, "from_local", staticmethod(from_local)),
            (Tensor, "to_local", same),
            (Tensor, "full_tensor", same),
            (Tensor, "redistribute", redistribute),
            (Tensor, "placements", ()),  # no DTensor's, so that hooks which compare redistribute
        ]
    )


def _pins(x: Tensor, placement: Placement, mesh: DeviceMesh, placements: Sequence[Any]) -> list[Sbp | None] | None:
    """One SBP per axis of the placement; None where the mesh is not part of it, or where no SBP expresses the
    placements."""
    with _compat.without_modes():  # a mesh keeps its ranks in a tensor
        axes = placement.axes_of(mesh)
    if axes is None or len(axes) != len(placements):
        return None
    pins: list[Sbp | None] = [None] * len(placement.names)
    for axis, item in zip(axes, placements, strict=True):
        if isinstance(item, (Replicate, Shard)):
            (pins[axis],) = from_placements((item,), x.dim())
    return pins if any(pins) else None
