"""What compiling costs: capture, every pass and the plan, in seconds, and peak memory, each in a fresh process.

    python bench/scale.py                   # GPT-2 124M on 64 virtual ranks at stage 3
    python bench/scale.py --full            # and 24 and 48 layers, and 1024 ranks against 8

The model is on the meta device: no weight is ever allocated.  Seconds are those of the fastest of the repeats; totals
and ratios are seconds of the processor, of which one core is used.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from _run import in_fresh_process, markdown, options_of

DOUBLING = 2.3  # the most that twice the layers may cost after capture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more layers, more ranks")
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers, at 64 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks, at 12 layers")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--repeat", type=int, help="processes per measurement: by default 1, with --full 3")
    parser.add_argument("--measure", type=int, nargs=2, metavar=("LAYERS", "RANKS"), help="one measurement, as JSON")
    options = options_of(parser)
    if options.measure:
        print(json.dumps(measure(*options.measure, options.stage)))
        return
    repeat = options.repeat or (3 if options.full else 1)
    layers = options.layers or ([12, 24, 48] if options.full else [12])
    found = {(n, 64): fastest(n, 64, options.stage, repeat) for n in layers}
    ranks = options.ranks or ([8, 1024] if options.full else [])
    found |= {(12, n): fastest(12, n, options.stage, repeat) for n in ranks}
    parts = list(next(iter(found.values()))["seconds"])
    head = ["seconds", *(f"{n} layers, {r} ranks" for n, r in found)]
    rows = [[part, *(f"{one['seconds'][part]:.2f}" for one in found.values())] for part in parts]
    rows.append(["all", *(f"{one['total']:.2f}" for one in found.values())])
    rows.append(["after capture", *(f"{after_capture(one):.2f}" for one in found.values())])
    rows.append(["operations", *(f"{one['nodes']:,}" for one in found.values())])
    rows.append(["parameters", *(f"{one['parameters'] / 1e6:.1f} M" for one in found.values())])
    rows.append(["peak RSS", *(f"{one['rss'] / 1e6:,.0f} MB" for one in found.values())])
    rows.append(["of it imports and model", *(f"{one['rss_before'] / 1e6:,.0f} MB" for one in found.values())])
    print(f"GPT-2, stage {options.stage}, meta device, one core\n")
    print(markdown(head, rows))
    print()
    for fewer, more in zip(layers, layers[1:], strict=False):
        ratio = after_capture(found[more, 64]) / after_capture(found[fewer, 64])
        limit = DOUBLING ** torch.log2(torch.tensor(more / fewer)).item()
        print(f"{fewer} to {more} layers: after capture x {ratio:.2f} (at most {limit:.2f})")
    for fewer, more in zip(ranks, ranks[1:], strict=False):
        ratio = after_capture(found[12, more]) / after_capture(found[12, fewer])
        print(f"{fewer} to {more} ranks: after capture x {ratio:.2f}")


def fastest(layers: int, ranks: int, stage: int, repeat: int) -> dict[str, Any]:
    runs = (in_fresh_process("scale.py", "--stage", stage, "--measure", layers, ranks) for _ in range(repeat))
    return min(runs, key=lambda found: found["total"])


def after_capture(found: dict[str, Any]) -> float:
    return found["total"] - found["seconds"]["capture"]


def measure(layers: int, ranks: int, stage: int) -> dict[str, Any]:
    """Compile once; seconds of each part, and bytes of resident memory."""
    from compare import TrainGraph
    from models import gpt2

    import graphzero as gz
    from graphzero import compiled

    with torch.device("meta"):
        model = gpt2(layers, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(ranks, 1024, dtype=torch.long)
    graph = TrainGraph(
        model, torch.optim.AdamW(model.parameters()), None, stage, gz.placement("cpu", range(ranks), virtual=True)
    )
    seconds: dict[str, float] = {}
    compiled.capture = timed(compiled.capture, "capture", seconds)
    compiled.plan_of = timed(compiled.plan_of, "plan", seconds)
    before = peak_rss()
    started = time.process_time()
    graph.compile(ids, ids)
    total = time.process_time() - started
    parts = {"capture": seconds["capture"], **{record.name: record.seconds for record in graph.history}}
    parts |= {"verify, all passes": sum(record.seconds_verify for record in graph.history), "plan": seconds["plan"]}
    parts["the rest"] = max(total - sum(parts.values()), 0.0)
    return {
        "seconds": parts,
        "total": total,
        "nodes": len(list(graph.program.nodes)),
        "parameters": graph.plan.parameters,
        "rss": peak_rss(),
        "rss_before": before,
    }


def timed(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        result = function(*args, **kwargs)
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - started
        return result

    return call


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB


if __name__ == "__main__":
    main()
