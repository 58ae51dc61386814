"""Cost of checkpoints beside torch.distributed.checkpoint: ``python bench/files.py``; figures: bench/results/files.md.

A GPT of GPT-2's size, 124 million parameters, and AdamW's states, float32, on two gloo ranks at stage 3, against FSDP2
of the same model and DCP (``torch.distributed.checkpoint``, its own defaults: one thread, files synced).  Both hold
their model all the time in the same two processes, and take turns.  A load reads files that were just written, in
``TMPDIR``, and once more, from the disk, when the kernel has forgotten them.  Seconds are those of the slowest rank,
from the moment when all have come; those of the processor are both ranks' together, in all threads; the peak is of what
a rank holds beside what it held before, as the kernel counts it.  graphzero sums all that it writes and compares what
it reads; DCP does neither.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _run import average, give_back, high_water, markdown, on_gloo, options_of, reset_high_water
from parity import TrainGraph
from systems import adamw, fully_sharded, graph
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from workloads import Shape, Workload, gpt

import graphzero as gz

WHAT = "save", "load", "load from the disk"
Cost = tuple[float, float, float]  # seconds, seconds of the processor, MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = options_of(parser)
    report(on_gloo(2, work, options.rounds, options.layers))


def report(found: dict[str, Any]) -> None:
    rows = []
    for what in WHAT:
        ours, theirs = found[f"graphzero {what}"], found[f"DCP {what}"]
        for i, unit in enumerate(("seconds", "seconds of the processor", "peak MB")):
            a, b = (statistics.median(one[i] for one in held) for held in (ours, theirs))
            spread = [f"{min(x[i] for x in held):.2f} to {max(x[i] for x in held):.2f}" for held in (ours, theirs)]
            ratio = f"{a / b:.2f}" if b else "-"
            rows.append([f"{what}, {unit}", f"{a:.2f}", f"{b:.2f}", ratio, *spread])
    print(f"{found['bytes'] / 1e9:.2f} GB, {len(found['DCP save'])} rounds, median\n")
    print(markdown(["", "graphzero", "DCP", "ratio", "graphzero from to", "DCP from to"], rows))


class Theirs:
    """FSDP2 of the same, one unit a block."""

    def __init__(self, workload: Workload) -> None:
        self.model = fully_sharded(workload.model(), workload)
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


def work(rank: int, rounds: int, layers: int) -> dict[str, Any]:
    folders = [tempfile.mkdtemp()]  # of TMPDIR
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    workload = gpt(Shape(vocabulary=50257, width=768, layers=layers, heads=12, batch=1, context=16, tied=True))
    batch = workload.part(0, rank, 2)
    ours, theirs = graph(3, workload), Theirs(workload)
    ours(*batch)
    theirs.step(*batch)
    check_equal_size(ours, theirs)
    found: dict[str, Any] = {f"{who} {what}": [] for who in ("graphzero", "DCP") for what in WHAT}
    try:
        for number in range(rounds + 1):
            pair = [
                ("graphzero", lambda path: gz.save(ours, path), lambda path: gz.load(ours, path)),
                ("DCP", theirs.save, theirs.load),
            ]
            for who, write, read in pair if number % 2 else reversed(pair):
                path = folder / f"{who}-{number}"
                saved = measure(lambda write=write, path=path: write(path))
                settle()
                loaded = measure(lambda read=read, path=path: read(path))
                forget(path)
                settle()
                from_disk = measure(lambda read=read, path=path: read(path))
                if number:  # the first one warms up
                    found[f"{who} load from the disk"].append(from_disk)
                    found[f"{who} save"].append(saved)
                    found[f"{who} load"].append(loaded)
                found["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(path)
                settle()
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def check_equal_size(ours: TrainGraph, theirs: Theirs) -> None:
    """Both hold the same number of values on this rank, within a part in a hundred."""
    counts = [
        sum(x.to_local().numel() for x in model.parameters() if hasattr(x, "to_local"))
        for model in (ours.model, theirs.model)
    ]
    assert abs(counts[0] - counts[1]) < 0.01 * counts[1], counts


def settle() -> None:
    """Wait until all writes have reached the disk, on all ranks, and give freed memory back to the kernel."""
    give_back()
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
    before = reset_high_water()
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    act()
    busy = 2 * average([time.process_time() - busy])[0]
    seconds = time.perf_counter() - began
    peak = torch.tensor((high_water() - before) / 1e6)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return seconds, busy, float(peak)


if __name__ == "__main__":
    main()
