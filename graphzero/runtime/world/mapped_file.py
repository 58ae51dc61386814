"""Tensors in a file: the system keeps them on the disk, and in memory only while they are read or written.

The file has no name in its folder, so it goes with the last tensor that lies in it, also where a process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.errors import ConfigError


class MappedFile(mmap.mmap):
    """A file of a fixed size, mapped into memory, in which tensors are laid out one after the other.

    Tensors hold it; it needs no other owner.
    """

    folder: str
    used: int  # bytes that tensors have
    address: int

    @classmethod
    def create(cls, folder: str, nbytes: int, what: str) -> MappedFile:
        """Create a file of ``nbytes`` in a folder, which is made if it is not there.  what: in words, goes into it.

        Raises ConfigError where it cannot be written, or the disk has no room for it.
        """
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                mapped = cls(file.fileno(), nbytes)
        except (OSError, ValueError) as error:  # ValueError: of a path that no file can have
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"enable_offload(path={folder!r}): {nbytes:,} bytes of {what} do not go there: {reason}\n"
                "  Nothing has been changed. Give a folder that can be written, on a disk with as much room for each "
                "rank of this host, or leave path out"
            ) from None
        mapped.folder, mapped.used = folder, 0
        mapped.address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        return mapped

    @staticmethod
    def space_of(nbytes: int) -> int:
        """Bytes of the file that a tensor of ``nbytes`` takes: it begins where a page does."""
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def take(self, x: Tensor) -> Tensor:
        """A copy of a tensor in the next free place of the file, laid out as it is."""
        copy = self.place(x, self.used).copy_(x)
        self.used += self.space_of(x.numel() * x.element_size())
        if x.numel():
            self.release(copy)
        return copy

    def place(self, x: Tensor, offset: int) -> Tensor:
        """A tensor at a place in the file, laid out as ``x`` is; what is there stays."""
        nbytes = x.numel() * x.element_size()
        if not nbytes:
            return torch.empty_like(x, device="cpu")
        with _compat.no_modes():  # which would see views of a tensor that they have not seen
            flat = torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=offset).view(x.dtype)
            return flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())

    def holds(self, x: Tensor) -> bool:
        """Return whether a tensor lies in the file."""
        return self.address <= x.data_ptr() < self.address + len(self)

    def release(self, x: Tensor) -> None:
        """Have the memory of a tensor's pages back; the file has their values."""
        begin = (x.data_ptr() - self.address) // mmap.PAGESIZE * mmap.PAGESIZE
        end = x.data_ptr() - self.address + x.numel() * x.element_size()
        self.madvise(mmap.MADV_DONTNEED, begin, end - begin)
