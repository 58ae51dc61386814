"""What ranks tell each other beside the program: that they run the same one, and rank 0's values at the start.

Everything goes through a CPU group of its own, so that it neither waits for nor disturbs a program's collectives.
A disagreement, or a failure on one rank, raises on every rank; nobody hangs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import errors
from graphzero.errors import CaptureError, GraphZeroError
from graphzero.runtime.launch import before_tear_down, has_fake_world
from graphzero.sbp.placement import Placement

_groups: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # ranks -> (the world it was made in, group)
before_tear_down(_groups.clear)
_SHOWN = 8


def digest(*texts: str) -> int:
    """62 bits of a hash that is the same in every process."""
    joined = "\0".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big") >> 2


class Ranks:
    """The ranks of one placement, as far as they talk.  On virtual and fake worlds and worlds of one: silent.

    waited: seconds that this rank has spent in ``agree`` until all had come.
    """

    def __init__(self, placement: Placement):
        self.placement = placement
        self.waited = 0.0
        self._ids: list[int] = sorted(placement.ranks.ravel().tolist())  # in the order of their group

    @property
    def active(self) -> bool:
        return not self.placement.virtual and self.placement.size > 1 and not has_fake_world()

    def agree(
        self, what: str, value: int, parts: Callable[[], Mapping[str, str]], failure: Exception | None,
        wish: bool = False,
    ) -> bool:  # fmt: skip
        """The first rank's ``wish``, on every rank.

        Check that ``value`` is the same on every rank and that none has failed; raises on all of them if not.

        what: names the thing in the message.  parts: the facts behind ``value`` by name, called only to explain.
        failure: this rank's own exception, which it raises after telling the others.
        """
        if self.active:
            wish = wish and dist.get_rank() == int(self.placement.ranks.flat[0])
            mine = torch.tensor([value, -value, failure is not None, wish], dtype=torch.int64)
            began = time.perf_counter()
            try:
                dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group())
            except RuntimeError as error:
                raise self._gone(what, error) from error
            finally:
                self.waited += time.perf_counter() - began
            highest, lowest, failed, wish = mine.tolist()
            if failed:
                raise self._first_failure(what, failure)
            if highest != -lowest:
                raise self._difference(what, parts())
        if failure is not None:
            raise failure
        return bool(wish)

    def share(self, make: Callable[[], Any]) -> Any:
        """The first rank's value of ``make()``, on every rank."""
        if not self.active:
            return make()
        first = int(self.placement.ranks.flat[0])
        box = [make() if dist.get_rank() == first else None]
        dist.broadcast_object_list(box, src=first, group=self._group())
        return box[0]

    def _gone(self, what: str, error: RuntimeError) -> GraphZeroError:
        return GraphZeroError(
            f"rank {dist.get_rank()} waited for the other ranks to agree on {what}, and the connection to one of them "
            f"is gone: {str(error).strip().splitlines()[-1][:200]}\n  It has ended, by an exception of its own (its "
            "output says which) or because it makes fewer calls; every rank must call a Graph equally often"
        )

    def _first_failure(self, what: str, failure: Exception | None) -> Exception:
        mine = None if failure is None else (type(failure).__name__, str(failure))
        for rank, found in zip(self._ids, self.collect(mine), strict=True):
            if found is not None and failure is None:
                kind = getattr(errors, found[0], None)
                known = kind if isinstance(kind, type) and issubclass(kind, GraphZeroError) else GraphZeroError
                name = "" if known is not GraphZeroError else f"{found[0]}: "
                return known(f"rank {rank} could not prepare {what}, so no rank runs it: {name}{found[1]}")
        assert failure is not None
        return failure

    def _difference(self, what: str, parts: Mapping[str, str]) -> Exception:
        everyone = self.collect(dict(parts))
        names = dict.fromkeys(name for found in everyone for name in found)
        lines = []
        for name in names:
            values = [found.get(name, "absent") for found in everyone]
            if len(set(values)) > 1:
                lines.append(f"  {name}: " + "; ".join(_by_value(self._ids, values)))
        more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = "\n".join(lines[:_SHOWN] + more) or "  (their descriptions are equal; their hashes are not)"
        return CaptureError(
            f"the ranks do not agree on {what}:\n{shown}\n  Every rank must call the graph with inputs of the same "
            "structure, shapes and dtypes and modules in the same state; pad or drop uneven batches (drop_last=True)"
        )

    def collect(self, mine: Any) -> list[Any]:
        """Every rank's ``mine``, in ascending order of ranks; ``[mine]`` where ranks do not talk."""
        if not self.active:
            return [mine]
        found: list[Any] = [None] * self.placement.size
        dist.all_gather_object(found, mine, group=self._group())
        return found

    def _group(self) -> Any:
        key = tuple(self._ids)
        found = _groups.get(key)
        if found is None or found[0] is not dist.group.WORLD:
            # made by its members alone, so that groups of some ranks and of all may come in any order
            group = dist.new_group(list(key), backend="gloo", use_local_synchronization=True)
            found = _groups[key] = (dist.group.WORLD, group)
        return found[1]


def _by_value(ranks: list[int], values: list[str]) -> list[str]:
    """ "ranks 0, 1: a" for each distinct value."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return [f"{_names(who)}: {value}" for value, who in found.items()]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def tensor_text(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
