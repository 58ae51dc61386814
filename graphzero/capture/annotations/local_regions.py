"""Per-rank code inside build: what ``gz.local_region`` is while a step is traced.

``as_local`` gives each rank its piece of a global value; ``as_global`` makes a global value of what the ranks computed.
The ops between them are traced on tensors of local shape.  In the graph they are ``B``, which here only says that every
rank works on all of its own tensor.  The gradient of each of the two ops is the other one (``ops.dual``), so backward
of a region is per-rank code too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.annotations.local_region_sbps import (
    RegionSignature,
    checked_results,
    global_shape,
    local_shape,
)
from graphzero.capture.problems import problem, problem_here
from graphzero.capture.randomness import Draws
from graphzero.ir import value
from graphzero.ops import AS_GLOBAL, AS_LOCAL, RANK_KEY
from graphzero.sbp.placement import Placement
from graphzero.sbp.shards import LocalStart
from graphzero.sbp.types import B, Nd, partial

Runs = Callable[[Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, Any]], Any]
_runs: ContextVar[Runs | None] = ContextVar("graphzero_regions", default=None)
_inside: ContextVar[RegionSignature | None] = ContextVar("graphzero_inside_region", default=None)

_NESTED = "Call the function itself there: what runs inside of a region is per-rank code already"
_WRITES = "Clone it first: x = x.clone(); a module that works in place has an argument for it (inplace=False)"
_OUTER = (
    "What a region is given from outside, a parameter or a buffer, it reads as B. Return the new value, say by out_sbp "
    "what the ranks' values are to each other, and write it outside; batch norm that trains goes outside too"
)
_LEAKS = (
    "Return it from the function of the region, so that out_sbp says what it is outside. Where it comes from "
    "torch.utils.checkpoint inside of the region, put the checkpoint around the region"
)


def region_runs() -> Runs | None:
    """The callback that carries out a region now; None outside of a Graph, where the region's function is called
    directly."""
    return _runs.get()


def regions(runs: Runs) -> AbstractContextManager[None]:
    """While this is open, ``runs(fn, in_sbp, out_sbp, args, kwargs)`` carries out every region."""
    return _compat.assigned(_runs, runs)


def condition_of_all_ranks(ok: Tensor) -> Tensor:
    """Whether a 0-d condition holds; inside of a region on every rank."""
    ends = _inside.get()
    if ends is None:
        return ok
    words = ends.words((partial("min"),) * len(ends.placement.names))
    met: Tensor = AS_GLOBAL(ok.to(torch.int32), words, [])
    return met.bool()


def refuse_inside(what: str, hint: str) -> None:
    """Raise CaptureError where per-rank code is being traced."""
    if _inside.get() is not None:
        raise problem_here(what, hint)


# ---- tracing


class TracedRegions:
    """Carries out the regions of one trace.

    placement, draws: of the step that is traced.
    """

    def __init__(self, placement: Placement, draws: Draws) -> None:
        self.placement, self.draws = placement, draws

    def __call__(
        self, fn: Callable[..., Any], in_sbp: Any, out_sbp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        refuse_inside("a local_region is nested in a local_region", _NESTED)
        flat, spec = pytree.tree_flatten((args, kwargs))
        count = sum(isinstance(x, Tensor) for x in flat)
        ends = RegionSignature(in_sbp, count, out_sbp, self.placement)
        outer = _RegionMode(ends)
        numbers = iter(range(count))
        local = [outer.give(x, next(numbers)) if isinstance(x, Tensor) else x for x in flat]
        given_args, given_kwargs = pytree.tree_unflatten(local, spec)
        with self._inside_of(ends), outer:
            results, out_spec = checked_results(fn(*given_args, **given_kwargs))
        results = [outer.local(y) if isinstance(y, Tensor) else y for y in results]
        outer.check()
        outs = enumerate(ends.outs_of(sum(isinstance(y, Tensor) for y in results)))
        whole = [self._global(y, ends, *next(outs)) if isinstance(y, Tensor) else y for y in results]
        return pytree.tree_unflatten(whole, out_spec)

    def _global(self, y: Tensor, ends: RegionSignature, number: int, nd: Nd) -> Tensor:
        shape = global_shape(y, nd, self.placement, f"result {number}")
        return AS_GLOBAL(y, ends.words(nd), shape)  # type: ignore[no-any-return]

    @_compat.contextmanager
    def _inside_of(self, ends: RegionSignature) -> Iterator[None]:
        """Ranks draw from keys of their own along the axes on which they do other work."""
        key = self.draws.key
        try:
            with _compat.assigned(_inside, ends):
                self.draws.key = RANK_KEY(key, ends.apart) if ends.apart else key
                yield
        finally:
            self.draws.key = key


class _RegionMode(TorchFunctionMode):
    """Runs the function of one region: a tensor that it did not make is read as B, all of it on every rank.

    given: (what it is, the local tensor, its version when it came in).
    """

    def __init__(self, ends: RegionSignature) -> None:
        super().__init__()
        self.ends = ends
        self.start = _compat.last_traced()
        self.given: list[tuple[str, Tensor, int]] = []
        self.read: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # x.shape, x.T: what it gives is looked at where it is used
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, self.local, (args, kwargs or {}))
        return func(*args, **kwargs)

    def give(self, x: Tensor, number: int) -> Tensor:
        """A tensor argument, as the rank holds it."""
        what, nd = f"tensor argument {number}", self.ends.ins[number]
        return self._enter(x, nd, local_shape(x, nd, self.ends.placement, what), what)

    def local(self, x: Tensor) -> Tensor:
        """``x`` as the function may use it."""
        if _compat.is_traced_after(x, self.start):
            return x
        if id(x) not in self.read:
            nd = (B,) * len(self.ends.placement.names)
            what = f"a tensor of shape {list(x.shape)} from outside"
            with torch.enable_grad():
                self.read[id(x)] = (x, self._enter(x, nd, list(x.shape), what))
        return self.read[id(x)][1]

    def _enter(self, x: Tensor, nd: Nd, shape: list[int], what: str) -> Tensor:
        local: Tensor = AS_LOCAL(x, self.ends.words(nd), shape)
        self.given.append((what, local, local._version))
        return local

    def check(self) -> None:
        """Refuse a function that has written into what it was given."""
        for what, local, version in self.given:
            if local._version != version:
                hint = _OUTER if what.endswith("outside") else _WRITES
                raise problem_here(f"the function of a local_region writes in place to {what}", hint)


# ---- the captured graph


def finish_regions(graph: fx.Graph, placement: Placement, losses: Sequence[fx.Node]) -> None:
    """Check that per-rank values stay in their regions, and write down which rank draws from which key."""
    inside: set[fx.Node] = set()
    free = {node for node in graph.find_nodes(op="placeholder") if node.meta["role"].kind == "seed"}
    # made from nothing but these: the same on every rank, inside and outside
    for node in graph.nodes:
        if node.target is RANK_KEY:
            axes: Any = node.args[1]
            starts = [LocalStart(placement.hierarchy[i], placement.names[i]) for i in axes]
            node.args = (node.args[0], starts)
            inside.add(node)
            continue
        operands = [x for x in node.all_input_nodes if not value.is_scalar(x)]
        local = [x for x in operands if x in inside]
        if node.op == "call_function" and all(x in free for x in operands):
            free.add(node)
        stray = node.op == "output" or node.target is AS_LOCAL or any(x not in inside | free for x in operands)
        if local and stray:
            raise _stray(local[0])
        if node.target is AS_LOCAL or (local and node.target is not AS_GLOBAL):
            inside.add(node)
    for loss in losses:
        if loss in inside:
            raise _stray(loss)


def _stray(node: fx.Node) -> Exception:
    source = value.source_of(node)
    shape = getattr(node.meta.get("type"), "shape", None)
    what = f"a value that a rank made in a local_region{f', of shape {list(shape)},' if shape is not None else ''}"
    return problem(f"{what} is used outside of it", _LEAKS, [source] if source else None)
