"""Resident memory and step time with optimizer states in memory, and in files, of rank 0.

    python bench/offload.py --path /local/disk                 # a GPT of 124 M parameters on two gloo ranks
    python bench/offload.py --path /tmp --layers 2 --vocabulary 8192

The figures are of fresh processes, behind some steps: what Linux says is resident of the process' own memory (RssAnon)
and of mapped files (RssFile), the optimizer states that the plan says are on the device and on the host, and the median
step.  The path is best on a disk of its own: pages that have been written are the system's to keep, in memory that is
free.
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
    """Bytes behind the last step, what the plan says of the device's between steps, and seconds of the median step."""

    own: int
    files: int
    on_device: int
    on_host: int
    planned: int
    seconds: float
    loss: float


class Train(gz.Graph):
    """One step of AdamW at a stage of ZeRO."""

    def __init__(self, shape: Shape, stage: int, path: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-4))
        self.config.enable_zero(stage > 0, stage=stage or 1)
        if path is not None:
            self.config.enable_offload(path=path)

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
    options = parser.parse_args()
    shape = Shape(options.vocabulary, 768, options.layers, 12, batch=1, context=64, tied=True)
    os.environ.update(MALLOC)
    rows = []
    for name, path in (("in memory", None), ("in files", options.path)):
        one: Held = on_gloo(options.ranks, measure, shape, options.stage, path)
        cells = [f"{nbytes / 1e6:.1f}" for nbytes in (one.own, one.files, one.on_device, one.on_host, one.planned)]
        rows.append([name, *cells, f"{one.seconds:.2f}", f"{one.loss:.6f}"])
    head = [
        "states",
        "own, MB",
        "mapped files, MB",
        "states on device, MB",
        "on host, MB",
        "planned between steps, MB",
        "step, s",
        "loss",
    ]
    print(f"stage {options.stage} on {options.ranks} gloo ranks, bytes of rank 0\n\n{markdown(head, rows)}")


def measure(rank: int, shape: Shape, stage: int, path: str | None) -> Held:
    """Every rank: take some steps."""
    graph, ranks, seconds, loss = Train(shape, stage, path), dist.get_world_size(), list[float](), torch.zeros(())
    for step in range(STEPS):
        whole = tokens(step, shape.batch * ranks, torch.float32, shape.vocabulary, shape.context)
        x, y = (part.chunk(ranks)[rank] for part in whole)
        began = time.perf_counter()
        loss = graph(x, y)
        seconds.append(time.perf_counter() - began)
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    memory = graph.plan.memory
    states = memory["optimizer_states"], memory.host_resident, sum(memory.resident.values())
    return Held(resident("RssAnon"), resident("RssFile"), *states, statistics.median(seconds[1:]), float(loss))


def resident(kind: str) -> int:
    (kilobytes,) = re.findall(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
