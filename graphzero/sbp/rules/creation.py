"""Ops that make values from nothing, or from another tensor's shape."""

from __future__ import annotations

from graphzero.sbp.op_call import Call
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import letters, overloads
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp, partial

SIZE = {"size": lambda i, o: o[0]}


@rule(
    overloads("zeros.default", "ones.default", "full.default", "empty.memory_format", "_efficientzerotensor"),
    sizes=SIZE,
)
def created(call: Call) -> str:
    """Every element is equal, so each rank makes its piece alone."""
    return f"->{''.join(letters(len(call.out)))}"


@rule(overloads("new_zeros", "new_ones", "new_full", "new_empty"), sizes=SIZE)
def new(call: Call) -> list[Signature]:
    """Only dtype and device of the operand are read: whatever its SBP, each rank makes its piece alone."""
    operand = [B, *_splits(call.shape), *map(partial, REDUCTIONS)]
    return [Signature((have,), (want,)) for want in (B, *_splits(call.out)) for have in operand]


def _splits(shape: tuple[int, ...]) -> list[Sbp]:
    return [S(i) for i, size in enumerate(shape) if size > 1]


rule(overloads("zeros_like", "ones_like", "full_like", "empty_like"), "?...->...")
rule(overloads("zero"), "?...->...")


@rule(overloads("new_empty_strided"))
def new_strided(call: Call) -> str:
    """Its strides are of the whole."""
    return f"?{'_' * len(call.shape)}->{'_' * len(call.out)}"
