"""Matrix products."""

from __future__ import annotations

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import broadcast, letters, overloads

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


rule(overloads("_cdist_forward"), "~...m_,~...n_->...mn", nonempty=True)
rule(overloads("_euclidean_dist"), "~...m_,~...n_->...mn", nonempty=True)
rule(overloads("_cdist_backward"), "...mn,~...m_,~...n_,~...mn->...m_", nonempty=True)


@rule(overloads("_trilinear"))
def trilinear(call: Call) -> str:
    """Three factors, each with dims of size one put in where ``expand`` says, and a sum over ``sumdim``."""
    dims = letters(len(call.shape) + len(call["expand1"]))
    factors = ("".join(d for i, d in enumerate(dims) if i not in call[f"expand{n}"]) for n in (1, 2, 3))
    return f"{','.join(factors)}->{''.join(d for i, d in enumerate(dims) if i not in call['sumdim'])}"


@rule(overloads(*(f"{name}.default" for name in ADDED)))
def added(call: Call) -> str:
    """A product and a term that broadcasts to it; with beta=0 the term is not read, which all-B and splits allow."""
    line = ADDED[call.op.__name__.split(".")[0]]
    return f"{broadcast(line.split('->')[1], call.shape)}+{line}"
