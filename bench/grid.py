"""Parity: a Graph on n ranks against plain PyTorch in one process on the whole batch, 10 steps, no dropout.

    python bench/grid.py                  # a part of the grid
    python bench/grid.py --full           # models x optimizers x stages x ranks (virtual, gloo) x dtypes

Per row: the largest relative difference of a loss and the largest difference of a parameter or buffer over the stages,
in float64 against limits of 1e-6 and 2e-6, in float32 of 1e-6 and, under SGD, 5e-6.  The last column says whether
stages 0 to 3 gave the same bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from _run import markdown, on_gloo, options_of
from models import CASES, OPTIMIZERS
from parity import STEPS, Cell, Difference, Trained, difference, plain, same_bits, trained

STAGES = (0, 1, 2, 3)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
HEAD = (
    "model",
    "optimizer",
    "dtype",
    "ranks",
    *(f"stage {s}: loss, parameters" for s in STAGES),
    "stages equal",
    "limits",
)

SUMMARY = (
    "model",
    "dtype",
    "cells",
    "loss, relative",
    "parameters, sgd",
    "parameters, adamw",
    "stages equal to the bit",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--models", nargs="+", choices=CASES, help="only these models")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, help="only these optimizers")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="only these dtypes")
    parser.add_argument("--virtual", nargs="*", type=int, help="numbers of virtual ranks")
    parser.add_argument("--gloo", nargs="*", type=int, help="numbers of gloo processes")
    options = options_of(parser)
    started = time.perf_counter()
    lines = grid(options)
    print(markdown(HEAD, [row(line) for line in lines]))
    print(f"\nThe largest of each model, over all of its rows:\n\n{markdown(SUMMARY, summary(lines))}")
    failed = [line for line in lines if not all(cell.limits and found.within(cell) for cell, found, _ in line)]
    print(
        f"\n{sum(map(len, lines))} cells in {time.perf_counter() - started:.0f} s; {len(failed)} rows beyond the limits"
    )
    return 1 if failed or not all(equal(line) for line in lines if line[0][0].kind == "virtual") else 0


Line = list[tuple[Cell, Difference, Trained]]  # one per stage


def grid(options: argparse.Namespace) -> list[Line]:
    full = options.full
    models = options.models or (list(CASES) if full else ["mlp", "convnet", "gpt2"])
    optimizers = options.optimizers or (list(OPTIMIZERS) if full else ["adamw"])
    dtypes = options.dtypes or (list(DTYPES) if full else ["float64"])
    virtual = options.virtual if options.virtual is not None else ([1, 2, 3, 4] if full else [3])
    gloo = options.gloo if options.gloo is not None else ([1, 2, 4] if full else [2])
    cells = [(m, o, DTYPES[d]) for m, o, d in product(models, optimizers, dtypes)]
    lines = []
    for ranks in virtual:
        lines += [list(run_line(one, "virtual", ranks)) for one in cells]
    for ranks in gloo:
        lines += on_gloo(ranks, run_lines, cells, ranks)
    return sorted(lines, key=lambda line: cells.index((line[0][0].model, line[0][0].optimizer, line[0][0].dtype)))


def run_lines(rank: int, cells: Sequence[tuple[str, str, torch.dtype]], ranks: int) -> list[Line]:
    """On gloo: every rank runs everything; rank 0's differences count."""
    del rank
    return [list(run_line(one, "gloo", ranks)) for one in cells]


def run_line(one: tuple[str, str, torch.dtype], kind: str, ranks: int) -> Iterable[tuple[Cell, Difference, Trained]]:
    model, optimizer, dtype = one
    wanted = plain(Cell(model, optimizer, 0, ranks, kind, dtype), STEPS)
    for stage in STAGES:
        cell = Cell(model, optimizer, stage, ranks, kind, dtype)
        found = trained(cell, STEPS)
        if kind == "virtual" or torch.distributed.get_rank() == 0:
            print(".", end="", file=sys.stderr, flush=True)
        yield cell, difference(found, wanted), found


def equal(line: Line) -> bool:
    return all(same_bits(found, line[0][2]) for _, _, found in line[1:])


def row(line: Line) -> list[str]:
    cell = line[0][0]
    figures = [f"{found.loss:.0e}, {found.tensor:.0e}" for _, found, _ in line]
    within = all(found.within(cell) for cell, found, _ in line)
    dtype = str(cell.dtype).removeprefix("torch.")
    same = "to the bit" if equal(line) else "no"
    return [
        cell.model,
        cell.optimizer,
        dtype,
        f"{cell.ranks} {cell.kind}",
        *figures,
        same,
        "within" if within else "BEYOND",
    ]


def summary(lines: Sequence[Line]) -> list[list[str]]:
    """Per model and dtype: the largest differences over optimizers, ranks and stages."""
    groups: dict[tuple[str, torch.dtype], list[Line]] = {}
    for line in lines:
        groups.setdefault((line[0][0].model, line[0][0].dtype), []).append(line)
    rows = []
    for (model, dtype), members in groups.items():
        found = [(cell, one) for line in members for cell, one, _ in line]
        loss = max(one.loss for _, one in found)
        tensors = [
            max((one.tensor for cell, one in found if cell.optimizer == name), default=None)
            for name in ("sgd", "adamw")
        ]
        texts = ["-" if x is None else f"{x:.0e}" for x in (loss, *tensors)]
        same = f"{sum(map(equal, members))} of {len(members)} rows"
        rows.append([model, str(dtype).removeprefix("torch."), str(len(found)), *texts, same])
    return rows


if __name__ == "__main__":
    sys.exit(main())
