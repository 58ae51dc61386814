"""Time of collectives of CPU tensors: gloo's own, by sending pieces, or by reading ranks' memory.

    python bench/collectives.py                # two ranks of one thread each
    python bench/collectives.py --ranks 4

A collective moves ``whole`` bytes a rank (what is gathered, or reduced).  Ways take turns; a cell is the median of the
microseconds from beginning to end, on rank 0, and the microseconds of the processor that rank 0 spent, all threads.
Every way must give the same sums.  What the runtime takes: reading where ranks share a host, else exchanges.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of, save
from torch import Tensor

from graphzero import _compat
from graphzero.runtime.transport.gloo_transport import GlooTransport
from graphzero.runtime.transport.p2p_collectives import PeerCollectives
from graphzero.runtime.transport.process_monitor import WaitState
from graphzero.runtime.transport.shared_memory_connect import connect_shared_memory

SIZES = (64 * 2**10, 2**20, 8 * 2**20)
KINDS = ("reduce_scatter", "all_gather", "all_reduce")
WAYS = ("gloo's own", "sent", "read")
Cell = tuple[float, float]  # microseconds: elapsed, of the processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--save", metavar="FILE", help="also keep the table there, for bench/tables.py")
    options = options_of(parser)
    text = table(on_gloo(options.ranks, work, options.rounds))
    print(text)
    if options.save:
        save(options.save, f"{options.ranks} ranks", "collectives", text)


def table(found: Mapping[tuple[str, int], Mapping[str, Cell]]) -> str:
    ways = [way for way in WAYS if any(way in cells for cells in found.values())]
    rows = [
        [kind, f"{nbytes // 1024} KiB", *(f"{cells[way][part]:.0f}" for part in (0, 1) for way in ways)]
        for (kind, nbytes), cells in found.items()
    ]
    return markdown(["", "whole", *(f"{way}, us" for way in ways), *(f"{way}, CPU us" for way in ways)], rows)


def work(rank: int, rounds: int) -> dict[tuple[str, int], dict[str, Cell]]:
    """Every rank: time each way in turns."""
    ranks = list(range(dist.get_world_size()))
    group = _compat.gloo(_compat.job_store("collectives"), rank, len(ranks), 60.0)
    ways: dict[str, Any] = {
        "gloo's own": Own(len(ranks)),
        "sent": PeerCollectives(GlooTransport(group, ranks, ranks, rank, 0, 60.0, WaitState()), rank),
    }
    shared = connect_shared_memory(gathered, ranks, limit=60.0)
    if not isinstance(shared, str):
        ways["read"] = PeerCollectives(shared, rank)
    return {(kind, nbytes): timed(kind, nbytes, ways, rank, rounds) for kind in KINDS for nbytes in SIZES}


def gathered(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Own:
    """gloo's own collectives, called as ``PeerCollectives`` is."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def begin(self, kind: str, out: Tensor, sent: Tensor, reduction: str) -> Any:
        if kind == "all_reduce":
            return dist.all_reduce(out, async_op=True)
        way = _compat.all_gather_single if kind == "all_gather" else _compat.reduce_scatter_single
        return way(out, sent, async_op=True)


def timed(kind: str, nbytes: int, ways: Mapping[str, Any], rank: int, rounds: int) -> dict[str, Cell]:
    count, ranks = nbytes // 4, dist.get_world_size()
    piece, whole = torch.empty(count // ranks), torch.empty(count // ranks * ranks)
    cells: dict[str, list[Cell]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, collectives in ways.items():
            piece.fill_(rank + 1.0)
            whole.fill_(rank + 1.0)
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            start(kind, collectives, piece, whole)().wait()
            cells[way].append(((time.perf_counter() - began) * 1e6, (time.process_time() - spent) * 1e6))
            check(kind, piece, whole, ranks)
    return {way: (median(found, 0), median(found, 1)) for way, found in cells.items()}


def start(kind: str, collectives: Any, piece: Tensor, whole: Tensor) -> Callable[[], Any]:
    out = piece if kind == "reduce_scatter" else whole
    sent = piece if kind == "all_gather" else whole
    return lambda: collectives.begin(kind, out, sent, "sum")


def check(kind: str, piece: Tensor, whole: Tensor, ranks: int) -> None:
    total = ranks * (ranks + 1) / 2
    right = {"reduce_scatter": piece[0] == total, "all_reduce": whole[-1] == total, "all_gather": whole[-1] == ranks}
    assert right[kind], f"{kind} went wrong"


def median(found: list[Cell], part: int) -> float:
    return statistics.median(cell[part] for cell in found[1:])


if __name__ == "__main__":
    main()
