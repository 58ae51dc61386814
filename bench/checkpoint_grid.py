"""The table of checkpoints of ``grid.py``: saved at every stage in every world, and loaded so."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from _run import markdown, on_gloo

import graphzero as gz

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "files")]
from file_toys import SIZES, STEPS, WORLDS, at_stage, losses, train_in  # noqa: E402

LIMIT = 1e-9  # of a difference of losses
Losses = dict[str, list[float]]


def checkpoints(options: argparse.Namespace) -> bool:
    """Print the table; whether a run goes on to the bit from its own checkpoint, and elsewhere within 1e-9."""
    del options
    with tempfile.TemporaryDirectory() as folder:
        for ranks in range(1, 5):
            on_gloo(ranks, save, folder)
        expected = read_losses(folder, "saved")
        for ranks in range(1, 5):
            on_gloo(ranks, load, folder)
        return report(expected, read_losses(folder, "loaded"))


def graphs(rank: int, ranks: int, seed: int) -> Iterator[tuple[str, gz.Graph]]:
    for world, size in SIZES.items():
        if size == ranks:
            graph = train_in(world, seed + rank)
            for stage in range(4):
                at_stage(graph, stage)
                yield f"{world}, stage {stage}", graph


def save(rank: int, folder: str) -> None:
    ranks = torch.distributed.get_world_size()
    results = {}
    for name, graph in graphs(rank, ranks, seed=0):
        losses(graph, 0, STEPS)
        gz.save(graph, Path(folder, "files", name))
        results[name] = losses(graph, STEPS, STEPS)
    write_losses(rank, folder, f"saved-{ranks}", results)


def load(rank: int, folder: str) -> None:
    ranks = torch.distributed.get_world_size()
    results = {}
    for name, graph in graphs(rank, ranks, seed=10):
        for saved in sorted(Path(folder, "files").iterdir()):
            gz.load(graph, saved)
            results[f"{name} from {saved.name}"] = losses(graph, STEPS, STEPS)
    write_losses(rank, folder, f"loaded-{ranks}", results)


def write_losses(rank: int, folder: str, name: str, results: Losses) -> None:
    if rank == 0:
        Path(folder, f"{name}.json").write_text(json.dumps(results))


def read_losses(folder: str, kind: str) -> Losses:
    results: Losses = {}
    for file in Path(folder).glob(f"{kind}-*.json"):
        results |= json.loads(file.read_text())
    return results


def report(expected: Losses, loaded: Losses) -> bool:
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
    return max(worst.values()) <= LIMIT
