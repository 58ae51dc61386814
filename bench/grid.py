"""Tables of training over models, layouts, stages and ranks, against plain PyTorch on the whole batch.

    python bench/grid.py parity             # data parallel, 10 steps
    python bench/grid.py layouts            # data x tensor parallel and other layouts of four virtual ranks, 5 steps

Each takes a part of its grid; ``--full`` takes all of it.  The figures stand in bench/results/ under these names.

A row has for each stage the largest relative difference of a loss and the largest difference of a parameter or buffer,
held against ``parity.LIMITS``; whether all stages gave the same bits; and what one rank sends in a step on each axis.

Exit status 1 where something is beyond its limit, or stages on data parallel virtual ranks differ.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import parity
import torch
import torch.distributed as dist
from _run import command_parser, format_table, parse_options, run_on_gloo
from layouts import LAYOUTS, MODELS, STAGES, STEPS, build_graph, train_eagerly, train_graph
from models import CASES, OPTIMIZERS
from parity import Difference, TrainGraph, compare_trainings, have_same_bits

SIMPLE = [name for name in CASES if not name.endswith(" heads")]  # ``layouts`` adds models with more heads


class Training(NamedTuple):
    """Of which model, and how; gloo ranks are in one data axis."""

    model: str
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    layout: str = "dp4"
    kind: str = "virtual"
    steps: int = parity.STEPS


def data_parallel_trainings(models: list[str], full: bool) -> list[Training]:
    models = models or (SIMPLE if full else ["mlp", "convnet", "gpt2"])
    optimizers, dtypes = (OPTIMIZERS, (torch.float64, torch.float32)) if full else (["adamw"], [torch.float64])
    virtual, gloo = ((1, 2, 3, 4), (1, 2, 4)) if full else ((3,), (2,))
    ranks = [*((f"dp{n}", "virtual") for n in virtual), *((f"dp{n}", "gloo") for n in gloo)]
    return [Training(*names, *where) for *names, where in product(models, optimizers, dtypes, ranks)]


def four_rank_trainings(models: list[str], full: bool) -> list[Training]:
    models = models or (MODELS if full else ["mlp", "gpt2, 4 heads", "llama"])
    layouts = [name for name, layout in LAYOUTS.items() if layout.size == 4]
    return [Training(model, layout=layout, steps=STEPS) for model, layout in product(models, layouts)]


@dataclass(frozen=True)
class Row:
    """Differences by stage, whether all stages gave the same bits, and what is sent by stage."""

    training: Training
    differences: dict[int, Difference]
    is_equal: bool
    sent: dict[int, str]

    @property
    def is_within(self) -> bool:
        return all(one.within(self.training.dtype, self.training.optimizer) for one in self.differences.values())

    @property
    def names(self) -> tuple[str, str]:
        return self.training.model, str(self.training.dtype).removeprefix("torch.")

    def cells(self) -> list[str]:
        by_stage = {stage: f"{one.loss:.0e}, {one.tensor:.0e}" for stage, one in self.differences.items()}
        figures = [by_stage.get(stage, "") for stage in STAGES]
        verdict = ["to the bit" if self.is_equal else "no", "within" if self.is_within else "BEYOND"]
        head = [*self.names, self.training.optimizer, f"{self.training.layout} {self.training.kind}"]
        return [*head, *figures, *verdict, self.sent[0], self.sent.get(3, "")]


def measure_row(training: Training) -> Row:
    model, optimizer, dtype, layout_name, kind, steps = training
    layout, is_virtual = LAYOUTS[layout_name], kind == "virtual"
    parts, part = (1, 0) if is_virtual else (layout.size, dist.get_rank())
    results, sent = {}, {}
    for stage in layout.stages:
        graph = build_graph(model, layout, stage, is_virtual, optimizer, dtype, steps)
        results[stage] = train_graph(graph, model, parts, part, dtype=dtype, steps=steps)
        sent[stage] = describe_traffic(graph)
    expected = train_eagerly(model, optimizer, dtype, steps)
    differences = {stage: compare_trainings(result, expected) for stage, result in results.items()}
    return Row(training, differences, all(have_same_bits(result, results[0]) for result in results.values()), sent)


def measure_rows(rank: int, trainings: Sequence[Training]) -> list[Row]:
    """On gloo: every rank runs everything; rank 0's rows count."""
    del rank
    return list(map(measure_row, trainings))


def describe_traffic(graph: TrainGraph) -> str:
    """kB that one rank sends in a step, by axis."""
    nbytes: Counter[str] = Counter()
    for collective in graph.plan.collectives:
        nbytes[collective.axis] += collective.bytes
    return ", ".join(f"{axis} {nbytes[axis] / 1e3:.0f} kB" for axis in graph.placement.names)


def format_summary(rows: Sequence[Row]) -> str:
    """Per model and dtype: the largest differences over optimizers, ranks and stages."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.names].append(row)
    lines = []
    for names, members in groups.items():
        differences = [(row.training.optimizer, one) for row in members for one in row.differences.values()]
        largest = [f"{max(one.loss for _, one in differences):.0e}"]
        for name in OPTIMIZERS:
            tensors = [one.tensor for optimizer, one in differences if optimizer == name]
            largest.append(f"{max(tensors):.0e}" if tensors else "-")
        equal = f"{sum(row.is_equal for row in members)} of {len(members)} rows"
        lines.append([*names, len(differences), *largest, equal])
    head = ["model", "dtype", "cells", "loss, relative", "parameters, sgd", "parameters, adamw"]
    return format_table([*head, "stages equal to the bit"], lines)


TABLES = {"parity": data_parallel_trainings, "layouts": four_rank_trainings}


def main() -> int:
    parser = command_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--models", nargs="+", choices=CASES, help="only these models")
    options = parse_options(parser)
    started, trainings = time.perf_counter(), TABLES[options.table](options.models, options.full)
    rows = []
    for training in trainings:
        if training.kind == "virtual":
            rows.append(measure_row(training))
            print(".", end="", file=sys.stderr, flush=True)
    gloo = [training for training in trainings if training.kind == "gloo"]
    for layout in dict.fromkeys(training.layout for training in gloo):
        alike = [training for training in gloo if training.layout == layout]
        rows += run_on_gloo(LAYOUTS[layout].size, measure_rows, alike)
    rows.sort(key=lambda row: trainings.index(row.training))
    head = ["model", "dtype", "optimizer", "ranks", *(f"stage {s}: loss, parameters" for s in STAGES)]
    print(format_table([*head, "stages equal", "limits", "sent at stage 0", "at 3"], [row.cells() for row in rows]))
    print(f"\nThe largest of each model, over all of its rows:\n\n{format_summary(rows)}")
    seconds, beyond = f"{time.perf_counter() - started:.0f} s", sum(not row.is_within for row in rows)
    print(f"\n{sum(len(row.differences) for row in rows)} cells in {seconds}; {beyond} rows beyond the limits")
    virtual = [row for row in rows if row.training.kind == "virtual" and LAYOUTS[row.training.layout].names == ("dp",)]
    return int(beyond or not all(row.is_equal for row in virtual))


if __name__ == "__main__":
    sys.exit(main())
