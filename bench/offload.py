"""Resident memory and step time with optimizer states, and activations, in memory, and in files, of rank 0.

    python bench/offload.py --path /local/disk                 # a GPT of 124 M parameters on two gloo ranks
    python bench/offload.py --path /tmp --layers 2 --vocabulary 8192
    python bench/offload.py --path /local/disk --activations 0.5 --context 512   # and half of the activations

The figures are of fresh processes, behind some steps: what Linux says is resident of the process' own memory (RssAnon)
and of mapped files (RssFile), the optimizer states that the plan says are on the device and on the host, and the median
step; the most that was resident in a step, of both (VmHWM), beside the plan's peak and activations.  The path is best
on a disk of its own: pages that have been written are the system's to keep, in memory that is free.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _run import markdown, on_gloo
from models import tokens
from workloads import GPT, Shape

import graphzero as gz

STEPS = 5
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes; read when a process starts


@dataclass(frozen=True)
class Held:
    """Bytes behind the last step and at most within it, what the plan says of the device's, and seconds of the median
    step."""

    own: int
    files: int
    on_device: int
    on_host: int
    planned: int
    most: int
    peak: int
    activations: int
    seconds: float
    loss: float


class Train(gz.Graph):
    """One step of AdamW at a stage of ZeRO."""

    def __init__(self, shape: Shape, stage: int, path: str | None, activations: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-4))
        self.config.enable_zero(stage > 0, stage=stage or 1)
        if path is not None:
            self.config.enable_offload(activations=activations, path=path)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.model(x, y)
        loss.backward()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="the folder of the files")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--activations", type=float, help="the share of activations that may be on the device")
    options = parser.parse_args()
    shape = Shape(options.vocabulary, 768, options.layers, 12, batch=1, context=options.context, tied=True)
    os.environ.update(MALLOC)
    rows = []
    kinds = [("in memory", None, None), ("states in files", options.path, None)]
    if options.activations is not None:
        kinds.append(("activations too", options.path, options.activations))
    for name, path, share in kinds:
        one: Held = on_gloo(options.ranks, measure, shape, options.stage, path, share)
        sizes = (one.own, one.files, one.on_device, one.on_host, one.planned, one.most, one.peak, one.activations)
        cells = [f"{nbytes / 1e6:.1f}" for nbytes in sizes]
        rows.append([name, *cells, f"{one.seconds:.2f}", f"{one.loss:.6f}"])
    head = [
        "held",
        "own, MB",
        "mapped files, MB",
        "states on device, MB",
        "on host, MB",
        "planned between steps, MB",
        "most in a step, MB",
        "planned peak, MB",
        "planned activations, MB",
        "step, s",
        "loss",
    ]
    print(f"stage {options.stage} on {options.ranks} gloo ranks, bytes of rank 0\n\n{markdown(head, rows)}")


def measure(rank: int, shape: Shape, stage: int, path: str | None, share: float | None) -> Held:
    """Every rank: take some steps."""
    ranks, seconds, loss = dist.get_world_size(), list[float](), torch.zeros(())

    def batch(step: int) -> list[torch.Tensor]:
        whole = tokens(step, shape.batch * ranks, torch.float32, shape.vocabulary, shape.context)
        return [part.chunk(ranks)[rank] for part in whole]

    activations = None
    if share is not None:
        activations = int(share * Train(shape, stage, None).compile(*batch(0)).plan.memory.activations)
    graph = Train(shape, stage, path, activations)
    for step in range(STEPS):
        x, y = batch(step)
        if step == STEPS - 1:
            Path("/proc/self/clear_refs").write_text("5")  # the most resident is counted anew
        began = time.perf_counter()
        loss = graph(x, y)
        seconds.append(time.perf_counter() - began)
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    memory = graph.plan.memory
    states = memory["optimizer_states"], memory.host_resident, sum(memory.resident.values())
    planned = resident("VmHWM"), memory.peak, memory.activations
    return Held(
        resident("RssAnon"), resident("RssFile"), *states, *planned, statistics.median(seconds[1:]), float(loss)
    )


def resident(kind: str) -> int:
    (kilobytes,) = re.findall(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
