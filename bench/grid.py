"""Tables of training over models, layouts, stages and ranks, against plain PyTorch.

    python bench/grid.py parity             # a Graph against plain PyTorch on the whole batch, 10 steps, no dropout
    python bench/grid.py layouts            # the same for data x tensor parallel and other layouts of four ranks

Each takes a part of its grid; ``--full`` takes all of it, and ``--models`` and others choose.  The figures stand in
bench/results/ under these names.

parity: over the stages, the largest relative difference of a loss and the largest difference of a parameter or buffer,
in float64 against limits of 1e-6 and 2e-6, in float32 of 1e-6 and, under SGD, 5e-6; and whether stages 0 to 3 gave the
same bits.  layouts: forward, backward and AdamW in float64 on four virtual ranks: data parallel, data x tensor
parallel, tensor parallel, and two data axes, ZeRO over both or over the inner one; the limit of a loss is 1e-6, and
the last columns are what one rank sends in a step on each axis.

Exit status 1 where something is beyond its limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from _run import markdown, on_gloo, options_of
from layouts import LAYOUTS, LIMIT, MODELS, STAGES, graph_of, reference, train
from models import CASES, OPTIMIZERS
from parity import STEPS, Cell, Difference, Trained, TrainGraph, difference, plain, same_bits, trained

# ---- parity

DTYPES = {"float64": torch.float64, "float32": torch.float32}
SIMPLE = [name for name in CASES if not name.endswith(" heads")]  # ``layouts`` adds models with more heads
Row = list[tuple[Cell, Difference, Trained]]  # one per stage


def parity(options: argparse.Namespace) -> bool:
    started, full = time.perf_counter(), options.full
    models = options.models or (SIMPLE if full else ["mlp", "convnet", "gpt2"])
    optimizers = options.optimizers or (list(OPTIMIZERS) if full else ["adamw"])
    dtypes = options.dtypes or (list(DTYPES) if full else ["float64"])
    virtual = options.virtual if options.virtual is not None else ([1, 2, 3, 4] if full else [3])
    gloo = options.gloo if options.gloo is not None else ([1, 2, 4] if full else [2])
    trainings = [(m, o, DTYPES[d]) for m, o, d in product(models, optimizers, dtypes)]
    rows = [list(parity_row(one, "virtual", ranks)) for ranks in virtual for one in trainings]
    for ranks in gloo:
        rows += on_gloo(ranks, parity_rows, trainings, ranks)
    rows.sort(key=lambda row: trainings.index((row[0][0].model, row[0][0].optimizer, row[0][0].dtype)))
    head = ["model", "optimizer", "dtype", "ranks", *(f"stage {s}: loss, parameters" for s in STAGES)]
    print(markdown([*head, "stages equal", "limits"], [parity_cells(row) for row in rows]))
    head = ["model", "dtype", "cells", "loss, relative", "parameters, sgd", "parameters, adamw"]
    table = markdown([*head, "stages equal to the bit"], parity_summary(rows))
    print(f"\nThe largest of each model, over all of its rows:\n\n{table}")
    beyond = [row for row in rows if not all(cell.limits and found.within(cell) for cell, found, _ in row)]
    seconds = f"{time.perf_counter() - started:.0f} s"
    print(f"\n{sum(map(len, rows))} cells in {seconds}; {len(beyond)} rows beyond the limits")
    return not beyond and all(equal_stages(row) for row in rows if row[0][0].kind == "virtual")


def parity_rows(rank: int, trainings: Sequence[tuple[str, str, torch.dtype]], ranks: int) -> list[Row]:
    """On gloo: every rank runs everything; rank 0's differences count."""
    del rank
    return [list(parity_row(one, "gloo", ranks)) for one in trainings]


def parity_row(
    training: tuple[str, str, torch.dtype], kind: str, ranks: int
) -> Iterable[tuple[Cell, Difference, Trained]]:
    model, optimizer, dtype = training
    expected = plain(Cell(model, optimizer, 0, ranks, kind, dtype), STEPS)
    for stage in STAGES:
        cell = Cell(model, optimizer, stage, ranks, kind, dtype)
        result = trained(cell, STEPS)
        if kind == "virtual" or torch.distributed.get_rank() == 0:
            print(".", end="", file=sys.stderr, flush=True)
        yield cell, difference(result, expected), result


def equal_stages(row: Row) -> bool:
    return all(same_bits(result, row[0][2]) for _, _, result in row[1:])


def parity_cells(row: Row) -> list[str]:
    cell = row[0][0]
    head = [cell.model, cell.optimizer, str(cell.dtype).removeprefix("torch."), f"{cell.ranks} {cell.kind}"]
    figures = [f"{found.loss:.0e}, {found.tensor:.0e}" for _, found, _ in row]
    within = all(found.within(cell) for cell, found, _ in row)
    return [*head, *figures, "to the bit" if equal_stages(row) else "no", "within" if within else "BEYOND"]


def parity_summary(rows: Sequence[Row]) -> list[list[str]]:
    """Per model and dtype: the largest differences over optimizers, ranks and stages."""
    groups: dict[tuple[str, torch.dtype], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0][0].model, row[0][0].dtype), []).append(row)
    lines = []
    for (model, dtype), members in groups.items():
        differences = [(cell, one) for row in members for cell, one, _ in row]
        largest: list[float | None] = [max(one.loss for _, one in differences)]
        for name in OPTIMIZERS:
            largest.append(max((one.tensor for cell, one in differences if cell.optimizer == name), default=None))
        texts = ["-" if x is None else f"{x:.0e}" for x in largest]
        equal = f"{sum(map(equal_stages, members))} of {len(members)} rows"
        lines.append([model, str(dtype).removeprefix("torch."), str(len(differences)), *texts, equal])
    return lines


# ---- layouts


def layouts(options: argparse.Namespace) -> bool:
    models = options.models or (MODELS if options.full else ["mlp", "gpt2, 4 heads", "llama"])
    started, beyond, rows = time.perf_counter(), 0, []
    for model, name in product(models, options.layouts):
        cells, worst = layout_cells(model, name)
        rows.append(cells)
        beyond += not worst <= LIMIT
        print(f"{model}, {name}: {worst:.0e}", file=sys.stderr, flush=True)
    stages = [f"stage {stage}" for stage in STAGES]
    print(markdown(["model", "layout", *stages, "parameters", "seconds", "sent at stage 0", "at 3"], rows))
    print(f"\n{len(rows)} rows in {time.perf_counter() - started:.0f} s; {beyond} beyond {LIMIT}")
    return not beyond


def layout_cells(model: str, name: str) -> tuple[list[str], float]:
    """A line of the table, and the largest difference of a loss in it."""
    layout, expected, started = LAYOUTS[name], reference(model), time.perf_counter()
    losses, tensors, sent = dict.fromkeys(STAGES, ""), [], dict.fromkeys(STAGES, "")
    worst = 0.0
    for stage in layout.stages:
        graph = graph_of(model, layout, stage)
        apart = difference(train(graph, model), expected)
        losses[stage], worst = f"{apart.loss:.0e}", max(worst, apart.loss)
        tensors.append(apart.tensor)
        sent[stage] = sent_by_axis(graph)
    seconds = f"{time.perf_counter() - started:.0f}"
    return [model, name, *losses.values(), f"{max(tensors):.0e}", seconds, sent[0], sent[3]], worst


def sent_by_axis(graph: TrainGraph) -> str:
    """kB that one rank sends in a step, by axis."""
    nbytes: Counter[str] = Counter()
    for c in graph.plan.collectives:
        nbytes[c.axis] += c.bytes  # type: ignore[assignment]
    return ", ".join(f"{axis} {nbytes[axis] / 1e3:.0f} kB" for axis in graph.placement.names)


TABLES = {"parity": parity, "layouts": layouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--models", nargs="+", choices=CASES, help="only these models")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, help="parity: only these optimizers")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="parity: only these dtypes")
    parser.add_argument("--virtual", nargs="*", type=int, help="parity: numbers of virtual ranks")
    parser.add_argument("--gloo", nargs="*", type=int, help="parity: numbers of gloo processes")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts: only these")
    options = options_of(parser)
    return int(not TABLES[options.table](options))


if __name__ == "__main__":
    sys.exit(main())
