"""What the passes of ``examples/passes`` change in the plan of a step: bytes sent by axis and phase, bytes held.

    python bench/plans_of_passes.py          # float32 parameters
    python bench/plans_of_passes.py --amp    # bfloat16

Twelve transformer MLP blocks of width 1024 (101 million parameters) at stage 3, on 2 nodes of 8 ranks, with AdamW.  The
model is on the meta device: nothing is computed, no rank is started.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from _run import markdown
from torch import Tensor, nn

import graphzero as gz

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from passes.int8_gathers import Int8Gathers  # noqa: E402
from passes.node_local_copy import NodeLocalCopy  # noqa: E402
from passes.offload import Offload  # noqa: E402
from passes.two_hops import TwoHops  # noqa: E402

WIDTH, BLOCKS, BATCH = 1024, 12, (64, 128)
LISTS: dict[str, list[object]] = {
    "none": [],
    "two hops": [TwoHops()],
    "node-local copy": [NodeLocalCopy()],
    "int8 gathers": [Int8Gathers()],
    "offload": [Offload()],
    "all four": [Int8Gathers(), NodeLocalCopy(), TwoHops(), Offload()],
}
SENT = [("parameters", "forward"), ("parameters", "backward"), ("gradients", "backward")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down


class Train(gz.Graph):
    def __init__(self, passes: list[object], amp: bool):
        super().__init__(gz.placement("cpu", torch.arange(16).view(2, 8), names=("dp_node", "dp_gpu"), virtual=True))
        with torch.device("meta"):
            self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_zero(stage=3)
        self.config.enable_amp(amp)
        for one in passes:
            self.config.add_pass(one, after="fuse" if isinstance(one, Offload) else "cast_before_gather")

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp", action="store_true", help="bfloat16 parameters in forward and backward")
    amp = parser.parse_args().amp
    print("MB that one rank sends between nodes + within one, and holds\n")
    head = ["passes", *(f"{what}, {phase}" for what, phase in SENT), "activations", "peak", "on the host"]
    print(markdown(head, [row(name, passes, amp) for name, passes in LISTS.items()]))
    return 0


def row(name: str, passes: list[object], amp: bool) -> list[str]:
    plan = Train(passes, amp).compile(torch.empty(*BATCH, WIDTH, device="meta")).plan
    sent: Counter[tuple[str, str, str]] = Counter()
    for one in plan.collectives:
        sent[one.what_for, one.phase, one.axis] += one.bytes  # type: ignore[assignment]
    moved = [" + ".join(mega(sent[(*key, axis)]) for axis in ("dp_node", "dp_gpu")) for key in SENT]
    memory = plan.memory
    return [name, *moved, mega(memory.activations), mega(memory.peak), mega(memory.host)]


def mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
