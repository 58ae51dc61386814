"""Reads of another process's memory on the same host: one copy, straight into place, without work on the other side.

The system call is Linux's ``process_vm_readv``, which MPI libraries use between ranks of one host ("cross memory
attach").  Here is whether this process can use it, and the read itself; who reads what, and when, is in
``shared_memory``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_BOOT, _PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER


_HINTS = {errno.EPERM: " (ptrace is forbidden, by Yama, a seccomp filter or another user namespace)"}


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def obstacle() -> str:
    """Say why this process can neither read others nor be read; "" where the kernel may allow it."""
    if sys.platform != "linux" or _system_call() is None:
        return "this system has no process_vm_readv"
    return "" if namespace() is not None else "/proc does not say in which namespace it is"


def namespace() -> str | None:
    """Name what processes that may read each other have in common: running kernel, namespace of process ids, and user.

    None where the system does not say.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_PIDS)} {os.geteuid()}"
    except OSError:
        return None


def allow_reading() -> None:
    """Allow the parent of this process and its descendants to read it, where the kernel (Yama) restricts that."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PTRACER, os.getppid(), 0, 0, 0)


def read_memory(process: int, address: int, into: Tensor) -> None:
    """Fill ``into``, which is dense, from ``address`` on in a process.  Raises OSError where the kernel refuses."""
    call, done, nbytes = _system_call(), 0, into.numel() * into.element_size()
    while done < nbytes:
        target = _Range(into.data_ptr() + done, nbytes - done)
        source = _Range(address + done, nbytes - done)
        count = call(process, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"process {process} cannot be read: {os.strerror(error)}{_HINTS.get(error, '')}")
        done += count


@cache
def _system_call() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        pointer, count = ctypes.POINTER(_Range), ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return call
