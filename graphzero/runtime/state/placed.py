"""What the user has placed elsewhere, or in a way that a step cannot keep, is refused before anything is compiled."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.errors import PlacementError, SbpError
from graphzero.runtime.state.modules import Found
from graphzero.runtime.tensors.shards import check_mesh
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.dtensor import annotation, said_placement
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd


def check_kept(nd: Nd, what: str) -> None:
    """Raise SbpError for an SBP that nothing can have which stays from step to step."""
    if any(sbp.is_partial for sbp in nd):
        raise SbpError(
            f"{what} cannot be ({', '.join(map(str, nd))}): a partial is the sum of what the ranks hold, and an update "
            "needs the value itself; make it B, or split it: gz.sbp.S(0)"
        )


def check_here(x: Tensor, placement: Placement, what: str) -> None:
    """Raise PlacementError for a tensor that its user has put on other ranks than those of ``placement``."""
    if isinstance(x, DTensor):
        check_mesh(x, placement, what)
        return
    said = said_placement(x)
    if said is not None and said != placement:
        raise PlacementError(
            f"{what} was placed on {said!r} by gz.to_global, the graph runs on {placement!r}; place it there "
            "(gz.to_global once more), or make the Graph on its placement: Graph(placement)"
        )


def check_held(found: Found, placement: Placement) -> None:
    """Both, for a parameter or buffer."""
    if isinstance(found.tensor, DTensor):
        nd = nd_on(found.tensor, placement, found.path)
    else:
        check_here(found.tensor, placement, found.path)
        known = annotation(found.tensor)
        nd = known[1] if known is not None else ()
    check_kept(nd, f"the {'parameter' if found.kind == 'param' else found.kind} {found.path}")
