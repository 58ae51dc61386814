"""The cost of compiling: capture, every pass and the plan, in seconds of the processor, and peak memory.

    python bench/compile_time.py gpt2           # GPT-2 124M on 64 virtual ranks at stage 3
    python bench/compile_time.py gpt2 --full    # and 24 and 48 layers, and 1024 ranks against 8
    python bench/compile_time.py llama          # Llama 7B with tensor parallelism, 8 x 8 ranks of a fake world, stage 3
    python bench/compile_time.py deep           # 120 blocks of very many small ops, stage 2

The figures stand in bench/results/scale.md and bench/results/first_step.md.

gpt2 and llama are on the meta device: no weight is ever allocated.  Each measurement has a fresh process, of which one
core is used; shown is the fastest of the repeats.  deep is narrow, as networks of reparametrised convolutions are: each
block has three branches of convolution and batch norm, squeeze and excitation, and two pointwise layers.  Shapes are
tiny, so that what is measured is the number of nodes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from types import SimpleNamespace
from typing import Any

import torch
from _run import in_fresh_process, markdown, options_of
from layouts import MEGATRON, parallelise
from models import WithLoss, gpt2, published_llama
from parity import TrainGraph
from torch import Tensor, nn

import graphzero as gz

DOUBLING = 2.3  # the most that twice the layers may cost after capture
LIMIT = 60  # seconds of the processor that Llama 7B may take
TP = 8  # ranks over which its weights are split
Found = dict[tuple[int, int], dict[str, Any]]  # by (layers, ranks)


def cells_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """The layers and ranks that are measured."""
    if options.subject == "deep":
        return [(n, 4) for n in options.layers or [120]]
    if options.subject == "llama":
        return [(n, TP * TP) for n in options.layers or [32]]
    layers, ranks = ([12, 24, 48], [8, 1024]) if options.full else ([12], [])
    return [*((n, 64) for n in options.layers or layers), *((12, n) for n in options.ranks or ranks)]


def show_growth(found: Found) -> None:
    """What more layers at 64 ranks, and more ranks at 12 layers, cost."""
    for fixed, what in ((1, "layers"), (0, "ranks")):
        same = sorted(cell for cell in found if cell[fixed] == (64, 12)[1 - fixed])
        for fewer, more in zip(same, same[1:], strict=False):
            ratio = after_capture(found[more]) / after_capture(found[fewer])
            a, b = fewer[1 - fixed], more[1 - fixed]
            most = f" (at most {DOUBLING ** log2(b / a):.2f})" if what == "layers" else ""
            print(f"{a} to {b} {what}: after capture x {ratio:.2f}{most}")


def show(found: Found) -> None:
    """The table: a column for each (layers, ranks)."""
    parts = list(next(iter(found.values()))["seconds"])
    head = ["seconds", *(f"{n} layers, {r} ranks" for n, r in found)]
    rows = [[part, *(f"{one['seconds'][part]:.2f}" for one in found.values())] for part in parts]
    rows.append(["all", *(f"{one['total']:.2f}" for one in found.values())])
    rows.append(["after capture", *(f"{after_capture(one):.2f}" for one in found.values())])
    rows.append(["operations captured", *(f"{one['captured']:,}" for one in found.values())])
    rows.append(["operations", *(f"{one['nodes']:,}" for one in found.values())])
    rows.append(["parameters", *(f"{one['parameters'] / 1e6:.1f} M" for one in found.values())])
    rows.append(["peak RSS", *(f"{one['rss'] / 1e6:,.0f} MB" for one in found.values())])
    rows.append(["of it imports and model", *(f"{one['rss_before'] / 1e6:,.0f} MB" for one in found.values())])
    print(markdown(head, rows))


def fastest(model: str, layers: int, ranks: int, stage: int, repeat: int) -> dict[str, Any]:
    words = ("compile_time.py", model, "--stage", stage, "--measure", layers, ranks)
    runs = (in_fresh_process(*words) for _ in range(repeat))
    return min(runs, key=lambda figures: figures["total"])


def after_capture(found: dict[str, Any]) -> float:
    return found["total"] - found["seconds"]["capture"]


def measure_gpt2(layers: int, ranks: int, stage: int) -> dict[str, Any]:
    """On virtual ranks."""
    with torch.device("meta"):
        model = gpt2(layers, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(ranks, 1024, dtype=torch.long)
    return measure(model, gz.placement("cpu", range(ranks), virtual=True), stage, ids, ids)


def measure_llama(layers: int, ranks: int, stage: int) -> dict[str, Any]:
    """As rank 0 of a job of (ranks / TP) x TP processes; the batch is one sequence for each data-parallel rank."""
    model, ids = WithLoss(published_llama("7B", layers)), torch.zeros(1, 2048, dtype=torch.long, device="meta")
    with gz.testing.fake_world(ranks):
        place = gz.placement("cpu", torch.arange(ranks).reshape(-1, TP).tolist(), names=("dp", "tp"))
        parallelise(model, MEGATRON, place)
        return measure(model, place, stage, ids, ids)


def measure_deep(blocks: int, ranks: int, stage: int) -> dict[str, Any]:
    """Behind a model of one block, which loads and caches what is needed once."""
    warnings.simplefilter("ignore")
    place = gz.placement("cpu", range(ranks), virtual=True)
    batch = torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    measure(deep_model(1), place, stage, *batch)
    return measure(deep_model(blocks), place, stage, *batch)


MODELS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "gpt2": measure_gpt2,
    "llama": measure_llama,
    "deep": measure_deep,
}


def measure(model: nn.Module, place: Any, stage: int, *batch: Tensor) -> dict[str, Any]:
    """Compile once; seconds of each part, and bytes of resident memory."""
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, stage, place)
    compiling = CompileClock(time.process_time)
    before = peak_rss()
    started = time.process_time()
    graph.compile(*batch)
    total = time.process_time() - started
    return {
        "seconds": compiling.parts(graph, total),
        "total": total,
        "captured": len(list(graph.history[0].before.nodes)),
        "nodes": len(list(graph.program.nodes)),
        "parameters": graph.plan.parameters,
        "rss": peak_rss(),
        "rss_before": before,
    }


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB


# ---- clocks that stand still while Python modules are loaded

Clock = Callable[[], float]


def user_seconds() -> float:
    """User seconds of this process and of the processes that it ran to their end, such as compilers."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@dataclass
class Clocks:
    """Seconds, without those in which modules were loaded: by the wall, and of the processor in user code."""

    loading_wall: float = 0.0
    loading_user: float = 0.0

    def wall(self) -> float:
        return time.perf_counter() - self.loading_wall

    def user(self) -> float:
        return user_seconds() - self.loading_user


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Python finds and runs a module that is not there yet in one function, whoever imports it."""
    found, depth = Clocks(), 0
    machinery: Any = importlib._bootstrap  # type: ignore[attr-defined]
    original = machinery._find_and_load

    def load(*args: Any) -> Any:
        nonlocal depth
        depth += 1
        wall, user = time.perf_counter(), user_seconds()
        try:
            return original(*args)
        finally:
            depth -= 1
            if not depth:
                found.loading_wall += time.perf_counter() - wall
                found.loading_user += user_seconds() - user

    machinery._find_and_load = load
    try:
        yield found
    finally:
        machinery._find_and_load = original


def _modules(*names: str) -> list[Any]:
    return [importlib.import_module(f"graphzero.{name}") for name in names]


def timed_functions() -> list[tuple[str, Any, str]]:
    """Functions that a compile calls beside passes: the row of each, and where it is looked up."""
    base, variants, compiling = _modules("passes.base", "plan.variants", "step.compile_step")
    packed, ir = _modules("ir.packed_graph", "ir.graph")
    return [
        ("capture", compiling, "capture"),
        ("plan", variants, "plan_of"),
        ("laws of streams and launches", base, "check_streams"),
        ("laws of streams and launches", base, "check_program_launches"),
        ("copies for history", packed.PackedHistory, "add_copy"),
        ("settle", ir.StepGraph, "settle"),
        ("graphs made anew", packed.PackedGraph, "graph"),
        ("graphs made anew", ir.StepGraph, "clone"),
        ("collection of garbage", compiling.gc, "collect"),
    ]


class CompileClock:
    """The seconds that ``clock`` counts while Graphs compile, by part; made before they do."""

    def __init__(self, clock: Clock) -> None:
        (base,) = _modules("passes.base")
        self.clock, self.seconds, self._inside = clock, dict[str, float](), False
        for row, owner, name in timed_functions():
            setattr(owner, name, self._timed(getattr(owner, name), row))
        base.time = SimpleNamespace(perf_counter=clock)  # for the seconds of each pass

    def parts(self, graph: gz.Graph, total: float) -> dict[str, float]:
        """Of the one Graph that was compiled, in ``total`` seconds."""
        parts = {"capture": self.seconds["capture"], **{record.name: record.seconds for record in graph.history}}
        parts["verify, all passes"] = sum(record.seconds_verify for record in graph.history)
        parts |= {row: seconds for row, seconds in self.seconds.items() if row != "capture"}
        parts["the rest"] = max(total - sum(parts.values()), 0.0)
        return parts

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        self.seconds[name] = 0.0

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # its seconds are those of the function that calls it
                return function(*args, **kwargs)
            began, self._inside = self.clock(), True
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += self.clock() - began
                self._inside = False

        return call


# ---- very many small ops


class Block(nn.Module):
    """x + pointwise(excite(conv3(x) + conv1(x) + norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width))
        self.point = nn.Conv2d(width, width, 1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.squeeze, self.excite = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
        self.wide = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.GELU())
        self.narrow = nn.Sequential(nn.Conv2d(2 * width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x) + self.point(x) + x)
        y = y * self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return y + self.narrow(self.wide(y))


def deep_model(blocks: int, width: int = 8) -> nn.Module:
    """The blocks and a classifier."""
    stem, head = nn.Conv2d(3, width, 3, padding=1), (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return WithLoss(nn.Sequential(stem, *(Block(width) for _ in range(blocks)), *head))


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=MODELS)
    parser.add_argument("--full", action="store_true", help="gpt2: more layers, more ranks; three processes each")
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers, at 64 ranks; deep: of blocks")
    parser.add_argument("--ranks", type=int, nargs="+", help="gpt2: numbers of ranks, at 12 layers")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3))
    parser.add_argument("--repeat", type=int, help="processes per measurement: by default 1, with --full 3")
    parser.add_argument("--measure", type=int, nargs=2, metavar=("LAYERS", "RANKS"), help="one measurement, as JSON")
    options = options_of(parser)
    stage = options.stage if options.stage is not None else 2 if options.subject == "deep" else 3
    if options.measure:
        layers, ranks = options.measure
        print(json.dumps(MODELS[options.subject](layers, ranks, stage)))
        return
    repeat = options.repeat or 1 + 2 * options.full
    found = {cell: fastest(options.subject, *cell, stage, repeat) for cell in cells_of(options)}
    print(f"{options.subject}, stage {stage}, one core\n")
    show(found)
    print()
    if options.subject == "gpt2":
        show_growth(found)
    if options.subject == "llama":
        for (n, _), one in found.items():
            print(f"{n} layers: {one['total']:.1f} s of the processor (at most {LIMIT} for 32)")


if __name__ == "__main__":
    main()
