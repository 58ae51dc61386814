"""Seconds of CPU that capture, passes and plan take of a model of very many small ops, and where they go.

    python bench/capture_time.py [--blocks 120] [--stage 2] [--profile]

The model is deep and narrow, as networks of reparametrised convolutions are: each block has three branches of
convolution and batch norm, squeeze and excitation, and two pointwise layers.  Shapes are tiny, so that what is measured
is the number of nodes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings

import torch
from torch import Tensor, nn

import graphzero as gz


class Block(nn.Module):
    """x + pointwise(excite(conv3(x) + conv1(x) + norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width))
        self.point = nn.Conv2d(width, width, 1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
        self.wide = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.GELU())
        self.narrow = nn.Sequential(nn.Conv2d(2 * width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x) + self.point(x) + x)
        y = y * self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return y + self.narrow(self.wide(y))


class Train(gz.Graph):
    """One step of the blocks and a classifier under AdamW."""

    def __init__(self, blocks: int, stage: int, width: int = 8) -> None:
        super().__init__(gz.placement("cpu", range(4), virtual=True))
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(blocks)), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(width, 10),
        )  # fmt: skip
        self.loss = nn.CrossEntropyLoss()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss


def measure(blocks: int, stage: int) -> tuple[Train, float]:
    """The compiled Graph, and the CPU seconds it took."""
    warnings.simplefilter("ignore")
    graph, x, y = Train(blocks, stage), torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    started = time.process_time()
    graph.compile(x, y)
    return graph, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print the functions that most time is spent in")
    options = parser.parse_args()
    measure(1, options.stage)  # what is loaded and cached once
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    graph, seconds = measure(options.blocks, options.stage)
    profile.disable()
    parts = {"captured": graph._selection.last.captured.graph} if graph._selection.last else {}
    nodes = {name: len(list(part.nodes)) for name, part in {**parts, "final": graph.program}.items()}
    passes = {record.name: record.seconds for record in graph.history}
    print(f"{options.blocks} blocks, {nodes['captured']} nodes captured, {nodes['final']} in the program")
    print(f"all {seconds:.2f} s of CPU, of which passes {sum(passes.values()):.2f} s")
    print(", ".join(f"{name} {taken:.2f}" for name, taken in passes.items() if taken > 0.1))
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
