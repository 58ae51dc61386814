"""Train with checkpoints: killed at any moment, the same command goes on from the last one, on any number of ranks that
divides the batch.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/resume.py runs/first

torchrun starts all ranks again when one ended.  With fewer or more ranks than before each takes another share of the
same batches, so the losses are those of an undisturbed run, but for rounding; to the bit on as many ranks as before.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch
from language import TrainGraph, make_model
from text import Text, share

import graphzero as gz

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoints; one that all hosts share")
    parser.add_argument("--model", choices=("gpt2", "mlp"), default="gpt2")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints")
    parser.add_argument("--batch", type=int, default=24, help="sequences, of all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--double", action="store_true", help="compute in float64")
    options = parser.parse_args()
    if options.batch % RANKS:
        parser.error(f"--batch {options.batch}: {RANKS} ranks share it, so give a multiple of {RANKS}")
    logging.basicConfig(level=logging.INFO if RANK == 0 else logging.WARNING, format="%(message)s")

    model = make_model(options.model, options.layers, options.width, options.context)
    graph = TrainGraph(model.double() if options.double else model, options.steps, options.stage)
    train(graph, Text(megabytes=1.0), options)


def train(graph: TrainGraph, text: Text, options: argparse.Namespace) -> None:
    device, begin = torch.device(graph.placement.device_type), 0
    if gz.latest(options.folder):
        begin = gz.load(graph, options.folder)["step"]
        say(f"goes on from step {begin}")
    for step in range(begin, options.steps):
        loss = graph(*share(text.batch(step, options.batch, options.context), RANK, RANKS, device))
        taken = step + 1
        if taken % options.save_every == 0 or taken == options.steps:
            say(f"step {taken}, loss {loss.item():.12g}")
            saved = gz.save(graph, options.folder, keep=options.keep, asynchronous=True, extra={"step": taken})
    if begin < options.steps:
        saved.wait()


def say(*args: object) -> None:
    if RANK == 0:
        print(*args, flush=True)


if __name__ == "__main__":
    main()
