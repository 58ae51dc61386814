"""Ranks that fail: processes of one small world, each of which tells what became of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import processes
import torch.distributed as dist
from _ranks import context, end_with_parent

from graphzero.runtime.transport import peer_memory
from graphzero.runtime.transport.shared_memory_connect import SWITCH

WAYS = ("memory", "gloo")
FAR = "other hosts"  # ranks send, and cannot watch each other's processes
WAITS = 60.0  # seconds for which a rank of the job waits for another
Work = Callable[[int], Any]


def run(
    work: Work, ranks: int, folder: Path, way: str, timeout: float = WAITS, limit: float = 90.0,
    stops: Sequence[int] = (), device_type: str = "cpu",
) -> dict[int, Any]:  # fmt: skip
    """What ``work`` returns on each rank that returns anything; limit: seconds for all of it.

    stops: ranks that are not waited for.  timeout: the job's.  A rank that raises is told as {"raised": traceback}.
    The job's store is held by this process, as torchrun's agent does.
    """
    store, end = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), time.monotonic() + limit
    given = (ranks, store.port, way, timeout, folder, work, device_type)
    make = context() if device_type == "cpu" else multiprocessing.get_context("spawn")
    started = [make.Process(target=_enter, args=(rank, *given)) for rank in range(ranks)]
    try:
        for one in started:
            one.start()
        for one in (one for rank, one in enumerate(started) if rank not in stops):
            one.join(max(end - time.monotonic(), 0.1))
    finally:
        for one in started:
            one.kill()
            one.join()
    files = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def _enter(
    rank: int, ranks: int, port: int, way: str, timeout: float, folder: Path, work: Work, device_type: str
) -> None:
    end_with_parent()
    os.environ[SWITCH] = "auto" if way == FAR else way
    if way == FAR:
        peer_memory.namespace = lambda: f"the host of rank {rank}"
    backends = processes.prepare_rank(rank, ranks, device_type)
    store = dist.TCPStore("localhost", port)
    dist.init_process_group(backends, timeout=timedelta(seconds=timeout), store=store, rank=rank, world_size=ranks)
    try:
        found = work(rank)
    except BaseException:
        found = {"raised": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # without the farewell of a process group of which a rank may be gone
