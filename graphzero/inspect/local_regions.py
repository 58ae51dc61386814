"""A ``local_region`` on one device: the function is called once for each rank, with that rank's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.capture.annotations.local_region_sbps import RegionSignature, checked_results
from graphzero.capture.randomness import Draws
from graphzero.ops import RANK_KEY
from graphzero.runtime.tensors.shards import coordinates, join, piece
from graphzero.sbp.placement import Placement


class EagerRegions:
    """Carries out regions on whole tensors, as the ranks of ``placement`` would; ``draws``: the step's, if any."""

    def __init__(self, placement: Placement, draws: Draws | None) -> None:
        self.placement, self.draws = placement, draws

    def __call__(
        self, fn: Callable[..., Any], in_sbp: Any, out_sbp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hierarchy = self.placement.hierarchy
        flat, spec = pytree.tree_flatten((args, kwargs))
        count = sum(isinstance(x, Tensor) for x in flat)
        ends = RegionSignature(in_sbp, count, out_sbp, self.placement)
        per_rank: list[list[Any]] = []
        start = self.draws.count if self.draws is not None else 0
        for position in range(self.placement.size):
            nds = iter(ends.ins)
            local = [piece(x, next(nds), hierarchy, position) if isinstance(x, Tensor) else x for x in flat]
            given_args, given_kwargs = pytree.tree_unflatten(local, spec)
            results, out_spec = checked_results(self._on_rank(fn, given_args, given_kwargs, ends, position, start))
            per_rank.append(results)
        outs = iter(ends.outs_of(sum(isinstance(y, Tensor) for y in per_rank[0])))
        columns = zip(*per_rank, strict=True)
        whole = [join(ys, next(outs), hierarchy) if isinstance(ys[0], Tensor) else ys[0] for ys in columns]
        return pytree.tree_unflatten(whole, out_spec)

    def _on_rank(self, fn: Any, args: Any, kwargs: Any, ends: RegionSignature, position: int, start: int) -> Any:
        if self.draws is None:
            return fn(*args, **kwargs)
        at = coordinates(self.placement.hierarchy, position)
        key, self.draws.count = self.draws.key, start
        try:
            self.draws.key = RANK_KEY(key, [at[axis] for axis in ends.apart])
            return fn(*args, **kwargs)
        finally:
            self.draws.key = key
