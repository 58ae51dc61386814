"""The one law that tests every rule: shard the inputs as a signature says, run the op on each rank, join the
outputs as it says, and the result is the op itself.

Run it in float64: float32 gives false alarms.  It is for tests of rules, graphzero's and yours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from graphzero.errors import SbpError
from graphzero.sbp.op_call import op_name, overload_of
from graphzero.sbp.rank_call import local_args, offset_form
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.registry import has_rule, signatures
from graphzero.sbp.shards import chunk, cut, joined, piece_shape, steps_of
from graphzero.sbp.signature import Signature, TensorMeta
from graphzero.sbp.types import Nd, Sbp

Op = Callable[..., Any]


SECTIONS = (2, 3)


def violations(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int, values: bool = True) -> list[str]:
    """Signatures of ``op`` on these real arguments that break the law on ``ranks`` ranks: one line each.

    Splits in SECTIONS are tried too.  ``values=False`` compares shapes and dtypes alone, for ops that leave memory as
    it is.
    """
    whole = _outputs(op(*args, **kwargs))
    metas, output_metas = _metas(args, kwargs, whole)
    problems = []
    for signature in signatures(op, *metas, output_metas, ranks, SECTIONS):
        problem = _broken(op, (tuple(args), dict(kwargs)), whole, signature, ranks, values)
        if problem:
            problems.append(f"{op_name(op)} on {ranks} ranks, {signature}: {problem}")
    return problems


def check_rule(op: Op, *samples: Sequence[Any], ranks: Sequence[int] = (2, 3, 4)) -> tuple[Signature, ...]:
    """Assert that the rule of ``op`` keeps the law on real arguments; a test of a rule is one call of it.

    Each sample is a tuple of the op's positional arguments; a dict at its end holds the keyword ones.  Give float64
    tensors that differ in every element, one sample per branch of the rule, and sizes that some of ``ranks`` divide
    and some do not.

    Returns:
        Every signature that the rule allows on some sample, each proven on it: all-B first.

    Raises:
        SbpError: the op has no rule, the line does not fit a sample, or there is no sample.
        AssertionError: the signatures under which ranks do not compute what the op computes, one a line; or the
            rule allows nothing but all-B.
    """
    op = overload_of(op)
    if not has_rule(op):
        raise SbpError(f'{op_name(op)} has no rule: give it one, gz.sbp.rule({op_name(op)}, "mk,kn->mn")')
    if not samples:
        raise SbpError(f"check_rule({op_name(op)}) needs arguments to try the rule on: check_rule(op, (x, w), ...)")
    broken: list[str] = []
    allowed: dict[Signature, None] = {}
    for sample in samples:
        *args, last = (*sample, None) if not sample or not isinstance(sample[-1], dict) else sample
        kwargs = last or {}
        for count in ranks:
            broken += violations(op, args, kwargs, count)
            metas, output_metas = _metas(args, kwargs, _outputs(op(*args, **kwargs)))
            allowed |= dict.fromkeys(signatures(op, *metas, output_metas, count))
    if broken:
        raise AssertionError("the rule breaks the law:\n  " + "\n  ".join(broken))
    if len(allowed) == 1:
        raise AssertionError(f"{op_name(op)}: the rule allows nothing but {next(iter(allowed))} on these samples")
    return tuple(allowed)


def _metas(
    args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor | None]
) -> tuple[tuple[Any, Any], list[TensorMeta | None]]:
    """Arguments and outputs with a TensorMeta for each tensor."""
    of_args, of_kwargs = tree_map(lambda x: meta_of(x) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs)))
    return (of_args, of_kwargs), [meta_of(x) if x is not None else None for x in results]


def meta_of(x: Tensor) -> TensorMeta:
    """Shape and dtype of a real tensor."""
    return TensorMeta(tuple(x.shape), x.dtype)


def _outputs(result: Any) -> list[Tensor | None]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _broken(
    op: Op, call: tuple[Any, Any], whole: list[Tensor | None], signature: Signature, ranks: int, values: bool
) -> str:
    leaves, outline = tree_flatten(call)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    expected = [x for x in whole if x is not None]
    pieces = [shard(x, sbp, ranks, seed=i) for i, (x, sbp) in enumerate(zip(tensors, signature.inputs, strict=True))]
    inputs = [(x.shape, (sbp,)) for x, sbp in zip(tensors, signature.inputs, strict=True)]
    outputs = [(x.shape, (sbp,)) for x, sbp in zip(expected, signature.outputs, strict=True)]
    results: list[list[Tensor]] = []
    for rank in range(ranks):
        mine = iter([p[rank] for p in pieces])
        args, kwargs = tree_unflatten([next(mine) if isinstance(x, Tensor) else x for x in leaves], outline)

        def local(shape: Sequence[int], nd: Nd, rank: int = rank) -> Sequence[int]:
            return piece_shape(shape, nd, (ranks,), (rank,))

        def places(shape: Sequence[int], nd: Nd, rank: int = rank) -> list[tuple[int, int] | None]:
            steps = enumerate(zip(shape, steps_of(shape, nd), strict=True))
            return [
                (chunk(size if step == 1 else step, ranks, rank)[0], step) if nd[0].dim == dim else None
                for dim, (size, step) in steps
            ]

        args, kwargs = local_args(op, args, kwargs, inputs, outputs, local)
        called, kwargs = offset_form(op, args, kwargs, inputs, outputs, places)
        try:
            results.append([x for x in _outputs(called(*args, **kwargs)) if x is not None])
        except (RuntimeError, IndexError, ValueError) as error:
            return f"rank {rank} fails: {str(error).splitlines()[0]}"
    tolerance = _tolerance(tensors + expected)
    return "; ".join(_compared(expected, signature.outputs, results, values, tolerance))


def _compared(
    expected: list[Tensor], sbps: Nd, results: list[list[Tensor]], values: bool, tolerance: float
) -> Iterator[str]:
    for i, (want, sbp) in enumerate(zip(expected, sbps, strict=True)):
        ranks = [result[i] for result in results]
        if sbp.is_broadcast and any(not _same(x, ranks[0], values, tolerance) for x in ranks):
            yield f"output {i} differs between ranks"
        elif sbp.is_split and any(x.shape != piece_shape(want.shape, (sbp,), (len(ranks),), (r,))
                                  for r, x in enumerate(ranks)):  # fmt: skip
            yield f"output {i} is not cut as chunk cuts"
        elif not _same(join(ranks, sbp), want, values, tolerance):
            yield f"output {i} is not the op's own"


def _tolerance(tensors: list[Tensor]) -> float:
    """The tolerance for rounding of values around ten, by the coarsest dtype involved."""
    real = [x.dtype for x in tensors if x.dtype.is_floating_point or x.dtype.is_complex]
    return max([1e-10, *(64 * torch.finfo(dtype).eps for dtype in real)])


def _same(have: Tensor, want: Tensor, values: bool, tolerance: float) -> bool:
    if have.shape != want.shape or have.dtype != want.dtype:
        return False
    return not values or torch.allclose(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def shard(x: Tensor, sbp: Sbp, ranks: int, seed: int = 0) -> list[Tensor]:
    """The piece of ``x`` of each rank.  Partial values are random, and differ from rank to rank."""
    if sbp.is_broadcast:
        return [x.clone() for _ in range(ranks)]
    if sbp.is_split:
        pieces = (cut(x, (sbp,), (ranks,), (rank,)) for rank in range(ranks))
        return [p.clone(memory_format=torch.contiguous_format) for p in pieces]
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        drawn = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        return drawn > 0.5 if x.dtype == torch.bool else (drawn * 10).to(x.dtype)

    if sbp.reduction == "sum" and x.dtype == torch.bool:  # read for its shape alone
        return [noise() for _ in range(ranks)]
    if sbp.reduction == "sum":
        parts = [noise() for _ in range(ranks - 1)]
        return [x - sum(parts, torch.zeros_like(x)), *parts]
    if x.dtype == torch.bool:
        others = [(x & noise()) if sbp.reduction == "max" else (x | noise()) for _ in range(ranks - 1)]
        return [*others, x.clone()]
    sign = -1 if sbp.reduction == "max" else 1
    owner = torch.randint(ranks, x.shape, generator=generator)  # which rank holds the value at a place
    return [torch.where(owner == rank, x, x + sign * noise().abs()) for rank in range(ranks)]


def join(pieces: list[Tensor], sbp: Sbp) -> Tensor:
    """The global tensor of which the ranks hold ``pieces``."""
    if sbp.is_broadcast:
        return pieces[0]
    if sbp.is_split:
        return joined([p for p in pieces if p.shape[sbp.dim]] or pieces[:1], sbp.dim, sbp.sections)
    return reduce(REDUCTIONS[sbp.reduction], pieces)
