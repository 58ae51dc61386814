"""Llama 3 with 70 billion parameters on 512 ranks, pp 8 x dp 8 x tp 8: memory of stages by ZeRO stage and schedule.

    python bench/pipelines.py                                   # all rows of the table of docs/pipelines.md: 40 minutes
    python bench/pipelines.py --zero 1 --schedule 1f1b zb1p     # some of them
    python bench/pipelines.py --zero 3 --schedule 1f1b --budget 72GB   # beside them, what a budget makes of it
    python bench/pipelines.py --verify --zero 3 --schedule 1f1b # compiled as a call would, with its seconds

bfloat16 under float32 masters, AdamW, clipping, 32 micro-batches of one sequence of 8,192 tokens on each data rank. The
model is on the meta device and the ranks are virtual: nothing is computed, no weight is allocated, one core is used.
"bubble" is that of the schedule by planned seconds of an H100; "sent" is what one rank of the fullest member sends in a
step, and along pp beside it.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
import warnings

import torch
from _run import markdown, options_of
from torch import nn

import graphzero as gz
from graphzero.cli.plan import size_of
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_seconds import pipeline_seconds
from graphzero.sbp import B, S

PP, DP, TP = 8, 8, 8
LAYERS, CONTEXT, MICRO_BATCHES = 80, 8192, 32
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")
STAGES = {"1f1b": PP, "zb1p": PP, "interleaved": 2 * PP, "zbv": 2 * PP}
RECOMPUTED = ("nothing", "blocks")
HEAD = ["recomputed", "schedule", "ZeRO", "peak", "least full", "in flight", "bubble", "sent", "along pp", "seconds"]


class Train(gz.Graph):
    """layers: of the model.  stages: into which they are cut evenly.  blocks: whether each layer is computed again."""

    def __init__(self, where: gz.Placement, layers: int, stages: int, blocks: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(where, name="Llama-70B")
        config = LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        if blocks:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        split_weights(self.model, where)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1.5e-4), clip_grad_norm=1.0)
        self.config.enable_amp()
        self.config.set_gradient_accumulation_steps(MICRO_BATCHES)
        self.config.set_stage("model.model.embed_tokens", 0)
        for i in range(layers):
            self.config.set_stage(f"model.model.layers.{i}", i * stages // layers)
        self.config.set_stage("model.model.norm", stages - 1)
        self.config.set_stage("model.lm_head", stages - 1)

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss


def split_weights(model: nn.Module, where: gz.Placement) -> None:
    """Over the axis tp, as Megatron does; norms stay whole."""
    for name, module in model.named_modules():
        if name.endswith(COLUMNS + ROWS):
            gz.to_global(module, where, (B, S(1) if name.endswith(ROWS) else S(0)))


def show_row(graph: Train, options: argparse.Namespace, recomputed: str, schedule: str, zero: int) -> None:
    """Compile and print one line; a plan that fits 80 GB has its peak marked."""
    graph.config.enable_zero(stage=zero)
    graph.config.set_pipeline(schedule)
    graph.config.set_memory_budget(size_of(options.budget) if options.budget else None)
    ids = torch.zeros(DP * MICRO_BATCHES, CONTEXT, dtype=torch.long, device="meta")
    began = time.process_time()
    with graph.prepared_call("planning", (ids,), {}, verifies=options.verify) as prepared:
        program = prepared.program
    seconds, plan = time.process_time() - began, program.plan
    pipeline, stages = program.part.pipeline, plan.pipeline
    assert pipeline is not None and stages is not None
    peaks = [member.memory.peak for member in stages.members]
    fullest = stages.members[peaks.index(max(peaks))].stages
    edges = sum(edge.bytes * edge.messages for edge in stages.edges if edge.source in fullest)
    bubble = pipeline_seconds(pipeline, Device.named("h100")).bubble
    cells = [
        recomputed, schedule, zero, f"{max(peaks) / 1e9:.1f} GB{' (fits)' if max(peaks) <= 80e9 else ''}",
        f"{min(peaks) / 1e9:.1f} GB", f"{max(member.in_flight for member in stages.members) / 1e9:.1f} GB",
        f"{bubble:.3f}", f"{plan.comm_bytes / 1e9:.0f} GB", f"{edges / 1e9:.1f} GB", f"{seconds:.0f}",
    ]  # fmt: skip
    print(markdown(HEAD, [cells]).splitlines()[-1], flush=True)
    if options.budget:
        print(*(f"  {line}" for line in plan.decisions), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--schedule", nargs="+", default=[*STAGES], choices=STAGES)
    parser.add_argument("--recompute", nargs="+", default=[*RECOMPUTED], choices=RECOMPUTED)
    parser.add_argument("--budget", help="of a rank, 72GB")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--verify", action="store_true", help="every pass, as for a program that runs")
    options = options_of(parser)
    warnings.simplefilter("ignore")
    where = gz.placement("cpu", torch.arange(PP * DP * TP).reshape(PP, DP, TP).tolist(), ("pp", "dp", "tp"), True)
    print(*markdown(HEAD, [HEAD]).splitlines()[:2], sep="\n")
    by_stages = itertools.groupby(sorted(options.schedule, key=lambda name: STAGES[name]), lambda name: STAGES[name])
    for (stages, schedules), recomputed in itertools.product([(n, [*g]) for n, g in by_stages], options.recompute):
        with torch.device("meta"):
            graph = Train(where, options.layers, stages, recomputed == "blocks")  # captured once for its rows
        for schedule, zero in itertools.product(schedules, options.zero):
            show_row(graph, options, recomputed, schedule, zero)
    print(f"\nat most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory")


if __name__ == "__main__":
    main()
