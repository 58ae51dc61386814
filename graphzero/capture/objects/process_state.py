"""Settings and random streams of the process, which build may change and capture restores."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from graphzero import _compat
from graphzero.sbp.placement import DEVICE_TYPES

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    *((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in DEVICE_TYPES),
    *((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in DEVICE_TYPES),
)


class RandomStates:
    """The states of the random generators that a process has: torch's, Python's, and numpy's if it is in use."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = torch.random.get_rng_state(), random.getstate(), _of_numpy()

    def changed_streams(self) -> list[str]:
        """From which of them numbers have been drawn since, of those that a Graph does not draw from itself."""
        numpy, now = self.numpy, _of_numpy()
        drawn = ["random"] if random.getstate() != self.python else []
        if numpy is not None and (numpy[2:] != now[2:] or (numpy[1] != now[1]).any()):
            drawn.append("numpy.random")
        return drawn

    def restore(self) -> None:
        drawn = self.changed_streams()
        if "random" in drawn:
            random.setstate(self.python)
        if "numpy.random" in drawn:
            sys.modules["numpy"].random.set_state(self.numpy)
        if not torch.equal(torch.random.get_rng_state(), self.torch):
            torch.random.set_rng_state(self.torch)


def _of_numpy() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


@_compat.contextmanager
def restoring_process_state() -> Iterator[RandomStates]:
    """Settings and streams are put back in the end."""
    before, streams = [read() for read, _ in _SETTINGS], RandomStates()

    def put_back() -> None:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)
        streams.restore()

    with _compat.undoing(put_back):
        yield streams
