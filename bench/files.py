"""Cost of checkpoints beside torch.distributed.checkpoint: ``python bench/files.py``; figures: bench/results/files.md.

The page says what is trained and held.  A load reads files that were just written, in ``TMPDIR``, and once more, from
the disk, when the kernel has forgotten them.  Seconds are those of the slowest rank, from the moment when all have
come; those of the processor are both ranks' together, in all threads; the peak is as the kernel counts it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _run
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import TrainGraph
from systems import adamw, build_graph, shard_fully
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from workloads import Shape, Workload, gpt

import graphzero as gz

SYSTEMS, ACTS = ("graphzero", "DCP"), ("save", "load", "load from the disk")
Cost = tuple[float, float, float]  # seconds, seconds of the processor, MB
Costs = dict[tuple[str, str], list[Cost]]  # by system and act, of each round


def main() -> None:
    parser = _run.command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = _run.parse_options(parser)
    nbytes, costs = _run.run_on_gloo(2, measure_rounds, options.rounds, options.layers)
    print(f"{nbytes / 1e9:.2f} GB, {options.rounds} rounds, median\n\n{format_costs(costs)}")


def format_costs(costs: Costs) -> str:
    rows = []
    for act in ACTS:
        for i, unit in enumerate(("seconds", "seconds of the processor", "peak MB")):
            ours, theirs = ([cost[i] for cost in costs[system, act]] for system in SYSTEMS)
            a, b = statistics.median(ours), statistics.median(theirs)
            spread = [f"{min(figures):.2f} to {max(figures):.2f}" for figures in (ours, theirs)]
            rows.append([f"{act}, {unit}", f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}" if b else "-", *spread])
    return _run.format_table(["", *SYSTEMS, "ratio", *(f"{system} from to" for system in SYSTEMS)], rows)


class ShardedTraining:
    """FSDP2 of the same, one unit a block."""

    def __init__(self, workload: Workload) -> None:
        self.model = shard_fully(workload.model(), workload)
        self.optimizer = adamw(self.model)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.model(x, y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def measure_rounds(rank: int, rounds: int, layers: int) -> tuple[int, Costs]:
    """Bytes of a checkpoint of DCP's, and what all cost."""
    folders = [tempfile.mkdtemp()]  # of TMPDIR
    dist.broadcast_object_list(folders)
    workload = gpt(Shape(vocabulary=50257, width=768, layers=layers, heads=12, batch=1, context=16, tied=True))
    batch = workload.part(0, rank, 2)
    ours, theirs = build_graph(3, workload), ShardedTraining(workload)
    ours(*batch)
    theirs.step(*batch)
    check_equal_size(ours, theirs)
    systems = [("graphzero", partial(gz.save, ours), partial(gz.load, ours)), ("DCP", theirs.save, theirs.load)]
    costs: Costs = {(system, act): [] for system in SYSTEMS for act in ACTS}
    try:
        for number in range(rounds + 1):
            for system, save, load in systems if number % 2 else reversed(systems):
                path = Path(folders[0], f"{system}-{number}")
                measured = measure_files(path, save, load)
                for act, cost in zip(ACTS, measured, strict=True) if number else ():  # the first one warms up
                    costs[system, act].append(cost)
                nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(path)
                settle()
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0], ignore_errors=True)
    return nbytes, costs


def measure_files(path: Path, save: Callable[[Path], Any], load: Callable[[Path], Any]) -> list[Cost]:
    """The cost of each of ACTS."""
    saved = measure(partial(save, path))
    settle()
    loaded = measure(partial(load, path))
    forget(path)
    settle()
    return [saved, loaded, measure(partial(load, path))]


def check_equal_size(ours: TrainGraph, theirs: ShardedTraining) -> None:
    """Both hold the same number of values on this rank, within a part in a hundred."""
    counts = [
        sum(x.to_local().numel() for x in model.parameters() if hasattr(x, "to_local"))
        for model in (ours.model, theirs.model)
    ]
    assert abs(counts[0] - counts[1]) < 0.01 * counts[1], counts


def settle() -> None:
    """Wait until all writes have reached the disk, on all ranks, and give freed memory back to the kernel."""
    _run.release_memory()
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def forget(path: Path) -> None:
    """The kernel does not keep these files in memory."""
    os.sync()
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(act: Callable[[], Any]) -> Cost:
    """Seconds until all are through; of the processor, both ranks together; MB at the peak beside what was held before,
    of the fullest rank."""
    before = _run.reset_peak_memory()
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    act()
    busy = 2 * _run.average_over_ranks([time.process_time() - busy])[0]
    seconds = time.perf_counter() - began
    peak = torch.tensor((_run.read_peak_memory() - before) / 1e6)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return seconds, busy, float(peak)


if __name__ == "__main__":
    main()
