"""``gz.local_region``: a function that is written for one rank, inside a build that is written for one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from graphzero.capture import region_runs
from graphzero.errors import SbpError
from graphzero.sbp.types import Sbp


def local_region(fn: Callable[..., Any], in_sbp: Any, out_sbp: Any) -> Callable[..., Any]:
    """Declare ``fn`` as per-rank code, with the SBPs of its arguments and results.

    If the region is called inside ``build`` or a module's forward, each tensor argument is boxed to its SBP.  ``fn``
    sees this rank's piece of it, and the results of all ranks are combined as ``out_sbp`` says.  Other tensors that
    ``fn`` reads, such as parameters of a module, are read whole (``B``).  Outside of a Graph the region is ``fn``.

    Args:
        fn: a function of tensors (in dicts, lists, tuples) and plain values.  It is traced once, on local shapes.
        in_sbp: of the tensor arguments: one SBP for all of them, or a list with one for each.  On an n-d placement an
            SBP is a tuple with one entry for each axis, or a dict by axis name, with ``B`` for the other axes.
        out_sbp: of the tensors that ``fn`` returns, in the same form.  ``S(i)``: the results are pieces, in rank
            order; ``P``: they are summands; ``P(max)``, ``P(min)``: the value is their maximum or minimum, and has no
            gradient; ``B``: they are equal.

    Gradients of ``B`` arguments, and of tensors that are read whole, are summed over ranks; those of ``S(i)`` are
    pieces.  A ``P`` argument is one summand on each rank, so ``fn`` has to be linear in it.

    Raises:
        SbpError: for an object that is not an SBP; in a call, for too few or too many SBPs, a dim that does not exist
            or does not divide, and results that are not tensors.
        CaptureError: in a call, for a region inside a region, and a function that writes to its arguments.
    """
    if not callable(fn):
        raise SbpError(f"local_region takes a function, not {type(fn).__name__}: local_region(fn, in_sbp, out_sbp)")
    for name, given in (("in_sbp", in_sbp), ("out_sbp", out_sbp)):
        for one in given if isinstance(given, list) else [given]:
            _check(name, one)

    @functools.wraps(fn, updated=())
    def region(*args: Any, **kwargs: Any) -> Any:
        runs = region_runs()
        return fn(*args, **kwargs) if runs is None else runs(fn, in_sbp, out_sbp, args, kwargs)

    return region


def _check(name: str, given: Any) -> None:
    each = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else (given,)
    if not all(isinstance(sbp, Sbp) for sbp in each):
        raise SbpError(
            f"local_region: {name}={given!r}; an SBP is gz.sbp.B, gz.sbp.S(0) or gz.sbp.P, a tuple of one for each "
            "placement axis, or a dict by axis name; a list holds one for each tensor"
        )
