"""Overhead of a call beside its program: microseconds a call, by part.

    python bench/overhead.py                     every row of the table
    python bench/overhead.py --parameters 500    one size

Two steps of a world of one.  "nothing" returns its input, so its whole call is overhead; its modules hold all the
parameters.  "AdamW" trains one of the parameters, and has an optimizer over all of them, in one group or in many.
"states" has taken gradients of all, so that a program has bound the three states of each; what the executor computes
then is a step of so many one-element layers.

A part's time is the 5th percentile of many calls: what it takes when nothing else runs.  Ranks also agree on the key of
each call, through gloo: ``--gloo 2`` measures that apart.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _run import markdown, on_gloo, options_of, save
from torch import nn

import graphzero as gz
from graphzero.capture import GuardedAttributes
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.state.mutation_watch import StatesWatch
from graphzero.runtime.state.state import State
from graphzero.runtime.world.consensus import Ranks
from graphzero.step.build_inputs import BuildInputReader
from graphzero.step.parameter_groups import ParameterGroups
from graphzero.step.program import StepProgram
from graphzero.step.program_cache import ProgramCache
from graphzero.step.program_key import ProgramKeyBuilder

PARTS: dict[str, list[tuple[type, str]]] = {
    "inputs": [(BuildInputReader, "read_inputs"), (StepProgram, "arguments")],
    "modules": [(State, "tensors"), (GuardedAttributes, "read_values")],
    "optimizer states": [(StatesWatch, "is_unchanged"), (State, "write_back")],
    "groups": [(ParameterGroups, "read_groups")],
    "key": [(ProgramKeyBuilder, "build_key"), (ProgramCache, "find")],
    "agreement": [(Ranks, "agree")],
    "executor": [(Executor, "run_step")],
    "outputs": [(StepProgram, "outputs")],
}
COLUMNS = [part for part in PARTS if part != "agreement"]


class Layers(nn.Module):
    """``parameters`` parameters of one element, two a layer."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(parameters // 2))

    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for layer in self.layers[:layers]:
            x = layer(x)
        return x


class Nothing(gz.Graph):
    def __init__(self, model: Layers) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Train(gz.Graph):
    def __init__(self, model: Layers, groups: int, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        parameters = list(model.parameters())
        size = -(-len(parameters) // groups)
        split = [{"params": parameters[i : i + size]} for i in range(0, len(parameters), size)]
        self.add_optimizer(torch.optim.AdamW(split, lr=1e-3))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x, self.layers).mean()
        loss.backward()
        return loss


def graph_of(step: str, parameters: int, groups: int) -> gz.Graph:
    model = Layers(parameters)
    if step == "nothing":
        return Nothing(model)
    return Train(model, groups, 1 if step == "AdamW" else parameters // 2)


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Add up in ``seconds`` what each part takes."""
    patched = [(kind, name, part) for part, places in PARTS.items() for kind, name in places]
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in patched]
    for kind, name, part in patched:
        setattr(kind, name, _timing(getattr(kind, name), part, seconds))
    try:
        yield
    finally:
        for kind, name, original in before:
            setattr(kind, name, original)


def _timing(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - began

    return run


def measure(graph: gz.Graph, calls: int) -> dict[str, float]:
    """Microseconds by part, and of a whole "call", which is measured without the clocks of the parts."""
    x = torch.zeros(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no gradient reaches most parameters
        for _ in range(10):
            graph(x)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(calls):
        began = time.perf_counter()
        graph(x)
        found["call"].append(time.perf_counter() - began)
    seconds: dict[str, float] = defaultdict(float)
    with timed(seconds):
        for _ in range(calls):
            seconds.clear()
            graph(x)
            for part in PARTS:
                found[part].append(seconds[part])
    return {part: sorted(each)[len(each) // 20] * 1e6 for part, each in found.items()}


def agreement(rank: int, parameters: int, calls: int) -> dict[str, float]:
    """On one of the ranks of a gloo world."""
    return measure(graph_of("nothing", parameters, 1), calls)


def row(step: str, parameters: int, groups: int, found: dict[str, float]) -> list[str]:
    rest = found["call"] - sum(found[part] for part in COLUMNS)
    outside = found["call"] - found["executor"]
    cells = [*(found[part] for part in COLUMNS), rest, found["call"], outside]
    return [step, str(parameters), str(groups), *(f"{cell:.0f}" for cell in cells)]


def cases(sizes: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    for parameters in sizes:
        yield "nothing", parameters, 0
        yield "AdamW", parameters, 1
        yield "AdamW", parameters, parameters // 10
        yield "states", parameters, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="*", default=[50, 200, 500])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--gloo", type=int, default=0, help="measure the agreement of so many ranks")
    parser.add_argument("--save", metavar="FILE", help="also keep the table there, for bench/tables.py")
    options = options_of(parser)
    if options.gloo:
        rows = []
        for parameters in options.parameters:
            found = on_gloo(options.gloo, agreement, parameters, options.calls)
            rows.append([str(parameters), f"{found['agreement']:.0f}", f"{found['call']:.0f}"])
        print(markdown(["parameters", "agreement", "call"], rows))
        return
    rows = [row(*case, measure(graph_of(*case), options.calls)) for case in cases(options.parameters)]
    table = markdown(["step", "parameters", "groups", *COLUMNS, "rest", "call", "without executor"], rows)
    print(table)
    if options.save:
        save(options.save, "overhead", "overhead", table)


if __name__ == "__main__":
    main()
