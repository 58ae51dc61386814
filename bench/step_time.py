"""Step time of stages 0 to 3 beside DDP, DDP with torch.compile and FSDP2, on two gloo ranks of one thread each.

    python bench/step_time.py               # a GPT of 7.4 M parameters
    python bench/step_time.py --model B     # one of 24 M
    python bench/step_time.py --full        # more rounds

All train the same model on the same data in the same processes, with AdamW, fused for the peers; rounds alternate, so
that whatever else the machine does meets all of them.  Figures are medians of rank 0's steps.  Then: where a step's
time goes, stage by stage.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from compare import TrainGraph
from gpt import GPT, SHAPES
from models import tokens
from torch import Tensor, nn

import graphzero as gz
from graphzero.runtime.timer import StepTimes

BASES = ("DDP + compile", "DDP", "FSDP2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more rounds")
    parser.add_argument("--model", choices=SHAPES, default="A")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="leave out DDP with torch.compile")
    options = options_of(parser)
    options.rounds = options.rounds or (12 if options.full else 5)
    parameters, seconds, losses, profiles = on_gloo(options.ranks, work, options)
    shape = SHAPES[options.model]
    print(
        f"GPT, {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, {parameters / 1e6:.1f} M "
        f"parameters, context {shape.context}, {shape.batch} sequences a rank, {options.ranks} gloo ranks, one thread "
        f"each; {options.rounds} rounds of {options.steps - 1} counted steps\n"
    )
    print(times_table(seconds, losses))
    print("\nWhere a step's time goes on rank 0, ms:\n")
    print(profile_table(profiles))


def times_table(seconds: dict[str, list[float]], losses: dict[str, float]) -> str:
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    bases = [base for base in BASES if base in middle]
    rows = []
    for name, found in seconds.items():
        low, _, high = statistics.quantiles(found, n=4)
        ratios = [f"{middle[name] / middle[base]:.2f}" for base in bases]
        times = [f"{min(found) * 1e3:.0f}", f"{middle[name] * 1e3:.0f}", f"{low * 1e3:.0f} to {high * 1e3:.0f}"]
        rows.append([name, *times, *ratios, f"{losses[name]:.6f}"])
    head = ["", "fastest, ms", "median, ms", "quartiles, ms", *(f"to {base}" for base in bases), "last loss"]
    return markdown(head, rows)


def profile_table(profiles: dict[str, StepTimes]) -> str:
    kinds = sorted({kind for times in profiles.values() for kind in times.seconds}, key=_order)
    rows = [
        [f"{what}: {detail}", *(_ms(times.seconds.get((what, detail), 0.0), times) for times in profiles.values())]
        for what, detail in kinds
    ]
    rows.append(["all", *(f"{times.total * 1e3:.1f}" for times in profiles.values())])
    return markdown(["", *profiles], rows)


def _order(kind: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    return ("compute", "communication", "copies", "overhead").index(kind[0]), kind


def _ms(seconds: float, times: StepTimes) -> str:
    return f"{seconds / times.calls * 1e3:.1f}" if seconds else "-"


def work(rank: int, options: Any) -> tuple[int, dict[str, list[float]], dict[str, float], dict[str, StepTimes]]:
    """Every rank: alternate rounds of all contestants, then profile the Graphs."""
    graphs = {f"stage {stage}": graph_step(stage, options) for stage in range(4)}
    peers = {"DDP": ddp, "FSDP2": fsdp2}
    if not options.no_compile:
        peers["DDP + compile"] = compiled_ddp
    contestants = {**graphs, **{name: eager_step(wrap, options) for name, wrap in peers.items()}}
    batches = [share(step, rank, options) for step in range(8)]
    for step in contestants.values():
        step(*batches[0])
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses = {}
    for turn in range(options.rounds):
        for name, step in contestants.items():
            dist.barrier()
            for i in range(options.steps):
                started = time.perf_counter()
                loss = step(*batches[(turn * options.steps + i) % len(batches)])
                if i:
                    seconds[name].append(time.perf_counter() - started)
            losses[name] = mean(loss)
    profiles = {name: profiled(graph, batches) for name, graph in graphs.items()}
    return sum(p.numel() for p in make(options).parameters()), seconds, losses, profiles


def profiled(graph: TrainGraph, batches: list[tuple[Tensor, ...]]) -> StepTimes:
    times = StepTimes()
    dist.barrier()
    graph(*batches[0])
    for batch in batches:
        gz.testing.profile_step(graph, *batch, times=times)
    return times


def make(options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPES[options.model])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def share(step: int, rank: int, options: Any) -> tuple[Tensor, ...]:
    shape = SHAPES[options.model]
    batch = tokens(step, shape.batch * options.ranks, torch.float32, shape.vocabulary, shape.context)
    return tuple(x.chunk(options.ranks)[rank] for x in batch)


def graph_step(stage: int, options: Any) -> TrainGraph:
    model = make(options)
    return TrainGraph(model, optimizer_of(model), None, stage)


def eager_step(wrap: Callable[[nn.Module], Callable[..., Tensor]], options: Any) -> Callable[..., Tensor]:
    model = make(options)
    wrapped = wrap(model)
    optimizer = optimizer_of(model)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(model: nn.Module) -> Callable[..., Tensor]:
    return nn.parallel.DistributedDataParallel(model)


def compiled_ddp(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(ddp(model))  # type: ignore[arg-type]


def fsdp2(model: nn.Module) -> Callable[..., Tensor]:
    """Sharded block by block, resharded after forward, as its documentation does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in model.blocks:  # type: ignore[union-attr]
        shard(block)
    return shard(model)


def mean(loss: Tensor) -> float:
    """A Graph returns the loss of the whole batch, the others that of the rank's share: the mean is the same."""
    whole = loss.clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
