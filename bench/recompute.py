"""Time and memory of activations that are recomputed in backward, by ``config.set_activation_memory``.

    python bench/recompute.py                       # GPT-2 and Llama, small
    python bench/recompute.py --torch               # beside it torch.compile with its own activation memory budget

Each model trains on one rank, step by step in turn with itself under other settings; a time is the median over rounds
of a step's seconds by those of the plain one in the same round.  Bytes are the plan's and, in brackets where they
differ, those that the dispatcher sees.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _run import markdown, options_of, take_turns
from models import gpt2, llama, tokens
from parity import TrainGraph
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphzero.testing import measure_step

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 6, 192, 6, 512, 128, 4
MODELS = {"gpt2": (gpt2, "body.transformer.h"), "llama": (llama, "body.model.layers")}
PARTS = (0.75, 0.5, 0.35)
HEAD = ["model", "setting", "activations, MB", "peak, MB", "equal", "values", "time", "fastest, ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--torch", action="store_true")
    options = options_of(parser)
    size = f"{LAYERS} layers of width {WIDTH}, {BATCH} sequences of {CONTEXT}"
    print(f"{size}; activations: the most bytes of them at a time; time: 1 is without\n")
    rows = [row for name in options.models for row in table(name, options.rounds)]
    print(markdown(HEAD, rows))
    if options.torch:
        print("\ntorch.compile, default Inductor; left: bytes that forward saves for backward\n")
        found = [row for name in options.models for row in beside(name, options.rounds)]
        print(markdown(["model", "budget", "left, MB", "to plain", "time"], found))


def model_of(name: str, blocks: bool = False) -> nn.Module:
    """blocks: torch.utils.checkpoint around each."""
    torch.manual_seed(0)
    make, path = MODELS[name]
    model = make(LAYERS, width=WIDTH, heads=HEADS, vocabulary=VOCABULARY, context=CONTEXT)
    for block in model.get_submodule(path).children() if blocks else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def graph_of(name: str, memory: Any = None, blocks: bool = False) -> TrainGraph:
    model = model_of(name, blocks)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()))
    graph.config.set_activation_memory(memory)
    return graph


def table(name: str, rounds: int) -> list[list[str]]:
    batch = tokens(0, BATCH, torch.float32, VOCABULARY, CONTEXT)
    plain = graph_of(name)
    plain(*batch)
    most = plain.plan.memory.activations
    graphs = {"plain": plain, "torch.utils.checkpoint, by block": graph_of(name, blocks=True)}
    graphs['"checkpoint"'] = graph_of(name, "checkpoint")
    graphs |= {f"{part:.0%} of the bytes": graph_of(name, int(part * most)) for part in PARTS}
    losses = {key: [float(graph(*batch)) for _ in range(2)] for key, graph in graphs.items() if graph is not plain}
    assert len({tuple(x) for x in losses.values()}) == 1, f"the bits differ: {losses}"
    times = take_turns({key: partial(graph, *batch) for key, graph in graphs.items()}, rounds)
    return [row(name, key, graph, batch, times) for key, graph in graphs.items()]


def row(name: str, key: str, graph: TrainGraph, batch: Any, times: dict[str, list[float]]) -> list[str]:
    memory, peak = graph.plan.memory, measure_step(graph, *batch).peak
    ratio = statistics.median(a / b for a, b in zip(times[key], times["plain"], strict=True))
    equal = "yes" if peak == memory.peak else f"NO ({peak:,})"
    cells = [name, key, f"{memory.activations / 1e6:.2f}", f"{memory.peak / 1e6:.2f}", equal]
    return [*cells, str(len(graph.plan.recomputed)), f"{ratio:.2f}", f"{min(times[key]) * 1e3:.0f}"]


# ---- torch's own


def beside(name: str, rounds: int) -> list[list[str]]:
    """torch.compile of forward and backward, with a part of the activations that its partitioner may save."""
    import torch._functorch.config as config

    batch = tokens(0, BATCH, torch.float32, VOCABULARY, CONTEXT)
    steps, left = dict[str, Callable[[], Any]](), dict[str, int]()
    for part in (1.0, *PARTS):
        torch._dynamo.reset()
        model = model_of(name)
        optimizer = torch.optim.AdamW(model.parameters())
        with config.patch(activation_memory_budget=part):
            compiled = torch.compile(model)
            left[f"{part:.2f}"] = saved_by(model, partial(compiled, *batch))
        steps[f"{part:.2f}"] = partial(_step, compiled, optimizer, batch)
        with config.patch(activation_memory_budget=part):
            steps[f"{part:.2f}"]()
    times = take_turns(steps, rounds)
    plain = times["1.00"]
    return [
        [
            name, key, f"{left[key] / 1e6:.2f}", f"{left[key] / left['1.00']:.2f}",
            f"{statistics.median(a / b for a, b in zip(times[key], plain, strict=True)):.2f}",
        ]
        for key in steps
    ]  # fmt: skip


def _step(compiled: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    compiled(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_by(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of distinct storages that a forward saves for backward, parameters aside."""
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in held:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward()
    loss.backward()
    model.zero_grad()
    return sum(found.values())


if __name__ == "__main__":
    main()
