"""Processes that are ranks: forked from one that has loaded the packages, and ended with the process that started them.

Loading torch takes seconds of a processor in each process, which a busy machine makes minutes.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

LOADED = [
    "torch._dynamo", "torch.distributed.tensor", "graphzero.graph",
    # what a first step imports
    "graphzero.plugins.stacked_updates", "graphzero.sbp.rules", "sympy.assumptions.wrapper", "sympy.tensor.tensor",
    "torch._inductor.fx_passes.dedupe_symint_uses", "torch.fx.experimental.validator",
]  # fmt: skip


def context() -> Any:
    """Makes processes by forking the one that has loaded all that is in ``LOADED``."""
    forkserver = mp.get_context("forkserver")
    forkserver.set_forkserver_preload(LOADED)
    return forkserver


def start(
    function: Callable[..., Any], args: Sequence[Any], ranks: int, method: str = "forkserver",
    seconds: float | None = None,
) -> None:  # fmt: skip
    """Run ``function(rank, *args)`` in so many new processes, to the end of all; raises if one fails, and ends all.

    ``function`` is one of a module.  method: of multiprocessing, "spawn" for processes that load all again.
    seconds: for which it waits for the next of them to end; TimeoutError where none does.
    """
    context()
    started = mp.start_processes(_begin, (function, args), ranks, join=False, start_method=method)
    try:
        alive = len(started.sentinels)
        while not started.join(seconds):
            if len(started.sentinels) == alive:
                raise TimeoutError(f"no process has ended in {seconds} s")
            alive = len(started.sentinels)
    finally:  # also where a test's time is over
        for process in started.processes:
            process.kill()
            process.join()


def start_as_torchrun(function: Callable[..., Any], args: Sequence[Any], ranks: int) -> None:
    """The same in the environment that torchrun gives its processes; the job's store is held here, as its agent does.

    A port that is looked for here and opened there might be somebody else's by then.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    start(_enter, (dict(os.environ), ranks, store.port, function, args), ranks)


def end_with_parent() -> None:
    """The kernel ends this process when the one that has started it ends, whatever it waits for.

    By a signal for the pipe between them, which ends a process unless it is handled.  The process from which this one
    was forked does not help: it lives as long as any that it has forked.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([parent.sentinel], [], [], 0)[0]:  # before it could be told
        os._exit(1)


def _begin(rank: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    end_with_parent()
    function(rank, *args)


def _enter(
    rank: int, environment: dict[str, str], ranks: int, port: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    os.environ.clear()  # what it was forked with may be an earlier world's
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    function(rank, *args)
