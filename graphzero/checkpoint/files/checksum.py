"""A checksum of bytes at the speed of memory, which tells whether they were damaged.

Bytes are taken as rows of 2048 little-endian words of 64 bits, the last row filled up with zeros.  A row has two sums
mod 2**64: of its words, each times a weight, and of the upper halves of its words, each times another weight.  The sum
of a block is the first half of the sha256 of all rows' sums, in order.

Weights are odd, so a row in which one word is altered never keeps its sums.  Any other alteration that was not made by
the weights leaves them with a chance of 2**-32 at the most (of words that differ in a lower half the first sum tells,
with 32 random bits or more; of others the second), mostly of 2**-63 and less: the bound of Carter and Wegman's
multilinear hashing.  What that means for damage is in docs/checkpoints.md.  Rows that change places change their sums'
places.  Bytes of any checksum can be made by anyone who knows the weights: it does not protect against attackers.

On one core it takes a quarter to a third of what sha256 takes there; zlib's crc32 takes as much as that, and
``torch.hash_tensor``, the exclusive or of all words, sees neither words that change places nor the same bit in two.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray

_WORDS = 2048
ROW = 8 * _WORDS  # bytes
RUN = 1 << 20  # bytes that are summed at once
_UPPER = np.uint64(32)  # bits
_SEED = b"graphzero checkpoint"
Words = NDArray[np.uint64]


def _weights() -> Words:
    drawn = hashlib.shake_256(_SEED).digest(2 * ROW)
    return np.frombuffer(drawn, "<u8").astype(np.uint64).reshape(2, _WORDS) | np.uint64(1)


_OF_WORDS, _OF_UPPER_HALVES = _weights()


class Checksum:
    """Checksum of the blocks of a file whose bytes come one after the other."""

    def __init__(self) -> None:
        self._rows = hashlib.sha256()
        self._halves = np.empty((RUN // ROW, _WORDS), np.uint64)
        self._row = bytearray(ROW)  # the last one, not full yet
        self._filled = 0

    def add_bytes(self, data: memoryview) -> None:
        if self._filled:
            head = data[: ROW - self._filled]
            self._row[self._filled : self._filled + len(head)] = head
            self._filled += len(head)
            data = data[len(head) :]
            if self._filled < ROW:
                return
            self._add_rows(memoryview(self._row))
            self._filled = 0
        whole = len(data) // ROW * ROW
        for at in range(0, whole, RUN):
            self._add_rows(data[at : min(at + RUN, whole)])
        self._filled = len(data) - whole
        self._row[: self._filled] = data[whole:]

    def end_block(self) -> str:
        """The checksum of the bytes that were added since the last end."""
        if self._filled:
            self._row[self._filled :] = bytes(ROW - self._filled)
            self._add_rows(memoryview(self._row))
            self._filled = 0
        text, self._rows = self._rows.hexdigest()[:32], hashlib.sha256()
        return text

    def _add_rows(self, data: memoryview) -> None:
        words: Words = np.frombuffer(data, np.uint64).reshape(-1, _WORDS)
        if sys.byteorder == "big":
            words = words.byteswap()
        elif not words.flags.aligned:
            words = words.copy()
        halves = self._halves[: len(words)]
        np.right_shift(words, _UPPER, out=halves)
        sums = np.empty((len(words), 2), "<u8")
        sums[:, 0] = np.einsum("ij,j->i", words, _OF_WORDS)
        sums[:, 1] = np.einsum("ij,j->i", halves, _OF_UPPER_HALVES)
        self._rows.update(sums.data)
