"""Plans of large steps, without ranks.

    python bench/plans.py passes           # the passes of examples/passes, float32 parameters; --amp: bfloat16
    python bench/plans.py paper            # the ZeRO paper's model of 7.5 billion parameters; --layers 2: quickly
    python bench/plans.py budget           # Llama 7B cut to 8 layers on 64 ranks; --layers 32: whole
    python bench/plans.py recomputation    # GPT-2 124M on 64 ranks, with bounds of its activations
    python bench/plans.py pipelines        # Llama 3 70B on 512 ranks, pp 8 x dp 8 x tp 8: 40 minutes
    python bench/plans.py sequences        # Llama 3 8B and sequences of 131,072 tokens on 64 ranks
    python bench/plans.py experts          # a layer of Qwen3-30B-A3B on 8 ranks; --ways: on 64 data ranks
    python bench/plans.py page             # ``graphzero show`` of GPT-2 124M: seconds, size; --pictures docs: pictures

Models are on the meta device: nothing is computed, no weight is allocated, one core is used.  Seconds are the
processor's.  The last line says the most memory that the process had.  The figures stand in docs/ on the pages of these
subjects.

passes: twelve transformer MLP blocks of width 1024 (101 million parameters) at stage 3, on 2 nodes of 8 ranks, with
AdamW; bytes sent by axis and phase, bytes held.  paper: Figure 1 of arXiv 1910.02054 and its Table 1.  A GPT of 7.46
billion parameters is captured once for 64 ranks, mixed precision, Adam; for each stage ``plan.memory.model_state``
beside the paper's figure; then the closed form beside all cells of Table 1.  budget: bytes of one rank at stage 3, with
budgets from the peak of the program that keeps nothing to that of the one that keeps everything.  page: one plan and
two beside each other, written to /tmp/graphzero_page.html; pictures (page_light.png, page_dark.png and page_phone.png)
want playwright and /usr/bin/chromium.

The others are in bfloat16 under float32 masters, with AdamW.  pipelines: 32 micro-batches of one sequence of 8,192
tokens on each data rank, clipping; "bubble" is that of the schedule by planned seconds of an H100, "sent" what one rank
of the fullest member sends in a step, and along pp beside it.  ``--zero 3 --schedule 1f1b --budget 72GB`` says what a
budget makes of it.  sequences: one on each data rank, cut over the axis cp, clipping, each layer computed again in
backward, ZeRO over both axes; GB of a rank at the peak, and sent in a step for attention, of parameters and of
gradients.  The first row of a placement has the seconds of tracing too.  experts: one sequence of ``--tokens`` in all
on an axis ``ep``, one on each rank of an axis ``dp``; embedding and head are not in a layer.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import large_models
import torch
from _run import markdown, options_of
from models import WithLoss, gpt2, published_llama
from parity import TrainGraph
from torch import Tensor, nn
from workloads import GPT, Shape

import graphzero as gz
from graphzero.cli import main as graphzero_command

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from passes.int8_gathers import Int8Gathers  # noqa: E402
from passes.node_local_copy import NodeLocalCopy  # noqa: E402
from passes.offload import Offload  # noqa: E402
from passes.two_hops import TwoHops  # noqa: E402

# ---- passes

WIDTH, BLOCKS, BATCH = 1024, 12, (64, 128)
PASSES: dict[str, list[object]] = {
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


class TrainBlocks(gz.Graph):
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


def show_passes(options: argparse.Namespace) -> None:
    print("MB that one rank sends between nodes + within one, and holds\n")
    head = ["passes", *(f"{what}, {phase}" for what, phase in SENT), "activations", "peak", "on the host"]
    print(markdown(head, [row_of_passes(name, passes, options.amp) for name, passes in PASSES.items()]))


def row_of_passes(name: str, passes: list[object], amp: bool) -> list[str]:
    plan = TrainBlocks(passes, amp).compile(torch.empty(*BATCH, WIDTH, device="meta")).plan
    sent: Counter[tuple[str, str, str]] = Counter()
    for one in plan.collectives:
        sent[one.what_for, one.phase, one.axis] += one.bytes  # type: ignore[assignment]
    moved = [" + ".join(megabytes(sent[(*key, axis)]) for axis in ("dp_node", "dp_gpu")) for key in SENT]
    memory = plan.memory
    return [name, *moved, megabytes(memory.activations), megabytes(memory.peak), megabytes(memory.host)]


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


# ---- the ZeRO paper

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


def show_paper(options: argparse.Namespace) -> None:
    head = ["stage", "model_state, GB", "closed form", "paper", "bytes a parameter", "seconds"]
    print(markdown(head, rows_of_paper(options.layers or 36)))
    count, right = table_cells()
    print(f"\nThe closed form gives {right} of the {count} cells of the paper's Table 1.")


def rows_of_paper(layers: int) -> list[list[str]]:
    """A row for each stage."""
    shape = Shape(vocabulary=50257, width=4096, layers=layers, heads=32, batch=1, context=1024, tied=True)
    rows = []
    with gz.testing.fake_world(RANKS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            model = GPT(shape)
            x = torch.empty(1, shape.context, dtype=torch.long)
        graph = TrainGraph(model, torch.optim.Adam(model.parameters(), lr=1e-4))
        graph.config.enable_amp()
        parameters = sum(p.numel() for p in model.parameters())
        for stage in range(4):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            started = time.process_time()
            state = graph.compile(x, x).plan.memory.model_state
            seconds = time.process_time() - started
            form = closed_form(parameters, RANKS, stage) / 1e9
            row = [f"{stage}", f"{state / 1e9:.2f}", f"{form:.2f}", f"{FIGURE[stage]}", f"{state / parameters:.3f}"]
            rows.append([*row, f"{seconds:.0f}"])
            print(f"stage {stage}: {row}", file=sys.stderr, flush=True)
    print(f"GPT of {parameters / 1e9:.3f} billion parameters on {RANKS} ranks, bf16 with float32 masters, Adam\n")
    return rows


def closed_form(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of model states: 2 for 16-bit parameters, 2 for their gradients, 12 for Adam's states and the masters."""
    split = [1 if stage < 3 else ranks, 1 if stage < 2 else ranks, 1 if stage < 1 else ranks]
    return sum(bytes_ * parameters / n for bytes_, n in zip((2, 2, 12), split, strict=True))


def table_cells() -> tuple[int, int]:
    """The number of cells of the paper's table, and of those that the closed form gives, to the digits printed."""
    right = [
        abs(closed_form(size * 1e9, ranks, stage) / 1e9 - said) <= max(0.0051 * said, 0.006)
        for size, by_ranks in TABLE.items() for ranks, row in by_ranks.items() for stage, said in enumerate(row, 1)
    ]  # fmt: skip
    return len(right), sum(right)


# ---- memory budget

PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the way from keeping nothing to keeping everything


def show_budget(options: argparse.Namespace) -> None:
    layers = options.layers or 8
    with gz.testing.fake_world(options.ranks):
        plans = {"nothing kept": planned(layers), "all kept": planned(layers, keep_gathered=True)}
        low, high = (plan.memory.peak for plan, _ in plans.values())
        for part in PARTS:
            plans[f"{part:.0%} of the way"] = planned(layers, budget=int(low + part * (high - low)))
    rows = []
    for name, (plan, seconds) in plans.items():
        sizes = (f"{plan.memory.peak / 1e9:.2f} GB", f"{plan.comm_bytes / 1e9:.2f} GB")
        rows.append([name, *sizes, str(len(plan.kept)), f"{seconds:.1f}"])
    print(f"Llama 7B with {layers} layers, stage 3, {options.ranks} ranks, one sequence of 2,048 each\n")
    print(markdown(["budget", "peak", "sent", "parameters kept", "seconds to compile"], rows))


def planned(layers: int, budget: int | None = None, keep_gathered: bool = False) -> tuple[Any, float]:
    """The plan, and seconds of the processor."""
    model, ids = WithLoss(published_llama("7B", layers)), torch.zeros(1, 2048, dtype=torch.long, device="meta")
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, 3, None)
    graph.config.enable_zero(stage=3, keep_gathered=keep_gathered)
    graph.config.set_memory_budget(budget)
    started = time.process_time()
    graph.compile(ids, ids)
    return graph.plan, time.process_time() - started


# ---- the page of ``graphzero show``

PAGE = Path("/tmp/graphzero_page.html")
PICTURES = {"page_light": ("light", 1280, 1180), "page_dark": ("dark", 1280, 1180), "page_phone": ("dark", 390, 1500)}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]


def make_gpt2(placement: gz.Placement | None, stage: int) -> tuple[TrainGraph, tuple[Tensor, Tensor]]:
    """The FACTORY: GPT-2 124M under AdamW in float32, and one rank's batch of four sequences."""
    with torch.device("meta"):
        model = gpt2(12, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(4, 1024, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return TrainGraph(model, optimizer, None, stage, placement, clip_grad_norm=1.0), (ids, ids)


def show_page(options: argparse.Namespace) -> None:
    factory = f"{__file__}:make_gpt2"
    for more in ([], ["--beside", "stage=1"]):
        began = time.process_time()
        words = ["show", factory, "--ranks", "8", "--stage", "3", "--html", str(PAGE), *more]
        assert graphzero_command(words) == 0
        seconds, size = time.process_time() - began, PAGE.stat().st_size
        print(f"  {1 + bool(more)} plan(s): {seconds:.1f} s of one core, {size / 1e6:.2f} MB")
        assert size < 5e6, "a page of a model of this size should be one that can be mailed"
    if options.pictures:
        take_pictures(options.pictures)


def take_pictures(folder: Path) -> None:
    """Of the page as it opens, in light, in dark, and at the width of a phone."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        for name, (scheme, width, height) in PICTURES.items():
            shown = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            shown.goto(PAGE.as_uri())
            shown.wait_for_timeout(500)
            shown.screenshot(path=folder / f"{name}.png")
        browser.close()


SUBJECTS = {
    "passes": show_passes, "paper": show_paper, "budget": show_budget, "page": show_page, **large_models.SUBJECTS,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--amp", action="store_true", help="passes: bfloat16 parameters in forward and backward")
    parser.add_argument("--layers", type=int, help="of the model: by default all that it has, for a budget 8")
    parser.add_argument("--ranks", type=int, default=64, help="budget")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="page: where pictures of it are put")
    large_models.add_options(parser)
    options = options_of(parser)
    warnings.simplefilter("ignore")
    SUBJECTS[options.subject](options)
    print(f"\nat most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory")


if __name__ == "__main__":
    main()
