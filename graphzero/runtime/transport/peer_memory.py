"""Reading another process' memory on the same host: one copy, straight into place, and no part for the other side.

It is Linux' ``process_vm_readv``, as MPI libraries use it between ranks of one host ("cross memory attach").  Here is
whether this process can take part, and the read itself; who reads what, and when it may, is ``shared_memory``'s.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from graphzero.errors import ConfigError

SWITCH = "GRAPHZERO_SHARE_HOST"  # environment variable: 0 sends between ranks of one host as between hosts
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOT, _PIDS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def host() -> str | None:
    """What processes that may read each other have in common: the running kernel and the namespace of their ids.

    None where this process can't take part, or shall not.
    """
    return None if obstacle() else namespace()


def obstacle() -> str:
    """Why this process can't take part, or shall not; "" where it may."""
    if not is_on():
        return f"{SWITCH}={os.environ[SWITCH]}"
    if sys.platform != "linux" or _call() is None:
        return "this system has no process_vm_readv"
    return "" if namespace() is not None else "/proc does not say in which namespace it is"


def is_on() -> bool:
    """What the environment says.  Raises ConfigError for a word that is neither yes nor no."""
    word = os.environ.get(SWITCH, "1").strip().lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise ConfigError(
        f"the environment has {SWITCH}={os.environ[SWITCH]!r}, which is neither yes ({', '.join(_YES)}) nor no "
        f"({', '.join(_NO)}); 1 or nothing: ranks of one host read each other's memory, 0: they send as between hosts"
    )


def namespace() -> str | None:
    """The running kernel, the namespace of process ids and the user; None where the system does not say."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_PIDS)} {os.geteuid()}"
    except OSError:
        return None


def allow_reading() -> None:
    """Let the processes of this one's parent read it, where the kernel (Yama) would let only its own children."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PTRACER, os.getppid(), 0, 0, 0)


def read(process: int, address: int, into: Tensor) -> None:
    """Fill ``into``, which is dense, from ``address`` on in a process.  Raises OSError where the kernel refuses."""
    call, done, nbytes = _call(), 0, into.numel() * into.element_size()
    while done < nbytes:
        here = _Range(into.data_ptr() + done, nbytes - done)
        there = _Range(address + done, nbytes - done)
        got = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"process {process} can't be read: {os.strerror(error)}")
        done += got


@cache
def _call() -> Any:
    found = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if found is not None:
        found.restype = ctypes.c_ssize_t
        pointer, count = ctypes.POINTER(_Range), ctypes.c_ulong
        found.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return found
