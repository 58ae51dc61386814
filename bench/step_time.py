"""Step time of stages 0 to 3 beside DDP and FSDP2, on two gloo ranks of one thread each.

    python bench/step_time.py               # a GPT-2 of 3.3 M parameters
    python bench/step_time.py --full        # longer rounds of a larger one

All six train the same model on the same data in the same processes; rounds alternate, so that whatever else the
machine does meets all of them.  Figures are medians of rank 0's steps; DDP and FSDP2 run eagerly, AdamW for all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from compare import TrainGraph
from models import gpt2, tokens
from torch import Tensor, nn

VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a larger model and more rounds")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--ranks", type=int, default=2)
    options = options_of(parser)
    options.layers = options.layers or (8 if options.full else 4)
    options.width = options.width or (512 if options.full else 256)
    options.rounds = options.rounds or (12 if options.full else 5)
    parameters, seconds, losses = on_gloo(options.ranks, work, options)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"GPT-2, {options.layers} layers of width {options.width}, {parameters / 1e6:.1f} M parameters, context "
        f"{options.context}, {options.batch} sequences a rank, {options.ranks} gloo ranks, one thread each; "
        f"{options.rounds} rounds of {options.steps - 1} counted steps\n"
    )
    head = ["", "fastest, ms", "median, ms", "quartiles, ms", "to DDP", "to FSDP2", "last loss"]
    rows = []
    for name, found in seconds.items():
        low, _, high = statistics.quantiles(found, n=4)
        ratios = [f"{middle[name] / middle[base]:.2f}" for base in ("DDP", "FSDP2")]
        rows.append(
            [
                name,
                f"{min(found) * 1e3:.0f}",
                f"{middle[name] * 1e3:.0f}",
                f"{low * 1e3:.0f} to {high * 1e3:.0f}",
                *ratios,
                f"{losses[name]:.6f}",
            ]
        )
    print(markdown(head, rows))


def work(rank: int, options: Any) -> tuple[int, dict[str, list[float]], dict[str, float]]:
    """Every rank: alternate rounds of all contestants."""
    contestants = {f"graphzero stage {stage}": graph_step(stage, options) for stage in range(4)}
    contestants |= {"DDP": eager_step(ddp, options), "FSDP2": eager_step(fsdp2, options)}
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
    return sum(p.numel() for p in make(options).parameters()), seconds, losses


def make(options: Any) -> nn.Module:
    torch.manual_seed(0)
    return gpt2(options.layers, options.width, options.width // 64, VOCABULARY, options.context)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def share(step: int, rank: int, options: Any) -> tuple[Tensor, ...]:
    batch = tokens(step, options.batch * options.ranks, torch.float32, VOCABULARY, options.context)
    return tuple(x.chunk(options.ranks)[rank] for x in batch)


def graph_step(stage: int, options: Any) -> Callable[..., Tensor]:
    model = make(options)
    return TrainGraph(model, optimizer_of(model), None, stage)


def eager_step(wrap: Callable[[nn.Module], nn.Module], options: Any) -> Callable[..., Tensor]:
    model = wrap(make(options))
    optimizer = optimizer_of(model)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    """Sharded block by block, resharded after forward, as its documentation does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.body.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mean(loss: Tensor) -> float:
    """A Graph returns the loss of the whole batch, the others that of the rank's share: the mean is the same."""
    whole = loss.clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
