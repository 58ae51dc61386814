"""Scaled dot product attention, graphzero's own op and ATen's CPU kernel.

Queries may be split: where a causal mask counts their places, graphzero's op is told those of a rank, and ATen's cannot
be.  Keys stay whole: a softmax over pieces needs more than a sum to be joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import Offset, rule
from graphzero.sbp.rules._factor_lines import broadcast, overloads
from graphzero.sbp.signature import TensorMeta


def _mask(mask: TensorMeta | None, queries: str) -> str:
    return "" if mask is None else ",~" + broadcast(["b", "h", queries, "_"], mask.shape)


def forward(q: str, mask: TensorMeta | None, draws: bool = False) -> str:
    more = f",~bh{q}" if draws else ""
    return f"~bh{q}D,~bhKD,~bhKE{_mask(mask, q)}{more}->bh{q}E,bh{q}"


def backward(q: str, mask: TensorMeta | None, draws: bool = False) -> str:
    more = f",~bh{q}" if draws else ""
    return f"bh{q}E,~bh{q}D,~bhKD,~bhKE,~bh{q}E,~bh{q}{_mask(mask, q)}{more}->bh{q}D,bhKD,bhKE"


def _whole(causal: bool) -> str:
    """The dim of queries where no piece is told its place: upper case, which is not split, under a causal mask."""
    return "Q" if causal else "q"


def _own(line: Callable[..., str], queries: Callable[[bool], str] = lambda causal: "q") -> Callable[[Call], str]:
    return lambda call: line(queries(call["causal"]), call["bias"], call["draws"] is not None)


for _op, _line, _queries in ((ATTENTION, forward, 0), (ATTENTION_BACKWARD, backward, 1)):
    rule(_op, _own(_line, _whole), nonempty=True, offset=Offset(_op, _own(_line), _queries, 2, "causal", True))


def block(rows: str, call: Call) -> str:
    more = f",~bh{rows}" if call["draws"] is not None else ""
    seen = f",~bh{rows}E,~bh{rows}" if call["before"] is not None else ""
    return f"~bh{rows}D,~bh{rows}D,~bh{rows}E{_mask(call['bias'], rows)}{more}{seen}->bh{rows}E,bh{rows}"


def block_backward(rows: str, call: Call) -> str:
    more = f",~bh{rows}" if call["draws"] is not None else ""
    operands = f"bh{rows}E,~bh{rows}D,~bh{rows}D,~bh{rows}E,~bh{rows}E,~bh{rows}{_mask(call['bias'], rows)}{more}"
    return f"{operands}->bh{rows}D,bh{rows}D,bh{rows}E"


for _op, _block, _queries in ((ATTENTION_BLOCK, block, 0), (ATTENTION_BLOCK_BACKWARD, block_backward, 1)):
    _split = Offset(_op, partial(_block, "q"), _queries, 2, takes_step=True, cut=("pieces", "sections"))
    rule(_op, partial(_block, "Q"), nonempty=True, offset=_split)


def _flash(call: Call, line: Callable[..., str]) -> str:
    return line(_whole(call["is_causal"]), call["attn_mask"])


rule(overloads("_scaled_dot_product_flash_attention_for_cpu"), partial(_flash, line=forward), nonempty=True)
rule(overloads("_scaled_dot_product_flash_attention_for_cpu_backward"), partial(_flash, line=backward), nonempty=True)
