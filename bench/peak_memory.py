"""Peak resident memory of graphzero's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed, of rank 0.

    python bench/peak_memory.py                    # a GPT of 7.4 M parameters
    python bench/peak_memory.py --model B          # one of 24 M; conv is a convolutional network

Each system has fresh processes.  It first trains a toy, so that imports, code and its own machinery are there; from
what the process then holds, before the model is made, the high-water mark of the kernel (VmHWM) is counted: to the end
of the first step, which captures or compiles, and over the steps after it.  What is freed goes back to the kernel at
once, so that the mark is of memory in use.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from systems import BASE, add_options, mean, named, names_of
from workloads import PLAIN, WORKLOADS, Variant

STEPS = 6
CLEAR = Path("/proc/self/clear_refs")
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes; read when a process starts
BASES = (BASE, "DDP", "FSDP2")


@dataclass(frozen=True)
class Peak:
    """Bytes above what the process held before: until the first step's end, and over later steps."""

    first: int
    later: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    Variant.add_options(parser)
    options = options_of(parser)
    variant = Variant.from_options(options)
    if not CLEAR.exists():
        sys.exit("bench/peak_memory.py resets the high-water mark that Linux keeps in /proc/self; this system has none")
    os.environ.update(MALLOC)
    found = {}
    for name in names_of(options):
        found[name] = on_gloo(options.ranks, measure, name, options.model, variant)
        print(".", end="", file=sys.stderr, flush=True)
    print(f"{variant.apply(WORKLOADS[options.model]).describe(options.ranks)}\n\n{table(found)}")


def table(found: Mapping[str, Peak]) -> str:
    bases = [base for base in BASES if base in found]
    rows = []
    for name, one in found.items():
        ratios = [f"{one.later / found[base].later:.2f}" for base in bases]
        rows.append([name, mb(one.later), *ratios, mb(one.first)])
    head = ["", "peak, MB", *(f"to {base}" for base in bases), "first step, MB"]
    return markdown(head, rows)


def mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def measure(rank: int, name: str, model: str, variant: Variant = PLAIN) -> Peak:
    """Every rank: train a toy, then the model."""
    system, ranks = named(name), dist.get_world_size()
    toy = WORKLOADS["toy conv" if "conv" in model else "toy"]
    toy = variant.apply(replace(toy, share=toy.share * variant.micro_batches))
    step = system.begin(toy)
    for i in range(3):
        mean(step(*toy.part(i, rank, ranks)))
    del step
    workload = variant.apply(WORKLOADS[model])
    batches = [workload.part(i, rank, ranks) for i in range(STEPS)]
    dist.barrier()
    before = reset()
    step = system.begin(workload)
    mean(step(*batches[0]))
    first = high_water() - before
    reset()
    for batch in batches[1:]:
        mean(step(*batch))
    return Peak(first, high_water() - before)


def give_back() -> None:
    """Give freed memory back to the kernel."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def reset() -> int:
    """Give back what is free and begin the high-water mark again; the resident bytes."""
    give_back()
    CLEAR.write_text("5")
    return high_water()


def high_water() -> int:
    return resident("VmHWM")


def resident(kind: str) -> int:
    """Bytes of this process that are resident now, of a kind that the kernel names."""
    (kilobytes,) = re.findall(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
