"""Llama 3 with 8 billion parameters and sequences of 131,072 tokens on 64 ranks: memory and traffic of a rank, planned.

    python bench/long_sequences.py                             # both placements, ways and all stages of ZeRO
    python bench/long_sequences.py --cp 8 --zero 3             # some of them
    python bench/long_sequences.py --layers 2 --length 8192    # of a smaller model

bfloat16 under float32 masters, AdamW, clipping, each layer computed again in backward; one sequence on each data rank,
cut over the axis cp; ZeRO over both axes.  The model is on the meta device and the ranks are virtual: nothing is
computed, no weight is allocated, one core is used.  GB of a rank: what it holds at the peak, and what it sends in a
step for attention, of parameters and of gradients.  Seconds are of planning, in the first row of a placement with those
of tracing; the memory in the last line is that of the process.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
import warnings

import torch
from _run import markdown, options_of

import graphzero as gz
from graphzero.passes.place.attention_ways import WAYS
from graphzero.plan import Plan
from graphzero.sbp import S

RANKS, LAYERS, LENGTH = 64, 32, 131072
HELD = {  # at the peak, by the categories of a plan
    "states": ("parameters", "optimizer_states", "buffers"), "16-bit parameters": ("compute_parameters",),
    "gradients": ("gradients", "accumulators"), "activations": ("activations", "temporaries", "arena"),
    "communication": ("communication",),
}  # fmt: skip
HEAD = ["ranks", "attention", "ZeRO", *HELD, "peak", "attention sends", "parameters send", "gradients send", "seconds"]


class Train(gz.Graph):
    """layers: of the model.  length: of a sequence."""

    def __init__(self, where: gz.Placement, layers: int, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(where, name="Llama-8B")
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, max_position_embeddings=length,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1.5e-4), clip_grad_norm=1.0)
        self.config.enable_amp()
        for name in ("ids", "labels"):
            self.config.set_input(name, sbp=(S(0), S(1)))

    def build(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss


def cells_of(plan: Plan) -> list[str]:
    """GB that a rank holds and sends."""
    held = [sum(plan.memory.at_peak.get(key, 0) for key in keys) for keys in HELD.values()]
    sent = {what: sum(c.bytes for c in plan.collectives if c.what_for == what) for what in ("parameters", "gradients")}
    attention = sum(c.bytes for c in plan.collectives if c.what_for == "other" and c.kind != "all_reduce")
    return [f"{number / 1e9:.2f}" for number in (*held, plan.memory.peak, attention, *sent.values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--way", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--length", type=int, default=LENGTH)
    options = options_of(parser)
    warnings.simplefilter("ignore")
    print(*markdown(HEAD, [HEAD]).splitlines()[:2], sep="\n")
    for cp in options.cp:
        ranks = torch.arange(RANKS).reshape(RANKS // cp, cp).tolist()
        where = gz.placement("cpu", ranks, names=("dp", "cp"), virtual=True)
        with torch.device("meta"):
            graph = Train(where, options.layers, options.length)  # captured once for its rows
        ids = torch.empty(RANKS // cp, options.length, dtype=torch.long, device="meta")
        for way, zero in itertools.product(options.way, options.zero):
            graph.config.enable_zero(stage=zero, axis=("dp", "cp"))
            graph.config.set_split_attention(way)
            began = time.process_time()
            with graph.prepared_call("planning", (ids, ids), {}, verifies=False) as prepared:
                plan = prepared.program.plan
            seconds = time.process_time() - began
            row = [f"dp {RANKS // cp} x cp {cp}", way, zero, *cells_of(plan), f"{seconds:.0f}"]
            print(markdown(HEAD, [row]).splitlines()[-1], flush=True)
    print(f"\nat most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory")


if __name__ == "__main__":
    main()
