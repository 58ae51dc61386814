"""Seconds of the processor and resident memory of compiling a Graph.

    python bench/compile_time.py gpt2           # GPT-2 124M on 64 virtual ranks at stage 3
    python bench/compile_time.py gpt2 --full    # and 24 and 48 layers, and 1024 ranks against 8
    python bench/compile_time.py llama          # Llama 7B with tensor parallelism, 8 x 8 ranks of a fake world, stage 3

The figures stand in bench/results/scale.md.  Models are on the meta device: no weight is ever allocated.  Each
measurement has a fresh process, of which one core is used; in a forked one, copied pages would count.  A part's seconds
are in the log of a compilation.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from _run import in_fresh_process, markdown, options_of
from layouts import MEGATRON, parallelise
from models import WithLoss, gpt2, published_llama
from parity import TrainGraph
from torch import Tensor, nn

import graphzero as gz
from graphzero.step import compile_step

STAGE = 3
TP = 8  # ranks over which its weights are split
Found = dict[tuple[int, int], dict[str, Any]]  # by (layers, ranks)


def show(found: Found) -> None:
    """The table: a column for each (layers, ranks)."""
    head = ["", *(f"{n} layers, {r} ranks" for n, r in found)]
    rows = [["capture, s", *(f"{one['capture']:.2f}" for one in found.values())]]
    rows.append(["all, s", *(f"{one['total']:.2f}" for one in found.values())])
    rows.append(["after capture, s", *(f"{one['total'] - one['capture']:.2f}" for one in found.values())])
    rows.append(["operations", *(f"{one['nodes']:,}" for one in found.values())])
    rows.append(["parameters", *(f"{one['parameters'] / 1e6:.1f} M" for one in found.values())])
    rows.append(["peak RSS", *(f"{one['rss'] / 1e6:,.0f} MB" for one in found.values())])
    rows.append(["of it imports and model", *(f"{one['rss_before'] / 1e6:,.0f} MB" for one in found.values())])
    print(markdown(head, rows))


def measure_gpt2(layers: int, ranks: int) -> dict[str, Any]:
    """On virtual ranks."""
    with torch.device("meta"):
        model = gpt2(layers, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(ranks, 1024, dtype=torch.long)
    return measure(model, gz.placement("cpu", range(ranks), virtual=True), ids, ids)


def measure_llama(layers: int, ranks: int) -> dict[str, Any]:
    """As rank 0 of a job of (ranks / TP) x TP processes; the batch is one sequence for each data-parallel rank."""
    model, ids = WithLoss(published_llama(layers)), torch.zeros(1, 2048, dtype=torch.long, device="meta")
    with gz.testing.fake_world(ranks):
        place = gz.placement("cpu", torch.arange(ranks).reshape(-1, TP).tolist(), names=("dp", "tp"))
        parallelise(model, MEGATRON, place)
        return measure(model, place, ids, ids)


def measure(model: nn.Module, place: Any, *batch: Tensor) -> dict[str, Any]:
    """Compile once; seconds, and bytes of resident memory."""
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, STAGE, place)
    compiling: Any = compile_step
    capture, seconds = compiling.capture, list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        captured = capture(*args, **options)
        seconds.append(time.process_time() - began)
        return captured

    before = peak_rss()
    started = time.process_time()
    with patch.object(compiling, "capture", timed):
        graph.compile(*batch)
    return {
        "capture": sum(seconds),
        "total": time.process_time() - started,
        "nodes": len(list(graph.program.nodes)),
        "parameters": graph.plan.parameters,
        "rss": peak_rss(),
        "rss_before": before,
    }


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB


# ---- the command

MEASURES: dict[str, Callable[[int, int], dict[str, Any]]] = {"gpt2": measure_gpt2, "llama": measure_llama}
CELLS = {"gpt2": [(12, 64), (24, 64), (48, 64), (12, 8), (12, 1024)], "llama": [(32, TP * TP), (8, TP * TP)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=MEASURES)
    parser.add_argument("--full", action="store_true", help="other numbers of layers and ranks too")
    parser.add_argument("--layers", type=int, help="only so many, on 64 ranks")
    parser.add_argument("--measure", type=int, nargs=2, metavar=("LAYERS", "RANKS"), help="one measurement, as JSON")
    options = options_of(parser)
    if options.measure:
        print(json.dumps(MEASURES[options.subject](*options.measure)))
        return
    cells = CELLS[options.subject] if options.full else CELLS[options.subject][:1]
    found: Found = {}
    for cell in [(options.layers, 64)] if options.layers else cells:
        found[cell] = in_fresh_process("compile_time.py", options.subject, "--measure", *cell)
    print(f"{options.subject}, stage {STAGE}, one core\n")
    show(found)


if __name__ == "__main__":
    main()
