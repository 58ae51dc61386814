"""What a memory budget buys at stage 3, and what compiling with one takes.

    python bench/budget.py                  # Llama 7B cut to 8 layers, 64 ranks of a fake world
    python bench/budget.py --layers 32

Bytes are the plan's, of one rank; the budget goes from the peak of the program that keeps nothing to that of the one
that keeps everything.  Seconds are those of the processor for the whole of ``compile``, capture included.  The model is
on the meta device.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from _run import markdown, options_of
from models import WithLoss
from parity import TrainGraph

import graphzero as gz

PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the way from keeping nothing to keeping everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=64)
    options = options_of(parser)
    with gz.testing.fake_world(options.ranks):
        found = {"nothing kept": planned(options.layers), "all kept": planned(options.layers, keep_gathered=True)}
        low, high = (plan.memory.peak for plan, _ in found.values())
        for part in PARTS:
            found[f"{part:.0%} of the way"] = planned(options.layers, budget=int(low + part * (high - low)))
    rows = [
        [
            name,
            f"{plan.memory.peak / 1e9:.2f} GB",
            f"{plan.comm_bytes / 1e9:.2f} GB",
            str(len(plan.kept)),
            f"{seconds:.1f}",
        ]
        for name, (plan, seconds) in found.items()
    ]
    print(f"Llama 7B with {options.layers} layers, stage 3, {options.ranks} ranks, one sequence of 2,048 each\n")
    print(markdown(["budget", "peak", "sent", "parameters kept", "seconds to compile"], rows))


def planned(layers: int, budget: int | None = None, keep_gathered: bool = False) -> tuple[Any, float]:
    """The plan, and seconds of the processor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers, use_cache=False, bos_token_id=0, eos_token_id=0)
        model, ids = WithLoss(LlamaForCausalLM(config)), torch.zeros(1, 2048, dtype=torch.long)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, 3, None)
    graph.config.enable_zero(stage=3, keep_gathered=keep_gathered)
    graph.config.set_memory_budget(budget)
    started = time.process_time()
    graph.compile(ids, ids)
    return graph.plan, time.process_time() - started


if __name__ == "__main__":
    main()
