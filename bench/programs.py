"""Programs, plans and losses of the benchmark models, saved and compared to the bit with those of an earlier tree.

    python bench/programs.py KEPT             # with the old tree: writes one text a cell into the folder KEPT
    python bench/programs.py KEPT --compare   # with the new one: the same again, and what differs from KEPT

A cell is one of the benchmark models at a stage, on two data ranks or on two data times two tensor ranks, with
AdamW and a clipped norm; on two data ranks also with micro-batches and in mixed precision, and some are compiled with
the settings that let a plan decide.  Its text is the final program as it prints, its plan with decisions, and the
losses of three steps as hexadecimal floats, or the sentence that refuses it.  Exits with 1 where a cell
differs.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from _run import command_parser, parse_options
from layouts import LAYOUTS, PLANS, STAGES, parallelise
from models import CASES, OPTIMIZERS
from parity import TrainGraph

import graphzero as gz

STEPS, BATCH = 3, 8
PLACEMENTS = {"dp": LAYOUTS["dp2"], "dp x tp": LAYOUTS["dp2 x tp2"]}


def set_budget(graph: gz.Graph) -> None:
    """A tenth more than the step needs, the stage left to the plan."""
    graph.config.set_memory_budget(graph.plan.memory.peak * 11 // 10)
    graph.config.enable_zero(stage="auto")


SETTINGS: dict[str, Callable[[gz.Graph], None]] = {
    "plain": lambda graph: None,
    "micro": lambda graph: graph.config.set_gradient_accumulation_steps(2),
    "bf16": lambda graph: graph.config.enable_amp(),
    "in backward": lambda graph: graph.config.set_optimizer_in_backward(),
    "kept": lambda graph: graph.config.enable_zero(stage=3, keep_gathered=True),
    "budget": set_budget,
    "links": lambda graph: graph.config.set_links({"dp": gz.Link(latency=1e-5, bandwidth=1e9)}),
}
AT_EVERY_STAGE = ("plain", "micro", "bf16")
SHOWN = 40  # lines of a difference


@dataclass(frozen=True)
class ProgramCell:
    model: str
    placement: str
    stage: int
    setting: str = "plain"

    @property
    def file(self) -> str:
        return f"{self.model}, {self.placement}, stage {self.stage}, {self.setting}.txt"


def list_cells(models: list[str]) -> Iterator[ProgramCell]:
    """Every model at every stage, and the settings that let a plan decide at stage 3 for two of them."""
    for model in models:
        for stage in STAGES:
            yield ProgramCell(model, "dp x tp", stage)
            yield from (ProgramCell(model, "dp", stage, setting) for setting in AT_EVERY_STAGE)
    for model in models:
        if model in ("convnet", "llama"):
            yield from (ProgramCell(model, "dp", 3, setting) for setting in SETTINGS if setting not in AT_EVERY_STAGE)


def describe_cell(cell: ProgramCell) -> str:
    """Program, plan and losses."""
    case, placement = CASES[cell.model], PLACEMENTS[cell.placement].placement()
    model = case.model()
    if "tp" in placement.names:
        parallelise(model, PLANS[cell.model], placement)
    optimizer, schedule = OPTIMIZERS["adamw"](model.parameters(), STEPS)
    graph = TrainGraph(model, optimizer, schedule, cell.stage, placement, clip_grad_norm=1.0)
    if cell.setting not in AT_EVERY_STAGE:
        graph.compile(*case.batch(0, BATCH, torch.float32))
    SETTINGS[cell.setting](graph)
    try:
        losses = [float(graph(*case.batch(step, BATCH, torch.float32))).hex() for step in range(STEPS)]
    except gz.GraphZeroError as error:  # as where micro-batches cannot be: the first sentence is what a user gets
        return f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
    return "\n".join((str(graph.program), str(graph.plan), *losses, ""))


def diff_texts(before: str, after: str) -> str:
    """The first lines of what changed; nothing where nothing did."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=1))
    more = [f"... and {len(lines) - SHOWN} lines more"] if len(lines) > SHOWN else []
    return "\n".join((*lines[:SHOWN], *more))


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the texts are, or go")
    parser.add_argument("--compare", action="store_true", help="with what is there; writes nothing")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    options = parse_options(parser)
    warnings.filterwarnings("ignore", ".*has compiled.*")
    differing, cells = 0, list(list_cells(options.models))
    options.folder.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        path, text = options.folder / cell.file, describe_cell(cell)
        if not options.compare:
            path.write_text(text, encoding="utf-8")
        elif changes := diff_texts(path.read_text(encoding="utf-8"), text):
            differing += 1
            print(f"{path.stem}:\n{changes}", flush=True)
    print(f"{len(cells)} cells" + (f", {differing} differ" if options.compare else " written"))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
