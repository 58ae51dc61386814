"""Attributes that users have set on parameters and buffers, for the fakes that stand for them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from graphzero import _compat
from graphzero.capture.guards.attribute_guards import AttributeGuards
from graphzero.capture.guards.guarded_values import MISSING
from graphzero.capture.objects.patches import patched
from graphzero.ir.source_location import line_of

RealTensors = Mapping[int, tuple[Tensor, str]]


@_compat.contextmanager
def forward_tensor_attributes(reals: RealTensors, guards: AttributeGuards) -> Iterator[None]:
    """Fakes have the attributes of the real tensors, which are guarded where they are read.

    reals: id of a fake -> the parameter or buffer that it stands for, and its path; it may be filled meanwhile.
    """

    def getattr_of_real(fake: Tensor, name: str) -> Any:
        real, path = reals.get(id(fake), (None, ""))
        if real is not None and name[:2] != "__":
            value = vars(real).get(name, MISSING)
            frame = sys._getframe(1)
            if value is not MISSING or line_of(frame.f_code, frame.f_lineno):  # torch asks tensors for many things
                guards.add_tensor_attribute(real, path, name)
            if value is not MISSING:
                return value
        raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}")

    with patched(Tensor, "__getattr__", getattr_of_real):
        yield


def warn_of_new_attributes(fakes: Mapping[str, Tensor], before: Mapping[str, Collection[str]]) -> None:
    """Warn of attributes that build sets on a parameter or buffer: it sets them on a fake, once.

    before: names of attributes, by path.
    """
    names = [f"{path}.{name}" for path, fake in fakes.items() for name in vars(fake) if name not in before[path]]
    shown = [name for name in names if not name.rpartition(".")[2].startswith("_")]  # torch's own notes on fakes
    if shown:
        warnings.warn(
            f"build sets {', '.join(shown[:4])}, which has no effect: build runs only once, while it is traced. "
            "Return the value, or keep it in a buffer (register_buffer) and change it in place",
            stacklevel=2,
        )
