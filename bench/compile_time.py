"""Seconds of the processor and resident memory of compiling a Graph.

    python bench/compile_time.py gpt2           # GPT-2 124M on 64 virtual ranks at stage 3
    python bench/compile_time.py gpt2 --full    # and 24 and 48 layers, and 1024 ranks against 8
    python bench/compile_time.py llama          # Llama 7B with tensor parallelism, 8 x 8 ranks of a fake world, stage 3

The figures stand in bench/results/scale.md.  Models are on the meta device: no weight is ever allocated.  Each
measurement has a fresh process, of which one core is used; in a forked one, copied pages would count.  A part's seconds
are in the log of a compilation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from _run import command_parser, format_table, parse_options, read_peak_memory, run_in_fresh_process
from layouts import MEGATRON, parallelise
from models import gpt2, published_llama
from parity import TrainGraph
from torch import Tensor, nn

import graphzero as gz
from graphzero.step import compile_step

STAGE = 3
TP = 8  # ranks over which its weights are split
Figures = dict[str, float]
ROWS: dict[str, Callable[[Figures], str]] = {
    "capture, s": lambda one: f"{one['capture']:.2f}",
    "all, s": lambda one: f"{one['total']:.2f}",
    "after capture, s": lambda one: f"{one['total'] - one['capture']:.2f}",
    "operations": lambda one: f"{one['nodes']:,}",
    "parameters": lambda one: f"{one['parameters'] / 1e6:.1f} M",
    "peak RSS": lambda one: f"{one['rss'] / 1e6:,.0f} MB",
    "of it imports and model": lambda one: f"{one['rss_before'] / 1e6:,.0f} MB",
}


def measure_gpt2(layers: int, ranks: int) -> Figures:
    """On virtual ranks."""
    with torch.device("meta"):
        model = gpt2(layers, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(ranks, 1024, dtype=torch.long)
    return measure(model, gz.placement("cpu", range(ranks), virtual=True), ids, ids)


def measure_llama(layers: int, ranks: int) -> Figures:
    """As rank 0 of a job of (ranks / TP) x TP processes; the batch is one sequence for each data-parallel rank."""
    model, ids = published_llama(layers), torch.zeros(1, 2048, dtype=torch.long, device="meta")
    with gz.testing.fake_world(ranks):
        place = gz.placement("cpu", torch.arange(ranks).reshape(-1, TP).tolist(), names=("dp", "tp"))
        parallelise(model, MEGATRON, place)
        return measure(model, place, ids, ids)


def measure(model: nn.Module, place: Any, *batch: Tensor) -> Figures:
    """Compile once; seconds, and bytes of resident memory."""
    torch.set_num_threads(1)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, STAGE, place)
    compiling: Any = compile_step
    capture, seconds = compiling.capture, list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        captured = capture(*args, **options)
        seconds.append(time.process_time() - began)
        return captured

    before = read_peak_memory()
    started = time.process_time()
    with patch.object(compiling, "capture", timed):
        graph.compile(*batch)
    return {
        "capture": sum(seconds),
        "total": time.process_time() - started,
        "nodes": len(list(graph.program.nodes)),
        "parameters": graph.plan.parameters,
        "rss": read_peak_memory(),
        "rss_before": before,
    }


# ---- the command


MEASURES: dict[str, Callable[[int, int], Figures]] = {"gpt2": measure_gpt2, "llama": measure_llama}
CELLS = {"gpt2": [(12, 64), (24, 64), (48, 64), (12, 8), (12, 1024)], "llama": [(32, TP * TP), (8, TP * TP)]}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("subject", choices=MEASURES)
    parser.add_argument("--full", action="store_true", help="other numbers of layers and ranks too")
    parser.add_argument("--layers", type=int, help="only so many, on 64 ranks")
    options = parse_options(parser)
    cells = [(options.layers, 64)] if options.layers else CELLS[options.subject][: None if options.full else 1]
    figures = [run_in_fresh_process(MEASURES[options.subject], *cell) for cell in cells]
    print(f"{options.subject}, stage {STAGE}, one core\n")
    head = ["", *(f"{layers} layers, {ranks} ranks" for layers, ranks in cells)]
    print(format_table(head, [[name, *map(text, figures)] for name, text in ROWS.items()]))


if __name__ == "__main__":
    main()
