"""What tiles of rows save and cost on a GPT-2 with its own vocabulary, by ``config.set_row_tiles``.

    python bench/tiles.py --layers 2 --rounds 3

One Graph on two virtual ranks takes a step with each number of tiles in turn.  A time is the median over rounds of a
step's seconds of the processor by those of the step without tiles in the same round.  Bytes are the plan's of one rank,
and what the dispatcher sees of that rank alone.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from _run import markdown, options_of
from torch import Tensor
from workloads import GPT, Shape

import graphzero as gz
from graphzero.testing import fake_world, measure_step

COUNTS = (1, 2, 4, 8)
STAGE = 2
HEAD = ["tiles", "peak, MB", "measured, MB", "largest held of the logits, MB", "time", "fastest, s"]


class Train(gz.Graph):
    def __init__(self, shape: Shape, placement: gz.Placement) -> None:
        super().__init__(placement)
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_zero(stage=STAGE)
        self.config.set_arena(False)

    def build(self, tokens: Tensor, following: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, following)
        loss.backward()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    options = options_of(parser)
    shape = Shape(
        options.vocabulary, options.width, options.layers, options.width // 64, options.batch, options.context, True
    )
    print(
        f"{shape.layers} layers of width {shape.width}, {shape.vocabulary} classes, tied; two ranks at stage {STAGE}, "
        f"AdamW, {shape.batch} sequences of {shape.context} tokens each\n"
    )
    held, seconds = peaks(shape), times(shape, options.rounds)
    logits = shape.batch * shape.context * shape.vocabulary * 4
    rows = []
    for count in COUNTS:
        ratio = statistics.median(one / whole for one, whole in zip(seconds[count], seconds[1], strict=True))
        megabytes = (f"{nbytes / 1e6:.1f}" for nbytes in (*held[count], logits // count))
        rows.append([str(count), *megabytes, f"{ratio:.2f}", f"{min(seconds[count]):.2f}"])
    print(markdown(HEAD, rows))


def tokens(shape: Shape, ranks: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(0, shape.vocabulary, (ranks * shape.batch, shape.context + 1))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def peaks(shape: Shape) -> dict[int, tuple[int, int]]:
    """By number of tiles, the bytes of a rank's peak: the plan's, and those that the dispatcher sees."""
    found = {}
    with fake_world(2):
        graph, batch = Train(shape, gz.placement("cpu", range(2))), tokens(shape, 1)
        for count in COUNTS:
            graph.config.set_row_tiles(count)
            graph(*batch)
            found[count] = graph.plan.memory.peak, measure_step(graph, *batch).peak
    return found


def times(shape: Shape, rounds: int) -> dict[int, list[float]]:
    """By number of tiles, the processor's seconds of steps of both ranks."""
    graph, batch = Train(shape, gz.placement("cpu", range(2), virtual=True)), tokens(shape, 2)
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    for taken in range(rounds + 1):
        for count in COUNTS:
            graph.config.set_row_tiles(count)
            start = time.process_time()
            graph(*batch)
            if taken:  # the first one compiles
                found[count].append(time.process_time() - start)
    return found


if __name__ == "__main__":
    main()
