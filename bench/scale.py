"""What compiling costs: capture, every pass and the plan, in seconds, and peak memory, each in a fresh process.

    python bench/scale.py                   # GPT-2 124M on 64 virtual ranks at stage 3
    python bench/scale.py --full            # and 24 and 48 layers, and 1024 ranks against 8
    python bench/scale.py --llama           # Llama 7B with tensor parallelism, 8 x 8 ranks of a fake world, at stage 3

The model is on the meta device: no weight is ever allocated.  Seconds are those of the processor, of which one core is
used, in the fastest of the repeats.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import torch
from _run import in_fresh_process, markdown, options_of
from compile_clock import Compiling
from torch import nn

DOUBLING = 2.3  # the most that twice the layers may cost after capture
LIMIT = 60  # seconds of the processor that Llama 7B may take
TP = 8  # ranks over which its weights are split
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # split along their outputs
VOCABULARY = ("embed_tokens", "lm_head")  # split along the words
ROWS = ("o_proj", "down_proj")  # split along their inputs, so that what they make is complete after one all_reduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more layers, more ranks")
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers, at 64 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks, at 12 layers")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--repeat", type=int, help="processes per measurement: by default 1, with --full 3")
    parser.add_argument("--llama", action="store_true", help="Llama 7B, 32 layers unless --layers says otherwise")
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "LAYERS", "RANKS"), help="one measurement, as JSON")
    options = options_of(parser)
    if options.measure:
        model, layers, ranks = options.measure
        print(json.dumps(MODELS[model](int(layers), int(ranks), options.stage)))
        return
    repeat = options.repeat or (3 if options.full else 1)
    if options.llama:
        show_llama(options.layers or [32], options.stage, repeat)
    else:
        show_gpt2(options, repeat)


def show_llama(layers: list[int], stage: int, repeat: int) -> None:
    found = {(n, TP * TP): fastest("llama", n, TP * TP, stage, repeat) for n in layers}
    print(f"Llama 7B, stage {stage}, {TP} x {TP} ranks (dp, tp) of a fake world, meta device, one core\n")
    show(found)
    print()
    for (n, _), one in found.items():
        print(f"{n} layers: {one['total']:.1f} s of the processor (at most {LIMIT} for 32)")


def show_gpt2(options: argparse.Namespace, repeat: int) -> None:
    layers = options.layers or ([12, 24, 48] if options.full else [12])
    found = {(n, 64): fastest("gpt2", n, 64, options.stage, repeat) for n in layers}
    ranks = options.ranks or ([8, 1024] if options.full else [])
    found |= {(12, n): fastest("gpt2", 12, n, options.stage, repeat) for n in ranks}
    print(f"GPT-2, stage {options.stage}, meta device, one core\n")
    show(found)
    print()
    for fewer, more in zip(layers, layers[1:], strict=False):
        ratio = after_capture(found[more, 64]) / after_capture(found[fewer, 64])
        limit = DOUBLING ** torch.log2(torch.tensor(more / fewer)).item()
        print(f"{fewer} to {more} layers: after capture x {ratio:.2f} (at most {limit:.2f})")
    for fewer, more in zip(ranks, ranks[1:], strict=False):
        ratio = after_capture(found[12, more]) / after_capture(found[12, fewer])
        print(f"{fewer} to {more} ranks: after capture x {ratio:.2f}")


def show(found: dict[tuple[int, int], dict[str, Any]]) -> None:
    """The table: a column for each (layers, ranks)."""
    parts = list(next(iter(found.values()))["seconds"])
    head = ["seconds", *(f"{n} layers, {r} ranks" for n, r in found)]
    rows = [[part, *(f"{one['seconds'][part]:.2f}" for one in found.values())] for part in parts]
    rows.append(["all", *(f"{one['total']:.2f}" for one in found.values())])
    rows.append(["after capture", *(f"{after_capture(one):.2f}" for one in found.values())])
    rows.append(["operations", *(f"{one['nodes']:,}" for one in found.values())])
    rows.append(["parameters", *(f"{one['parameters'] / 1e6:.1f} M" for one in found.values())])
    rows.append(["peak RSS", *(f"{one['rss'] / 1e6:,.0f} MB" for one in found.values())])
    rows.append(["of it imports and model", *(f"{one['rss_before'] / 1e6:,.0f} MB" for one in found.values())])
    print(markdown(head, rows))


def fastest(model: str, layers: int, ranks: int, stage: int, repeat: int) -> dict[str, Any]:
    runs = (in_fresh_process("scale.py", "--stage", stage, "--measure", model, layers, ranks) for _ in range(repeat))
    return min(runs, key=lambda found: found["total"])


def after_capture(found: dict[str, Any]) -> float:
    return found["total"] - found["seconds"]["capture"]


def measure_gpt2(layers: int, ranks: int, stage: int) -> dict[str, Any]:
    """On virtual ranks."""
    from models import gpt2

    import graphzero as gz

    with torch.device("meta"):
        model = gpt2(layers, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(ranks, 1024, dtype=torch.long)
    return measure(model, gz.placement("cpu", range(ranks), virtual=True), stage, ids)


def measure_llama(layers: int, ranks: int, stage: int) -> dict[str, Any]:
    """As rank 0 of a job of (ranks / TP) x TP processes; the batch is one sequence for each data-parallel rank."""
    from models import WithLoss
    from transformers import LlamaConfig, LlamaForCausalLM

    import graphzero as gz

    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers, use_cache=False, bos_token_id=0, eos_token_id=0)
        model = WithLoss(LlamaForCausalLM(config))
        ids = torch.zeros(1, 2048, dtype=torch.long)
    with gz.testing.fake_world(ranks):
        place = gz.placement("cpu", torch.arange(ranks).reshape(-1, TP).tolist(), names=("dp", "tp"))
        split_weights(model, place)
        return measure(model, place, stage, ids)


def split_weights(model: nn.Module, place: Any) -> None:
    """Megatron's split of the weights over the axis tp; norms are whole."""
    import graphzero as gz
    from graphzero.sbp import B, S

    for name, module in model.named_modules():
        if name.endswith(COLUMNS + VOCABULARY + ROWS):
            gz.to_global(module, place, (B, S(1) if name.endswith(ROWS) else S(0)))


MODELS = {"gpt2": measure_gpt2, "llama": measure_llama}


def measure(model: nn.Module, place: Any, stage: int, ids: torch.Tensor) -> dict[str, Any]:
    """Compile once; seconds of each part, and bytes of resident memory."""
    from parity import TrainGraph

    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, stage, place)
    compiling = Compiling(time.process_time)
    before = peak_rss()
    started = time.process_time()
    graph.compile(ids, ids)
    total = time.process_time() - started
    return {
        "seconds": compiling.parts(graph, total),
        "total": total,
        "nodes": len(list(graph.program.nodes)),
        "parameters": graph.plan.parameters,
        "rss": peak_rss(),
        "rss_before": before,
    }


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB


if __name__ == "__main__":
    main()
