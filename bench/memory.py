"""Memory: bytes per rank that a plan says, beside those that the dispatcher sees, by category at the peak.

    python bench/memory.py                  # MLP and GPT-2 on 4 ranks
    python bench/memory.py --full           # all models, on 1, 2, 3 and 4 ranks

One rank's program runs in a fake world of n.  A second table holds the model state against the formulas of the
ZeRO paper (arXiv 1910.02054), in bytes per parameter for Adam in float32: 16; 8 + 8/n; 4 + 12/n; 16/n.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _run import markdown, options_of
from models import CASES, adamw
from parity import BATCH, TrainGraph

import graphzero as gz
from graphzero.plan import CATEGORIES, Plan
from graphzero.testing import fake_world
from graphzero.testing.meter import Measured

INSIDE = ("arena", "gradients", "activations", "temporaries")  # the dispatcher sees the arena as one storage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all models and 1, 2, 3, 4 ranks")
    parser.add_argument("--models", nargs="+", choices=CASES)
    parser.add_argument("--ranks", nargs="+", type=int)
    options = options_of(parser)
    models = options.models or (list(CASES) if options.full else ["mlp", "gpt2"])
    runs = [
        (m, n, s) for m in models for n in options.ranks or ([1, 2, 3, 4] if options.full else [4]) for s in range(4)
    ]
    found = {key: one(*key) for key in runs}
    print("bytes at the peak of one rank: planned (measured)\n")
    print(markdown(["model", "ranks", "stage", *CATEGORIES, "peak", "equal"], [row(*key, *found[key]) for key in runs]))
    print("\nmodel state, bytes per parameter\n")
    print(
        markdown(
            ["model", "ranks", "stage", "planned", "formula", "ratio"], [state(*key, found[key][0]) for key in runs]
        )
    )
    return 0 if all(equal(*one) for one in found.values()) else 1


def one(model: str, ranks: int, stage: int) -> tuple[Plan, Measured]:
    """Rank 0's plan and measurement, AdamW in float32."""
    case = CASES[model]
    with fake_world(ranks):
        fresh = case.model()
        graph = TrainGraph(fresh, *adamw(fresh.parameters(), 10), stage)
        batch = tuple(x.chunk(ranks)[0] for x in case.batch(0, BATCH, torch.float32))
        graph(*batch)
        return graph.plan, gz.testing.measure_step(graph, *batch)


def equal(plan: Plan, measured: Measured) -> bool:
    planned, found = plan.memory.at_peak, measured.at_peak
    same = all(planned[c] == found.get(c, 0) for c in CATEGORIES if c not in INSIDE)
    same = same and sum(planned[c] for c in INSIDE) == sum(found.get(c, 0) for c in INSIDE)
    return same and plan.memory.peak == measured.peak


def row(model: str, ranks: int, stage: int, plan: Plan, measured: Measured) -> list[Any]:
    pairs = [(plan.memory.at_peak[c], measured.at_peak.get(c, 0)) for c in CATEGORIES]
    pairs.append((plan.memory.peak, measured.peak))
    cells = [f"{a:,}" if a == b else f"{a:,} ({b:,})" for a, b in pairs]
    return [model, ranks, stage, *cells, "yes" if equal(plan, measured) else "NO"]


def state(model: str, ranks: int, stage: int, plan: Plan) -> list[Any]:
    planned, formula = plan.memory.model_state / plan.parameters, FORMULAS[stage](ranks)
    return [model, ranks, stage, f"{planned:.3f}", f"{formula:.3f}", f"{planned / formula:.3f}"]


FORMULAS = (lambda n: 16.0, lambda n: 8 + 8 / n, lambda n: 4 + 12 / n, lambda n: 16 / n)


if __name__ == "__main__":
    raise SystemExit(main())
