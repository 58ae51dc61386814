"""Train a small GPT on pipeline stages, with tensor parallelism and ZeRO in each, and compare with plain PyTorch.

    python examples/three_dimensions.py                                # 2 x 2 x 2 virtual ranks in one process
    python examples/three_dimensions.py --pp 4 --layers 4 --schedule zb1p --stage 3

Model and splits are those of ``tensor_parallel.py``; a stage is a mark on a block.
"""

from __future__ import annotations

import argparse

import torch
from tensor_parallel import Gpt, Train, compared, plain_losses
from text import Text

import graphzero as gz
from graphzero.schedules import GENERATORS


class StagedTrain(Train):
    """The step of ``tensor_parallel.py`` on pipeline stages: blocks in equal runs, the head on the last."""

    def __init__(self, model: Gpt, where: gz.Placement, stage: int, schedule: str, micro_batches: int):
        super().__init__(model, where, stage)
        stages, blocks = where.hierarchy[where.names.index("pp")], len(model.blocks)
        self.config.set_stage(model.tokens, 0)
        self.config.set_stage(model.places, 0)
        for i, block in enumerate(model.blocks):
            self.config.set_stage(block, i * stages // blocks)
        self.config.set_stage(model.norm, stages - 1)
        self.config.set_stage(model.head, stages - 1)
        self.config.set_pipeline(schedule)
        self.config.set_gradient_accumulation_steps(micro_batches)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_stage_a_rank = [name for name in GENERATORS if name in ("gpipe", "1f1b", "zb1p")]
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=2, help="ranks along the data axis")
    parser.add_argument("--tp", type=int, default=2, help="ranks along the tensor axis")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO")
    parser.add_argument("--schedule", choices=one_stage_a_rank, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--context", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = options.pp, options.dp, options.tp
    ranks = torch.arange(options.pp * options.dp * options.tp).reshape(shape)
    where = gz.placement("cpu", ranks.tolist(), names=("pp", "dp", "tp"), virtual=True)

    def make() -> Gpt:
        torch.manual_seed(0)
        return Gpt(options.layers, options.width, 2, options.context, False)

    text, rows = Text(megabytes=0.2), 2 * options.dp * options.micro_batches
    batches = [text.batch(step, rows, options.context) for step in range(options.steps)]
    graph = StagedTrain(make(), where, options.stage, options.schedule, options.micro_batches)
    losses = [graph(*batch).item() for batch in batches]
    print(f"pp={options.pp} x dp={options.dp} x tp={options.tp} virtual ranks, ZeRO stage {options.stage}\n")
    print(graph.plan, "\n")
    print(compared(losses, plain_losses(make(), batches)))


if __name__ == "__main__":
    main()
