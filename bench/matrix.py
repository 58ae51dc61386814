"""Does a run go on from any checkpoint?  ``python bench/matrix.py``.

A model with a tie, running statistics, dropout and a frozen part is trained at every stage in every world (1 to 4 gloo
processes, and 2 x 2 with a tensor axis) and saved; new processes load each of these at every stage in every world, and
go on.  The table has the largest difference of a loss from what the saved run had, by world.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from _run import markdown, on_gloo, options_of

import graphzero as gz

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "files"))
from file_toys import SIZES, STEPS, WORLDS, at_stage, losses, train_in  # noqa: E402

Losses = dict[str, list[float]]


def main() -> None:
    options_of(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    with tempfile.TemporaryDirectory() as made:
        for ranks in range(1, 5):
            on_gloo(ranks, save, made)
        expected = told(made, "saved")
        for ranks in range(1, 5):
            on_gloo(ranks, load, made)
        report(expected, told(made, "loaded"))


def graphs(rank: int, ranks: int, seed: int) -> Iterator[tuple[str, gz.Graph]]:
    for world, size in SIZES.items():
        if size == ranks:
            graph = train_in(world, seed + rank)
            for stage in range(4):
                at_stage(graph, stage)
                yield f"{world}, stage {stage}", graph


def save(rank: int, made: str) -> None:
    ranks = torch.distributed.get_world_size()
    found = {}
    for name, graph in graphs(rank, ranks, seed=0):
        losses(graph, 0, STEPS)
        gz.save(graph, Path(made, "files", name))
        found[name] = losses(graph, STEPS, STEPS)
    tell(rank, made, f"saved-{ranks}", found)


def load(rank: int, made: str) -> None:
    ranks = torch.distributed.get_world_size()
    found = {}
    for name, graph in graphs(rank, ranks, seed=10):
        for saved in sorted(Path(made, "files").iterdir()):
            gz.load(graph, saved)
            found[f"{name} from {saved.name}"] = losses(graph, STEPS, STEPS)
    tell(rank, made, f"loaded-{ranks}", found)


def tell(rank: int, made: str, name: str, found: Losses) -> None:
    if rank == 0:
        Path(made, f"{name}.json").write_text(json.dumps(found))


def told(made: str, kind: str) -> Losses:
    found: Losses = {}
    for file in Path(made).glob(f"{kind}-*.json"):
        found |= json.loads(file.read_text())
    return found


def report(expected: Losses, loaded: Losses) -> None:
    worst = dict.fromkeys(itertools.product(WORLDS, WORLDS), 0.0)
    for target, source in itertools.product(expected, expected):
        pair = target.split(",")[0], source.split(",")[0]
        differences = map(
            abs, (a - b for a, b in zip(loaded[f"{target} from {source}"], expected[source], strict=True))
        )
        worst[pair] = max(worst[pair], *differences)
        if target == source and loaded[f"{target} from {source}"] != expected[source]:
            raise AssertionError(f"{target} does not go on from its own checkpoint to the bit")
    rows = [[target, *(f"{worst[target, source]:.1e}" for source in WORLDS)] for target in WORLDS]
    print(f"{len(expected)} x {len(expected)} pairs; from itself each goes on to the bit\n")
    print(markdown(["loaded in, saved in", *WORLDS], rows))


if __name__ == "__main__":
    main()
