"""The ZeRO paper's 7.5-billion-parameter model on 64 ranks, planned: Figure 1 of arXiv 1910.02054, and its Table 1.

    python bench/paper_table.py             # a GPT of 7.46 billion parameters on the meta device, mixed precision, Adam
    python bench/paper_table.py --layers 2  # fewer layers, to see that it runs

The model is captured once.  For each stage: ``plan.memory.model_state`` beside the paper's figure for 7.5 billion, the
seconds of planning, and the most memory that the process had.  Then the closed form, bytes of model states by
parameters, ranks and stage, beside all cells of the paper's Table 1.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings

import torch
from _run import markdown, options_of
from workloads import GPT, Shape

import graphzero as gz

RANKS = 64
FIGURE = (120.0, 31.4, 16.6, 1.9)  # GB, by stage, for 7.5 billion parameters
# Billions of parameters -> ranks -> GB at stages 1, 2, 3: Table 1 of the paper.
TABLE: dict[float, dict[int, tuple[float, float, float]]] = {
    7.5: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
          256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
          256: (518, 263, 8), 1024: (513, 257, 2)},
    1000: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip


class Train(gz.Graph):
    def __init__(self, shape: Shape):
        super().__init__()
        with torch.device("meta"):
            self.model = GPT(shape)
        self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=1e-4))
        self.config.enable_amp()

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x, y)
        loss.backward()
        return loss


def closed_form(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of model states: 2 for 16-bit parameters, 2 for their gradients, 12 for Adam's states and the masters."""
    split = [1 if stage < 3 else ranks, 1 if stage < 2 else ranks, 1 if stage < 1 else ranks]
    return sum(bytes_ * parameters / n for bytes_, n in zip((2, 2, 12), split, strict=True))


def planned(layers: int) -> list[list[str]]:
    """A row for each stage."""
    shape = Shape(vocabulary=50257, width=4096, layers=layers, heads=32, batch=1, context=1024, tied=True)
    rows = []
    with gz.testing.fake_world(RANKS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = Train(shape)
        x = torch.empty(1, shape.context, dtype=torch.long, device="meta")
        parameters = sum(p.numel() for p in graph.model.parameters())
        for stage in range(4):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            started = time.perf_counter()
            plan = graph.compile(x, x).plan
            seconds = time.perf_counter() - started
            state = plan.memory.model_state
            each = f"{state / parameters:.3f}"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            form = closed_form(parameters, RANKS, stage) / 1e9
            row = [f"{stage}", f"{state / 1e9:.2f}", f"{form:.2f}", f"{FIGURE[stage]}", each, f"{seconds:.0f}"]
            rows.append([*row, f"{peak:.1f}"])
            print(f"stage {stage}: {row}", file=sys.stderr, flush=True)
    print(f"GPT of {parameters / 1e9:.3f} billion parameters on {RANKS} ranks, bf16 with float32 masters, Adam\n")
    return rows


def cells() -> tuple[int, int]:
    """How many cells of the paper's table there are, and how many the closed form gives, to the digits printed."""
    found = [
        abs(closed_form(size * 1e9, ranks, stage) / 1e9 - said) <= max(0.0051 * said, 0.006)
        for size, by_ranks in TABLE.items() for ranks, row in by_ranks.items() for stage, said in enumerate(row, 1)
    ]  # fmt: skip
    return len(found), sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    options = options_of(parser)
    head = ["stage", "model_state, GB", "closed form", "paper", "bytes a parameter", "seconds", "process, GiB"]
    print(markdown(head, planned(options.layers)))
    count, right = cells()
    print(f"\nThe closed form gives {right} of the {count} cells of the paper's Table 1.")


if __name__ == "__main__":
    main()
