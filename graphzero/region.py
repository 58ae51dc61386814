"""``gz.local_region``: a function that is written for one rank, inside a build that is written for one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from graphzero.capture import region_runs
from graphzero.errors import SbpError
from graphzero.sbp.types import Sbp


def local_region(fn: Callable[..., Any], in_sbp: Any, out_sbp: Any) -> Callable[..., Any]:
    """Declare ``fn`` as per-rank code, and say what its tensors are to the whole.

    Called inside ``build`` or a module's forward, each tensor argument is boxed to its SBP, ``fn`` sees what this rank
    holds of it, and what the ranks return is put together as ``out_sbp`` says.  Other tensors that ``fn`` reads, such
    as parameters of a module, it reads whole (``B``).  Outside of a Graph it is ``fn`` itself.

    Args:
        fn: a function of tensors (in dicts, lists, tuples) and plain values.  It is traced once, on local shapes.
        in_sbp: of the tensor arguments.  One SBP, on an n-d placement a tuple with one for each axis or a dict by axis
            name (``B`` where it says nothing), for all of them; or a list with one of these for each.
        out_sbp: of the tensors that ``fn`` returns, alike.  ``S(i)``: the results are pieces, in rank order; ``P``:
            they are to be added; ``P(max)``, ``P(min)`` likewise, without a gradient; ``B``: they are equal.

    Gradients: those of ``B`` arguments and of whatever is read whole are added over ranks, those of ``S(i)`` are
    pieces.  A ``P`` argument is one summand on each rank, so ``fn`` has to be linear in it.

    Raises:
        SbpError: for what is no SBP; when it is called, for too few or too many, a dim that is not there or does not
            divide, results that are not tensors.
        CaptureError: when it is called, for a region in a region, a function that writes into what it is given.
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
