"""The ops ``as_local`` and ``as_global``: the two ends of per-rank code.

``sbp`` says, per placement axis, what the ranks' tensors are of the global one (``SAME``: equal, and made by equal
work; ``FREE``: the region does not concern the axis, along which values are split or partial as anywhere), ``shape``
what comes out.  A rank that executes them hands on what it holds.
"""

from __future__ import annotations

import torch

from graphzero.errors import SbpError
from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("as_local(Tensor x, str[] sbp, int[] shape) -> Tensor")
LIBRARY.define("as_global(Tensor x, str[] sbp, int[] shape) -> Tensor")
AS_LOCAL = torch.ops.graphzero.as_local.default
AS_GLOBAL = torch.ops.graphzero.as_global.default
SAME = "="
FREE = "*"
_DUAL = {"B": "P", "P": "B"}


def dual(sbp: list[str]) -> list[str]:
    """The SBP of the gradient of ``as_local`` or ``as_global`` on each axis, from the SBP of the value.

    Of what every rank holds whole, each rank's gradient is one summand: B and P change places.  A split stays, and so
    does what ranks hold equal because they do the same.
    Raises SbpError for maxima and minima of the ranks.
    """
    greatest = next((word for word in sbp if word[0] == "P" and word != "P"), None)
    if greatest is not None:
        raise SbpError(
            f"a local_region has no gradient through {greatest}: it is not known which rank's value it is. Give it a "
            "detached tensor, or return one"
        )
    return [_DUAL.get(word, word) for word in sbp]


def _save_end(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.sbp, _ = inputs
    ctx.shape = list(x.shape)


for _end in ("as_local", "as_global"):
    LIBRARY.impl(_end, lambda x, sbp, shape: x.clone(), ANYWHERE)
    LIBRARY.impl(_end, lambda x, sbp, shape: x.new_empty(shape), "Meta")
torch.library.register_autograd(
    "graphzero::as_local",
    lambda ctx, grad: (AS_GLOBAL(grad, dual(ctx.sbp), ctx.shape), None, None),
    setup_context=_save_end,
    lib=LIBRARY,
)
torch.library.register_autograd(
    "graphzero::as_global",
    lambda ctx, grad: (AS_LOCAL(grad, dual(ctx.sbp), ctx.shape), None, None),
    setup_context=_save_end,
    lib=LIBRARY,
)
