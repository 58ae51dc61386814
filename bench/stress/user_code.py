"""Small programs in the manner of public bug reports, each in many configurations, against plain PyTorch.

    python bench/stress/user_code.py                          # all programs in all of their cells
    python bench/stress/user_code.py --cells 3 --seed 7       # three cells of each program, drawn by another seed
    python bench/stress/user_code.py --only 'label|penalty'   # programs whose name matches this regular expression

The programs are those of ``user_programs/``.  A cell is a program at a stage, on 1, 2 or 4 virtual ranks, on two by
two of data and tensors or on two gloo processes, with or without micro-batches, recomputation and an optimizer in
backward, in float64, float32 or bf16; any two of these options meet in some cell of each program.  Outcomes: equal
(three steps: outputs, parameters, buffers, optimizer state, and the user's objects); refused, by a GraphZeroError;
warned, where a result differs as a warning of graphzero's says; fault: different without a word, any other error, a
process that dies or is not done in time.  A cell that plain PyTorch itself does not run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _ranks import context, end_with_parent

from stress import user_code_cells as cells
from stress.user_code_cells import Cell
from stress.user_programs import PROGRAMS

SECONDS = 20  # for each cell, and a minute for all
TOGETHER = 16  # cells that are tried first in one set of processes, which takes time to begin
OUTCOMES = ("equal", "warned", "refused", "fault", "left out")  # each is worse than those before it, but the last
WARNINGS = ("statistics of a micro-batch", "which has no effect")  # what says that a result may differ


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    outcome: str
    text: str = ""


# ---- in the process of a rank


def work(rank: int, ranks: int, folder: str, wanted: Sequence[Cell]) -> None:
    """Judge cells one after the other, on one of their ranks."""
    end_with_parent()
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        store.set(f"connected {rank}", "")  # a rank may end at once: not before the others are connected to it
        store.wait([f"connected {other}" for other in range(ranks)])
    Path(folder, f"{rank}.json").write_text(json.dumps([judged(cell, rank) for cell in wanted]))
    os._exit(0)  # without the farewell of a process group of which a rank may be gone


def judged(cell: Cell, rank: int) -> tuple[str, str]:
    """The outcome on a rank, and why."""
    try:
        wanted = cells.plain(PROGRAMS[cell.program], cell.precision)
    except Exception as error:
        return "left out", first_line(error)
    try:
        found = cells.graphs(cell, rank)
    except gz.GraphZeroError as error:
        return "refused", first_line(error)
    except BaseException as error:
        return "fault", f"{first_line(error)} ({raised_at(error)})"
    apart = cells.differences(found, wanted, cell, rank)
    if not apart:
        return "equal", ""
    said = [text for text in found.warned if any(words in text for words in WARNINGS)]
    if said:
        return "warned", said[0].splitlines()[0]
    more = f"; {len(apart) - 2} more" if len(apart) > 2 else ""
    return "fault", "; ".join(apart[:2]) + more


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def raised_at(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"


# ---- in the process that starts them


def outcomes(wanted: Sequence[Cell]) -> Iterator[Outcome]:
    """Those of all cells, on virtual ranks first; of cells whose processes say nothing, each by itself."""
    for is_real in (False, True):
        alike = [cell for cell in wanted if cell.is_real == is_real]
        for at in range(0, len(alike), TOGETHER):
            some = alike[at : at + TOGETHER]
            yield from outcomes_of(some) or [one for cell in some for one in outcomes_of([cell]) or [silent(cell)]]


def outcomes_of(some: Sequence[Cell]) -> list[Outcome]:
    """Those of cells on as many ranks, each a new process for all of them; none where one of these says nothing."""
    ranks, limit = 1 + some[0].is_real, time.monotonic() + 60 + SECONDS * len(some)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context().Process(target=work, args=(rank, ranks, folder, some)) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, limit - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        if any(process.exitcode for process in processes):
            return []
        said = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [joined(cell, each) for cell, *each in zip(some, *said, strict=True)]


def joined(cell: Cell, said: Sequence[Sequence[str]]) -> Outcome:
    """The worst of what the ranks say; a fault where they differ."""
    outcome, text = max(said, key=lambda one: OUTCOMES.index(one[0]))
    if len({outcome for outcome, _ in said}) > 1:
        return Outcome(cell, "fault", f"ranks say {[outcome for outcome, _ in said]}: {text}")
    return Outcome(cell, outcome, text)


def silent(cell: Cell) -> Outcome:
    return Outcome(cell, "fault", f"a process died, or took more than {60 + SECONDS} s")


# ---- the command


def report(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = Counter(one.outcome for one in outcomes)
    programs = {one.cell.program for one in outcomes}
    said = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
    return f"{len(programs)} programs, {len(outcomes)} cells in {seconds / 60:.0f} minutes: {said}"


def drawn(only: str, count: int | None, seed: int) -> list[Cell]:
    names = [name for name in PROGRAMS if re.search(only, name)]
    return [cell for name in names for cell in islice(cells.cells_of(name, seed), count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name matches this regular expression")
    parser.add_argument("--cells", type=int, help="so many cells of each program; by default all")
    parser.add_argument("--seed", type=int, default=0, help="draws other cells")
    parser.add_argument("--show", action="store_true", help="print each cell's outcome, not only faults")
    options = parser.parse_args()
    os.environ["GRAPHZERO_PROGRESS"] = "off"
    began, found = time.monotonic(), []
    for one in outcomes(drawn(options.only, options.cells, options.seed)):
        found.append(one)
        if one.outcome == "fault" or options.show:
            print(f"{one.outcome.upper()} {one.cell}\n      {one.text}", flush=True)
    print(report(found, time.monotonic() - began))
    return int(any(one.outcome == "fault" for one in found))


if __name__ == "__main__":
    sys.exit(main())
