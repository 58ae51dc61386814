"""Resident memory and step time with optimizer states, and activations, in memory, and in files, of rank 0.

    python bench/offload.py --path /local/disk                 # a GPT of 124 M parameters on two gloo ranks
    python bench/offload.py --path /tmp --layers 2 --vocabulary 8192
    python bench/offload.py --path /local/disk --activations 0.5 --context 512   # and half of the activations

The figures are of fresh processes, after some steps: what Linux says is resident of the process' own memory (RssAnon)
and of mapped files (RssFile), the optimizer states that the plan says are on the device and on the host, and the median
step; the most that was resident in a step, of both (VmHWM), beside the plan's peak and activations.  The path is best
on a disk of its own: pages that have been written are the system's to keep, in memory that is free.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from _run import markdown, on_gloo
from parity import TrainGraph
from peak_memory import CLEAR, MALLOC, give_back, high_water, resident
from workloads import GPT, Shape, gpt

STEPS = 5
COLUMNS = {  # of bytes, after the last step, and at most within it
    "own, MB": "own", "mapped files, MB": "files", "states on device, MB": "on_device", "on host, MB": "on_host",
    "planned between steps, MB": "planned", "most in a step, MB": "most", "planned peak, MB": "peak",
    "planned activations, MB": "activations",
}  # fmt: skip


def graph_of(shape: Shape, stage: int, path: str | None, activations: int | None = None) -> TrainGraph:
    torch.manual_seed(0)
    model = GPT(shape)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters(), lr=1e-4), None, stage)
    if path is not None:
        graph.config.enable_offload(activations=activations, path=path)
    return graph


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
        one = on_gloo(options.ranks, measure, shape, options.stage, path, share)
        cells = [f"{one[key] / 1e6:.1f}" for key in COLUMNS.values()]
        rows.append([name, *cells, f"{one['seconds']:.2f}", f"{one['loss']:.6f}"])
    table = markdown(["held", *COLUMNS, "step, s", "loss"], rows)
    print(f"stage {options.stage} on {options.ranks} gloo ranks, bytes of rank 0\n\n{table}")


def measure(rank: int, shape: Shape, stage: int, path: str | None, share: float | None) -> dict[str, float]:
    """Every rank: take some steps."""
    workload, ranks, seconds, loss = gpt(shape), dist.get_world_size(), list[float](), torch.zeros(())
    activations = None
    if share is not None:
        plain = graph_of(shape, stage, None).compile(*workload.part(0, rank, ranks)).plan
        activations = int(share * plain.memory.activations)
    graph = graph_of(shape, stage, path, activations)
    for step in range(STEPS):
        batch = workload.part(step, rank, ranks)
        if step == STEPS - 1:
            CLEAR.write_text("5")  # the most resident is counted again
        began = time.perf_counter()
        loss = graph(*batch)
        seconds.append(time.perf_counter() - began)
    most = high_water()
    give_back()
    memory = graph.plan.memory
    return {
        "own": resident("RssAnon"), "files": resident("RssFile"), "on_device": memory["optimizer_states"],
        "on_host": memory.host_resident, "planned": sum(memory.resident.values()), "most": most, "peak": memory.peak,
        "activations": memory.activations, "seconds": statistics.median(seconds[1:]), "loss": float(loss),
    }  # fmt: skip


if __name__ == "__main__":
    main()
