"""Whole parameters for eager code: seconds and bytes to make them, by ``graph.full_parameters()`` and one by one.

    python bench/full_parameters.py                # the size of GPT-2 (124 M parameters), two ranks of one thread each
    python bench/full_parameters.py --shape toy    # to see that it runs

A GPT is split by a step at stage 3; then the ways take turns.  "one by one" is ``p.full_tensor()`` of each parameter,
by DTensor, as users of FSDP2 write it; "one by one, graphzero" the same through what graphzero's ranks talk through.
Seconds are medians on rank 0, bytes what the process holds more at its worst moment than before (the kernel's
high-water mark); "without wholes" is that less the whole parameters.  Leaving has no counterpart: it compares what
ranks have written, by hashes, and takes it back.
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
from parity import TrainGraph
from peak_memory import high_water, reset
from torch.distributed.tensor import DTensor
from workloads import GPT, SHAPES, Shape

from graphzero.runtime.tensors.resplit import whole

GPT2 = Shape(vocabulary=50257, width=768, layers=12, heads=12, batch=1, context=1024, tied=True)
WAYS = {**SHAPES, "gpt2": GPT2}
TOKENS = 16  # of a sequence in the step that splits the parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=WAYS, default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", metavar="FILE", help="also keep the table there")
    options = options_of(parser)
    text = table(*on_gloo(options.ranks, work, WAYS[options.shape], options.rounds))
    print(text)
    if options.save:
        save(options.save, f"{options.ranks} ranks", "full_parameters", text)


def table(held: int, found: Mapping[str, tuple[float, float, int]]) -> str:
    rows = [
        [way, f"{begin:.3f}", f"{end:.3f}" if end else "", f"{peak / 1e6:.0f}", f"{(peak - held) / 1e6:.0f}"]
        for way, (begin, end, peak) in found.items()
    ]
    head = [f"{held / 1e6:.0f} MB of parameters", "s to enter", "s to leave", "MB at most", "without wholes"]
    return markdown(head, rows)


def work(rank: int, shape: Shape, rounds: int) -> tuple[int, dict[str, tuple[float, float, int]]]:
    """Every rank: bytes of all whole parameters; of each way, seconds to enter and leave, and bytes."""
    del rank
    torch.manual_seed(0)
    model = GPT(shape)
    graph = TrainGraph(model, torch.optim.SGD(model.parameters(), lr=0.1), None, 3)
    x = torch.randint(shape.vocabulary, (1, min(TOKENS, shape.context)))
    graph(x, x)
    split = [p for p in graph.model.parameters() if isinstance(p, DTensor)]
    assert split, "nothing is split"

    def by_graph() -> float:
        begun = time.perf_counter()
        with graph.full_parameters():
            entered = time.perf_counter() - begun
            assert not any(isinstance(p, DTensor) for p in graph.model.parameters())
        return entered

    def by_torch() -> float:
        return made(lambda p: p.full_tensor(), split)

    def by_pairs() -> float:
        return made(lambda p: whole(p, graph.placement), split)

    ways = {"full_parameters()": by_graph, "one by one": by_torch, "one by one, graphzero": by_pairs}
    taken: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            taken[way].append(timed(run))
    found = {}
    for way, each in taken.items():
        begin, end = (statistics.median(one[part] for one in each[1:]) for part in (0, 1))
        found[way] = begin, end if way == "full_parameters()" else 0.0, max(one[2] for one in each[1:])
    return sum(p.numel() * p.element_size() for p in split), found


def made(gather: Callable[[Any], torch.Tensor], split: list[DTensor]) -> float:
    """Seconds until there are whole tensors of all."""
    begun = time.perf_counter()
    with torch.no_grad():
        held = [gather(p) for p in split]
    seconds = time.perf_counter() - begun
    assert all(x.shape == p.shape and not isinstance(x, DTensor) for x, p in zip(held, split, strict=True))
    return seconds


def timed(run: Callable[[], float]) -> tuple[float, float, int]:
    """Seconds until all is whole, from there to the end, and bytes at most."""
    before = reset()
    dist.barrier()
    begun = time.perf_counter()
    entered = run()
    return entered, time.perf_counter() - begun - entered, high_water() - before


if __name__ == "__main__":
    main()
