"""Traffic: what one rank sends in a step, as planned and as counted while the program runs.

python bench/traffic.py                 # all models on 4 virtual ranks
python bench/traffic.py --ranks 2 3 4   # also other numbers of ranks
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _run import markdown, options_of
from models import CASES, adamw
from parity import BATCH, TrainGraph

import graphzero as gz
from graphzero.plan import Plan
from graphzero.runtime.world.world import Sent

HEAD = [
    "model",
    "ranks",
    "stage",
    "Psi",
    "limit",
    "collectives",
    "counted",
    "bytes planned",
    "bytes sent",
    "of it padding",
    "equal",
]
LIMIT = (2, 2, 2, 3)  # Psi, times (n-1)/n


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--full", action="store_true", help="2, 3 and 4 ranks")
    options = options_of(parser)
    ranks = options.ranks or ([2, 3, 4] if options.full else [4])
    found = {(m, n, s): one(m, n, s) for m in options.models for n in ranks for s in range(4)}
    print(markdown(HEAD, [row(*key, *value) for key, value in found.items()]))
    return 0 if all(equal(*value) for value in found.values()) else 1


def one(model: str, ranks: int, stage: int) -> tuple[Plan, list[Sent]]:
    case = CASES[model]
    fresh = case.model()
    graph = TrainGraph(fresh, *adamw(fresh.parameters(), 10), stage, gz.placement("cpu", range(ranks), virtual=True))
    batch = case.batch(0, BATCH, torch.float32)
    graph(*batch)
    return graph.plan, gz.testing.trace_step(graph, *batch)


def equal(plan: Plan, sent: list[Sent]) -> bool:
    """Whether each call of the plan was made, in order, with these bytes."""
    planned = [(c.kind, c.axis, c.bytes) for c in plan.collectives]
    return planned == [(c.kind, c.axis, c.nbytes) for c in sent]


def row(model: str, ranks: int, stage: int, plan: Plan, sent: list[Sent]) -> list[Any]:
    limit = LIMIT[stage] * (ranks - 1) / ranks
    return [
        model, ranks, stage, f"{plan.comm_volume:.3f}", f"{limit:.3f}", len(plan.collectives), len(sent),
        f"{plan.comm_bytes:,.0f}", f"{sum(one.nbytes for one in sent):,.0f}", f"{plan.padding_bytes:,.0f}",
        "yes" if equal(plan, sent) else "NO",
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
