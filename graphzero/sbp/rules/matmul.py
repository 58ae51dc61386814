"""Matrix products."""

from __future__ import annotations

from graphzero.sbp.registry import Call, rule
from graphzero.sbp.rules._write import broadcast, overloads

PRODUCTS = {
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "mv": "mk,k->m",
    "dot": "k,k->",
    "vdot": "k,k->",
}
ADDED = {
    "addmm": "mk,kn->mn",
    "baddbmm": "bmk,bkn->bmn",
    "addmv": "mk,k->m",
    "addr": "m,n->mn",
    "addbmm": "bmk,bkn->mn",
}

for _name, _line in PRODUCTS.items():
    rule(overloads(f"{_name}.default"), _line)


@rule(overloads(*(f"{name}.default" for name in ADDED)))
def added(call: Call) -> str:
    """A product and a term that broadcasts to it; with beta=0 the term is not read, which all-B and splits allow."""
    line = ADDED[call.op.__name__.split(".")[0]]
    return f"{broadcast(line.split('->')[1], call.shape)}+{line}"
