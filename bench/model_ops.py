"""Rules on the ops of real training steps: ``python bench/model_ops.py``.

Each model's whole step (forward, backward, AdamW, in float64) is captured and run on real values.  Every distinct call
of an op in it is then run as every signature of its rule says, on 2 and on 3 ranks: the pieces must join to the call's
own result.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from _run import markdown, options_of
from layouts import BATCH, CASES, LAYOUTS, MODELS, graph_of
from ops import AtenCall, Tally, try_call
from torch import Tensor, fx

from graphzero.inspect.initial_state import start_of
from graphzero.inspect.stage_values import walk
from graphzero.ir import calls
from graphzero.runtime import kernels


def calls_of(model: str) -> Iterator[AtenCall]:
    """Every call of an op in the model's first step, with its values."""
    graph = graph_of(model, LAYOUTS["dp4"], 0)
    with graph.prepared_call(f"the ops of {model}", CASES[model].batch(0, BATCH, torch.float64), {}) as prepared:
        captured = prepared.program.history[0].before
        device = torch.device("cpu")
        with torch.no_grad():
            made = walk(captured, start_of(prepared, False).values, device)
    for node in captured.nodes:
        if calls.is_op(node):
            args = fx.node.map_arg(node.args, lambda arg: moderate(made[arg]))
            kwargs = fx.node.map_arg(kernels.keywords(node, device), lambda arg: moderate(made[arg]))
            yield AtenCall(node.target, tuple(args), dict(kwargs))


def moderate(x: Any) -> Any:
    """``x`` without values that would drown the law's partial addends, which are of order ten, or blow them up."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    size = x.abs()
    x = torch.where((size < 1e-3) & (size > 0), x.sign(), x)
    return torch.where((size > 1e4) & size.isfinite(), 100 * x.sign(), x)


def tally(model: str) -> Tally:
    """What the law says of a model's calls, each shape of an op once."""
    found, seen = Tally(), set()
    for call in calls_of(model):
        found.samples += 1
        if call.key() not in seen:
            seen.add(call.key())
            try_call(call, found, largest=1 << 22)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = options_of(parser)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    tallies = {model: tally(model) for model in options.models}
    head = ["model", "calls", "distinct", "may be split", "one element", "whole", "no rule", "not tried", "wrong"]
    print(markdown(head, [
        [model, t.samples, t.calls, t.split, t.tiny, t.whole.total(), t.bare.total(), t.untried, len(t.wrong)]
        for model, t in tallies.items()
    ]))  # fmt: skip
    for model, t in tallies.items():
        print(f"\n{model}: whole, though there is a rule: {', '.join(sorted(t.whole)) or 'nothing'}; "
              f"whole, for there is none: {', '.join(sorted(t.bare)) or 'nothing'}")  # fmt: skip
        print("\n".join(t.wrong))
    print(f"\n{time.perf_counter() - started:.0f} s")
    if any(t.wrong for t in tallies.values()):
        raise SystemExit("some results are wrong")


if __name__ == "__main__":
    main()
