"""Train a small language model on the source text of Python's standard library, and show what each stage costs.

    python examples/launch.py --ranks 4 --model gpt2 --stage 3                          # as make train does
    torchrun --standalone --nproc-per-node=4 examples/train.py --model gpt2 --stage 3   # the same

CUDA and NCCL where every rank has a GPU, else CPUs and gloo.  launch.py has the options.  Sizes are chosen such that
the states of the model outweigh its activations, as they do in models that need ZeRO.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from language import EvalGraph, TrainGraph, make_model
from launch import options_of, start
from report import Batch, bought, plain_losses, run_stage, table
from text import Text, share
from torch import Tensor, nn
from tqdm import tqdm

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    options = options_of()
    if options.ranks != RANKS:  # the process that starts the ranks
        start(options)
    text = Text()
    make = partial(make_model, options.model, options.layers, options.width, options.context)
    model = make()
    parameters = sum(p.numel() for p in model.parameters())
    graph = TrainGraph(model, options.steps, options.stage)
    device = torch.device(graph.placement.device_type)
    say(f"{options.model} of {parameters:,} parameters, stage {options.stage}, {RANKS} ranks on {device.type}")

    def batch(step: int, part: str = "train") -> tuple[Tensor, ...]:
        return text.batch(step, options.batch, options.context, part)

    train(graph, lambda step: share(batch(step), RANK, RANKS, device), options)
    evaluate(EvalGraph(model), lambda step: share(batch(step, "held out"), RANK, RANKS, device))
    trained = graph.full_state_dict()["modules"]["model"]  # every rank calls it
    if RANK == 0:
        fresh = make()
        fresh.load_state_dict(trained)
        say("\na sample of what it writes:\n", *sample(fresh, options.context).splitlines(), sep="\n    ")
    if options.compare_steps:
        compare(make, batch, device, options.compare_steps)


def train(graph: TrainGraph, batch: Batch, options: argparse.Namespace) -> None:
    """The training loop, with a progress bar on rank 0."""
    started = time.perf_counter()
    graph.compile(*batch(0))
    say(f"compiled in {time.perf_counter() - started:.1f} s: {len(list(graph.program.nodes)):,} operations")
    tokens = options.batch * options.context
    bar = tqdm(range(options.steps), disable=RANK != 0, unit="step", dynamic_ncols=True, mininterval=1.0)
    started = time.perf_counter()
    for step in bar:
        loss = graph(*batch(step))
        speed = tokens * (step + 1) / (time.perf_counter() - started)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)


def evaluate(graph: EvalGraph, batch: Batch, batches: int = 8) -> None:
    """Mean loss over held-out batches."""
    loss = sum(graph(*batch(step)).item() for step in range(batches)) / batches
    say(f"held-out loss {loss:.3f} nats, {loss / math.log(2):.3f} bits per byte")


@torch.no_grad()
def sample(model: nn.Module, context: int, prompt: str = "def ", length: int = 300) -> str:
    """Text that an eager model continues ``prompt`` with."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        chances = torch.softmax(model(ids[:, -context:])[:, -1] / 0.8, dim=-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def compare(make: Callable[[], nn.Module], batch: Batch, device: torch.device, steps: int) -> None:
    """All four stages, and plain PyTorch on rank 0, from the same seed on the same data."""

    def own(step: int) -> tuple[Tensor, ...]:
        return share(batch(step), RANK, RANKS, device)

    reports = [run_stage(stage, make, own, steps) for stage in range(4)]
    if RANK == 0:
        reference = plain_losses(lambda: make().to(device), lambda step: share(batch(step), 0, 1, device), steps)
        say(f"\n{steps} steps of each stage, same seed, same data; bytes at the peak are planned / measured\n")
        say(table(reports, reference, RANKS), bought(reports, reference), sep="\n\n")


def say(*args: object, **kwargs: str) -> None:
    if RANK == 0:
        print(*args, **kwargs, flush=True)


if __name__ == "__main__":
    main()
