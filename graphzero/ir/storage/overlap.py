"""Elements that share memory, within one tensor and between tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graphzero import _compat

Span = tuple[int, int, int]  # where a tensor's first byte lies and its last one ends, after what tells memories apart


def shares_elements(x: Tensor) -> bool:
    """Return whether elements of a tensor may be at one place in memory, as after expand."""
    room = 1  # elements from the first to the last of the dims so far
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < room:
            return x.numel() > 0
        room += stride * (size - 1)
    return False


def without_copies(x: Tensor) -> Tensor:
    """A view of ``x`` that has each element of an expanded dim once."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]


def _span(x: Tensor) -> Span | None:
    """Addresses of a dense tensor, or of this process' piece of a DTensor; None for one without memory."""
    x = _compat.local_tensor(x)
    if x.layout is not torch.strided or not x.numel():
        return None
    itemsize = x.element_size()
    size = itemsize * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
    if x.is_meta or isinstance(x, _compat.FakeTensor):
        begin, memory = int(x.storage_offset()) * itemsize, _compat.storage_id(x)
    else:
        begin, memory = x.data_ptr(), 0
    return memory, begin, begin + int(size)


class Regions:
    """Addresses of tensors, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._spans = sorted((span, name) for name, x in tensors.items() if (span := _span(x)) is not None)

    def meeting(self, x: Tensor) -> str | None:
        """The first that has a byte in common with ``x``, if any."""
        here = _span(x)
        if here is None:
            return None
        return next((name for span, name in self._spans if _meet(self._tensors[name], span, x, here)), None)

    def overlapping(self) -> Iterator[tuple[str, str]]:
        """Pairs that have a byte in common."""
        reaching: list[tuple[Span, str]] = []  # those that end after the beginning of the next
        for here, name in self._spans:
            if reaching:
                reaching = [(span, other) for span, other in reaching if span[0] == here[0] and span[2] > here[1]]
            for span, other in reaching:
                if _meet(self._tensors[other], span, self._tensors[name], here):
                    yield other, name
            reaching.append((here, name))


def _meet(a: Tensor, one: Span, b: Tensor, other: Span) -> bool:
    if one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1]:
        return False
    pieces = [(_compat.local_tensor(x), span) for x, span in ((a, one), (b, other))]
    if all(span[2] - span[1] == x.numel() * x.element_size() for x, span in pieces):
        return True
    begin = min(one[1], other[1])  # columns of one matrix, say: compare byte by byte
    marks = torch.zeros(max(one[2], other[2]) - begin, dtype=torch.bool)
    mine, theirs = (_bytes(marks, x, span[1] - begin) for x, span in pieces)
    mine.fill_(True)
    return bool(theirs.any())


def _bytes(marks: Tensor, x: Tensor, begin: int) -> Tensor:
    """The marks of the bytes of ``x``, which begins there."""
    x, itemsize = without_copies(x), x.element_size()
    return marks.as_strided((*x.shape, itemsize), (*(stride * itemsize for stride in x.stride()), 1), begin)
