"""Small programs in the manner of public bug reports, each in many configurations, against plain PyTorch.

    python bench/stress/user_code.py                          # all programs in all of their cells
    python bench/stress/user_code.py --cells 3 --seed 7       # three cells of each program, drawn by another seed
    python bench/stress/user_code.py --only 'label|penalty'   # programs whose name matches this regular expression

The programs are those of ``user_programs/``.  A cell is a program at a stage, on 1, 2 or 4 virtual ranks, on two by
two of data and tensors or on two gloo processes, with or without micro-batches, recomputation and an optimizer in
backward, in float64, float32 or bf16; any two of these options meet in some cell of each program.  Outcomes: equal
(three steps: outputs, parameters, buffers, optimizer state, and the user's objects); refused, by a GraphZeroError;
warned, where a result differs as a warning of graphzero's says; fault: different without a word, any other error, a
process that dies, or no progress for two minutes.  A cell that plain PyTorch itself does not run is left out.
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
from typing import Any

import torch
import torch.distributed as dist

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _ranks import context, end_with_parent

from stress import user_code_cells as cells
from stress.user_code_cells import Cell
from stress.user_programs import PROGRAMS

SILENT = 120  # seconds without progress that are a hang
OUTCOMES = ("equal", "warned", "refused", "fault", "left out")  # each is worse than those before it, but the last
WARNINGS = ("statistics of a micro-batch", "which has no effect")  # what says that a result may differ


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    outcome: str
    text: str = ""


# ---- in the process of a rank


def work(rank: int, ranks: int, folder: str, wanted: Sequence[Cell]) -> None:
    """Judge cells one after the other; each is announced before, so that whoever started this knows where it died."""
    end_with_parent()
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    expected: dict[tuple[str, str], cells.Run | str] = {}
    with Path(folder, f"{rank}.jsonl").open("w") as file:
        for i, cell in enumerate(wanted):
            outcome, text = judged(cell, rank, expected)
            file.write(json.dumps([i, outcome, text]) + "\n")
            file.flush()
            if outcome == "fault" and ranks > 1:
                break  # the other rank may wait for this one
    os._exit(0)  # without the farewell of a process group of which a rank may be gone


def judged(cell: Cell, rank: int, expected: dict[tuple[str, str], cells.Run | str]) -> tuple[str, str]:
    key = cell.program, cell.precision
    if key not in expected:
        try:
            expected[key] = cells.plain(PROGRAMS[cell.program], cell.precision)
        except Exception as error:
            expected[key] = first_line(error)
    wanted = expected[key]
    if isinstance(wanted, str):
        return "left out", wanted
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
    """Those of all cells: first on virtual ranks, then on real ones."""
    for ranks in (1, 2):
        left = [cell for cell in wanted if cell.is_real == (ranks > 1)]
        while left:
            count = 0
            for outcome in one_set(left, ranks):
                yield outcome
                count += 1
            left = left[count:]


def one_set(wanted: Sequence[Cell], ranks: int) -> Iterator[Outcome]:
    """Outcomes from one set of processes, up to the first cell that ends it."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [context().Process(target=work, args=(rank, ranks, folder, wanted)) for rank in range(ranks)]
        for process in processes:
            process.start()
        done, since = 0, time.monotonic()
        try:
            while done < len(wanted):
                alive = any(process.is_alive() for process in processes)
                lines = [told(Path(folder, f"{rank}.jsonl")) for rank in range(ranks)]
                for _ in range(done, min(map(len, lines))):
                    yield joined(wanted[done], [line[done] for line in lines])
                    done, since = done + 1, time.monotonic()
                if done == len(wanted):
                    return
                if any(line[-1][1] == "fault" for line in lines if line) and ranks > 1 and alive:
                    alive = time.monotonic() - since < 15  # the other rank may wait for ever
                if not alive or time.monotonic() - since > SILENT:
                    if not any(len(line) > done for line in lines) and done and not alive and ranks > 1:
                        return  # both ended after a fault that has been told
                    yield joined(wanted[done], [line[done] for line in lines if len(line) > done], ended(processes))
                    return
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()


def told(file: Path) -> list[list[Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def joined(cell: Cell, said: Sequence[Sequence[Any]], end: str = "") -> Outcome:
    """One outcome of what the ranks say: the worst, and a fault where they differ or one says nothing."""
    if end:
        return Outcome(cell, "fault", f"{end}; {said[0][2] if said else ''}")
    worst = max(said, key=lambda one: OUTCOMES.index(one[1]))
    if len({one[1] for one in said}) > 1:
        return Outcome(cell, "fault", f"ranks say {[one[1] for one in said]}: {worst[2]}")
    return Outcome(cell, worst[1], worst[2])


def ended(processes: Sequence[Any]) -> str:
    codes = [process.exitcode for process in processes]
    signals = [code for code in codes if code]
    return f"a process ended with {signals[0]}" if signals else f"no progress within {SILENT} s"


# ---- the command


def report(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = Counter(one.outcome for one in outcomes)
    programs = {one.cell.program for one in outcomes}
    said = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)
    return f"{len(programs)} programs, {len(outcomes)} cells in {seconds / 60:.0f} minutes: {said}"


def drawn(only: str, count: int | None, seed: int, every: int = 1) -> list[Cell]:
    names = [name for name in PROGRAMS if re.search(only, name)][::every]
    return [cell for name in names for cell in islice(cells.cells_of(name, seed), count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name matches this regular expression")
    parser.add_argument("--every", type=int, default=1, help="every n-th program only")
    parser.add_argument("--cells", type=int, help="so many cells of each program; by default all")
    parser.add_argument("--seed", type=int, default=0, help="draws other cells")
    parser.add_argument("--show", action="store_true", help="print each cell's outcome, not only faults")
    options = parser.parse_args()
    os.environ["GRAPHZERO_PROGRESS"] = "off"
    began, found = time.monotonic(), []
    for one in outcomes(drawn(options.only, options.cells, options.seed, options.every)):
        found.append(one)
        if one.outcome == "fault" or options.show:
            print(f"{one.outcome.upper()} {one.cell}\n      {one.text}", flush=True)
    print(report(found, time.monotonic() - began))
    return int(any(one.outcome == "fault" for one in found))


if __name__ == "__main__":
    sys.exit(main())
