"""What users have set as attributes of parameters and buffers, for the fakes that stand for them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from graphzero import _compat
from graphzero.capture.guards.attribute_guards import Reads, attribute
from graphzero.capture.objects.patches import patched
from graphzero.capture.guards.attribute_guards import Reads, attribute
from graphzero.ir.source_location import line_of

Reals = Mapping[int, tuple[Tensor, str]]


@_compat.contextmanager
def tensor_attributes(reals: Reals, reads: Reads) -> Iterator[None]:
    """Fakes have the attributes of the real tensors, which are noted as read where they are asked for.

    reals: id of a fake -> the parameter or buffer that it stands for, and its path; it may be filled meanwhile.
    """
    missing = attribute(None, "missing")

    def read(fake: Tensor, name: str) -> Any:
        real, path = reals.get(id(fake), (None, ""))
        if real is not None and name[:2] != "__":
            held = vars(real).get(name, missing)
            frame = sys._getframe(1)
            if held is not missing or line_of(frame.f_code, frame.f_lineno):  # torch asks tensors for many things
                reads.note_of_tensor(real, path, name)
            if held is not missing:
                return held
        raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}")

    with patched(Tensor, "__getattr__", read):
        yield


def warn_of_new_attributes(fakes: Mapping[str, Tensor], before: Mapping[str, Collection[str]]) -> None:
    """What build sets on a parameter or buffer it sets on a fake, once.  before: names of attributes, by path."""
    names = [f"{path}.{name}" for path, fake in fakes.items() for name in vars(fake) if name not in before[path]]
    shown = [name for name in names if not name.rpartition(".")[2].startswith("_")]  # torch's own notes on fakes
    if shown:
        warnings.warn(
            f"build sets {', '.join(shown[:4])}, which has no effect: build runs once, to be written down as a graph. "
            "Return the value, or keep it in a buffer (register_buffer) and change it in place",
            stacklevel=2,
        )
