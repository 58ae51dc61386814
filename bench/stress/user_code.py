"""Small programs in the manner of public bug reports, each in many configurations, against plain PyTorch.

    python bench/stress/user_code.py                          # all programs in all of their cells
    python bench/stress/user_code.py --cells 3 --seed 7       # three cells of each program, drawn by another seed
    python bench/stress/user_code.py --only 'label|penalty'   # programs whose name matches this regular expression

The programs are those of ``user_programs/``, and docs/models.md says what a cell is.  Outcomes: equal; refused, by a
GraphZeroError; warned, where a result differs as a warning of graphzero's says; fault: different without a word, any
other error, a process that dies or is not done in time.  A cell that plain PyTorch itself does not run is left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _ranks import start
from _run import command_parser, parse_options

from stress import user_code_cells
from stress.user_code_cells import Cell, list_cells
from stress.user_programs import PROGRAMS

SECONDS = 20  # for each cell, and a minute for all
DEAD = f"a process died, or took more than {60 + SECONDS} s"
TOGETHER = 16  # cells that are tried first in one set of processes, which takes time to begin
OUTCOMES = ("equal", "warned", "refused", "fault", "left out")  # each is worse than those before it, but the last
WARNINGS = ("statistics of a micro-batch", "which has no effect")  # what says that a result may differ


class Outcome(NamedTuple):
    cell: Cell
    outcome: str
    text: str = ""


# ---- in the process of a rank


def judge_cells(rank: int, ranks: int, folder: str, cells: Sequence[Cell]) -> None:
    """Judge cells one after the other, on one of their ranks."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        store.set(f"connected {rank}", "")  # a rank may end at once: not before the others are connected to it
        store.wait([f"connected {other}" for other in range(ranks)])
    Path(folder, f"{rank}.json").write_text(json.dumps([judge_cell(cell, rank) for cell in cells]))
    os._exit(0)  # without the farewell of a process group of which a rank may be gone


def judge_cell(cell: Cell, rank: int) -> tuple[str, str]:
    """The outcome on a rank, and why."""
    try:
        expected = user_code_cells.train_eagerly(PROGRAMS[cell.program], cell.precision)
    except Exception as error:
        return "left out", first_line(error)
    try:
        training = user_code_cells.train_graph(cell, rank)
    except gz.GraphZeroError as error:
        return "refused", first_line(error)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "fault", f"{first_line(error)} ({'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"
    differences = user_code_cells.compare_trainings(training, expected, cell, rank)
    if not differences:
        return "equal", ""
    for text in training.warnings:
        if any(words in text for words in WARNINGS):
            return "warned", text.splitlines()[0]
    more = f"; {len(differences) - 2} more" if len(differences) > 2 else ""
    return "fault", "; ".join(differences[:2]) + more


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


# ---- in the process that starts them


def try_cells(cells: Sequence[Cell]) -> Iterator[Outcome]:
    """Outcomes of all cells, on virtual ranks first; of cells whose processes say nothing, each by itself."""
    for is_real in (False, True):
        alike = [cell for cell in cells if cell.is_real == is_real]
        for at in range(0, len(alike), TOGETHER):
            some = alike[at : at + TOGETHER]
            yield from try_together(some) or [
                (try_together([cell]) or [Outcome(cell, "fault", DEAD)])[0] for cell in some
            ]


def try_together(cells: Sequence[Cell]) -> list[Outcome]:
    """Outcomes of cells on as many ranks, each a new process for all of them; none where one of these says nothing."""
    ranks = 1 + cells[0].is_real
    with tempfile.TemporaryDirectory() as folder, suppress(ProcessException, TimeoutError):
        start(judge_cells, (ranks, folder, cells), ranks, seconds=60 + SECONDS * len(cells))
        answers = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        return [join_answers(cell, each) for cell, *each in zip(cells, *answers, strict=True)]
    return []


def join_answers(cell: Cell, answers: Sequence[Sequence[str]]) -> Outcome:
    """The worst of what the ranks say; a fault where they differ."""
    outcome, text = max(answers, key=lambda answer: OUTCOMES.index(answer[0]))
    if len({outcome for outcome, _ in answers}) > 1:
        return Outcome(cell, "fault", f"ranks say {[outcome for outcome, _ in answers]}: {text}")
    return Outcome(cell, outcome, text)


# ---- the command


def draw_cells(only: str, count: int | None, seed: int) -> list[Cell]:
    names = [name for name in PROGRAMS if re.search(only, name)]
    return [cell for name in names for cell in islice(list_cells(name, seed), count)]


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--only", default="", help="programs whose name matches this regular expression")
    parser.add_argument("--cells", type=int, help="so many cells of each program; by default all")
    parser.add_argument("--seed", type=int, default=0, help="draws other cells")
    parser.add_argument("--show", action="store_true", help="print each cell's outcome, not only faults")
    options = parse_options(parser)
    os.environ["GRAPHZERO_PROGRESS"] = "off"
    began, outcomes = time.monotonic(), []
    for one in try_cells(draw_cells(options.only, options.cells, options.seed)):
        outcomes.append(one)
        if one.outcome == "fault" or options.show:
            print(f"{one.outcome.upper()} {one.cell}\n      {one.text}", flush=True)
    counts = Counter(one.outcome for one in outcomes)
    programs, minutes = {one.cell.program for one in outcomes}, (time.monotonic() - began) / 60
    summary = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
    print(f"{len(programs)} programs, {len(outcomes)} cells in {minutes:.0f} minutes: {summary}")
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())
