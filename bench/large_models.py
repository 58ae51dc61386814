"""Plans of published models on many ranks, subjects of ``plans.py``: pipelines, sequences, experts, recomputation."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from _run import markdown
from layouts import PLANS, column, parallelise
from models import WithOwnLoss, gpt2, published_llama
from parity import TrainGraph
from torch.optim import AdamW

import graphzero as gz
from graphzero.cli.plan import size_of
from graphzero.passes.place.attention_ways import WAYS
from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_seconds import pipeline_seconds
from graphzero.sbp import S
from graphzero.testing import fake_world

MEGATRON = [*PLANS["llama"], *column("embed_tokens", "lm_head")]  # the split of Llama's weights over an axis tp


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 2, 3], help="pipelines, sequences: ZeRO's stages")
    parser.add_argument("--schedule", nargs="+", default=[*SCHEDULES], choices=SCHEDULES, help="pipelines")
    parser.add_argument("--recompute", nargs="+", default=[*RECOMPUTED], choices=RECOMPUTED, help="pipelines")
    parser.add_argument("--budget", help="pipelines: of a rank, 72GB")
    parser.add_argument("--verify", action="store_true", help="pipelines: every pass, as for a program that runs")
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 32], help="sequences")
    parser.add_argument("--way", nargs="+", default=[*WAYS], choices=WAYS, help="sequences: of attention")
    parser.add_argument("--length", type=int, default=131072, help="sequences: of each, in tokens")
    parser.add_argument("--ways", action="store_true", help="experts: of a data axis of 64 ranks")
    parser.add_argument("--tokens", type=int, default=4096, help="experts: of a sequence")


def print_head(head: list[str]) -> None:
    print(*markdown(head, [head]).splitlines()[:2], sep="\n")


def print_row(head: list[str], cells: list[Any]) -> None:
    print(markdown(head, [cells]).splitlines()[-1], flush=True)


# ---- pipelines

PP, DP, TP = 8, 8, 8
CONTEXT, MICRO_BATCHES = 8192, 32
SCHEDULES = {"1f1b": PP, "zb1p": PP, "interleaved": 2 * PP, "zbv": 2 * PP}  # how many stages each has here
RECOMPUTED = ("nothing", "blocks")
PIPELINES = [
    "recomputed", "schedule", "ZeRO", "peak", "least full", "in flight", "bubble", "sent", "along pp", "seconds",
]  # fmt: skip


def show_pipelines(options: argparse.Namespace) -> None:
    where = gz.placement("cpu", torch.arange(PP * DP * TP).reshape(PP, DP, TP).tolist(), ("pp", "dp", "tp"), True)
    print_head(PIPELINES)
    schedules = sorted(options.schedule, key=lambda name: SCHEDULES[name])
    by_stages = [(n, [*names]) for n, names in itertools.groupby(schedules, lambda name: SCHEDULES[name])]
    for (stages, names), recomputed in itertools.product(by_stages, options.recompute):
        graph = staged_llama(where, options.layers or 80, stages, recomputed == "blocks")  # captured once for its rows
        for schedule, zero in itertools.product(names, options.zero):
            cells, decisions = cells_of_pipeline(graph, options, schedule, zero)
            print_row(PIPELINES, [recomputed, schedule, zero, *cells])
            if options.budget:
                print(*(f"  {line}" for line in decisions), sep="\n", flush=True)


def staged_llama(where: gz.Placement, layers: int, stages: int, blocks: bool) -> TrainGraph:
    """blocks: whether each layer is computed again."""
    model = WithOwnLoss(published_llama("70B", layers, CONTEXT, blocks))
    parallelise(model, MEGATRON, where)
    graph = TrainGraph(model, AdamW(model.parameters(), lr=1.5e-4), placement=where, clip_grad_norm=1.0)
    config = graph.config
    config.enable_amp()
    config.set_gradient_accumulation_steps(MICRO_BATCHES)
    stage_of = {"model.embed_tokens": 0, "model.norm": stages - 1, "lm_head": stages - 1}
    stage_of |= {f"model.layers.{i}": i * stages // layers for i in range(layers)}
    for path, stage in stage_of.items():
        config.set_stage(f"model.inner.{path}", stage)
    return graph


def cells_of_pipeline(
    graph: TrainGraph, options: argparse.Namespace, schedule: str, zero: int
) -> tuple[list[str], Sequence[str]]:
    """Cells, and the plan's decisions; a plan that fits 80 GB has its peak marked."""
    graph.config.enable_zero(stage=zero)
    graph.config.set_pipeline(schedule)
    graph.config.set_memory_budget(size_of(options.budget) if options.budget else None)
    ids = torch.zeros(DP * MICRO_BATCHES, CONTEXT, dtype=torch.long, device="meta")
    began = time.process_time()
    with graph.prepared_call("planning", (ids, ids), {}, verifies=options.verify) as prepared:
        program = prepared.program
    seconds, plan = time.process_time() - began, program.plan
    pipeline, stages = program.part.pipeline, plan.pipeline
    assert pipeline is not None and stages is not None
    peaks = [member.memory.peak for member in stages.members]
    fullest = stages.members[peaks.index(max(peaks))].stages
    edges = sum(edge.bytes * edge.messages for edge in stages.edges if edge.source in fullest)
    cells = [
        f"{max(peaks) / 1e9:.1f} GB{' (fits)' if max(peaks) <= 80e9 else ''}", f"{min(peaks) / 1e9:.1f} GB",
        f"{max(member.in_flight for member in stages.members) / 1e9:.1f} GB",
        f"{pipeline_seconds(pipeline, Device.named('h100')).bubble:.3f}", f"{plan.comm_bytes / 1e9:.0f} GB",
        f"{edges / 1e9:.1f} GB", f"{seconds:.0f}",
    ]  # fmt: skip
    return cells, plan.decisions


# ---- sequences

RANKS = 64
HELD = {  # at the peak, by the categories of a plan
    "states": ("parameters", "optimizer_states", "buffers"), "16-bit parameters": ("compute_parameters",),
    "gradients": ("gradients", "accumulators"), "activations": ("activations", "temporaries", "arena"),
    "communication": ("communication",),
}  # fmt: skip
SEQUENCES = [
    "ranks", "attention", "ZeRO", *HELD, "peak", "attention sends", "parameters send", "gradients send", "seconds",
]  # fmt: skip


def show_sequences(options: argparse.Namespace) -> None:
    print_head(SEQUENCES)
    for cp in options.cp:
        ranks = torch.arange(RANKS).reshape(RANKS // cp, cp).tolist()
        where = gz.placement("cpu", ranks, names=("dp", "cp"), virtual=True)
        model = WithOwnLoss(published_llama("8B", options.layers or 32, options.length, recomputed=True))
        graph = TrainGraph(model, AdamW(model.parameters(), lr=1.5e-4), placement=where, clip_grad_norm=1.0)
        graph.config.enable_amp()
        for name in ("x", "y"):
            graph.config.set_input(name, sbp=(S(0), S(1)))
        ids = torch.empty(RANKS // cp, options.length, dtype=torch.long, device="meta")
        for way, zero in itertools.product(options.way, options.zero):
            graph.config.enable_zero(stage=zero, axis=("dp", "cp"))
            graph.config.set_split_attention(way)
            began = time.process_time()
            with graph.prepared_call("planning", (ids, ids), {}, verifies=False) as prepared:
                plan = prepared.program.plan
            seconds = time.process_time() - began
            print_row(SEQUENCES, [f"dp {RANKS // cp} x cp {cp}", way, zero, *cells_of_sequence(plan), f"{seconds:.0f}"])


def cells_of_sequence(plan: Plan) -> list[str]:
    """GB that a rank holds and sends."""
    held = [sum(plan.memory.at_peak.get(key, 0) for key in keys) for keys in HELD.values()]
    sent = [bytes_of(plan, what) for what in ("parameters", "gradients")]
    attention = sum(c.bytes for c in plan.collectives if c.what_for == "other" and c.kind != "all_reduce")
    return [f"{number / 1e9:.2f}" for number in (*held, plan.memory.peak, attention, *sent)]


def bytes_of(plan: Plan, what: str) -> float:
    return sum(c.bytes for c in plan.collectives if c.what_for == what)


# ---- experts

EXPERT_WAYS = (("weights", 1.25), ("tokens", 1.25), ("exchange", 1.25), ("exchange", 4.0))


def show_experts(options: argparse.Namespace) -> None:
    rows = []
    if options.ways:
        for way, room in EXPERT_WAYS:
            _, peak, weights, others = bytes_of_layer(options.tokens, 64, "dp", None, 3, way, room)
            cells = (f"{peak / 1e9:.2f} GB", f"{weights / 1e6:.1f} MB", f"{others / 1e6:.1f} MB")
            rows.append([name_of_way(way, room), *cells])
        print(markdown(["64 ranks, ZeRO 3", "more at peak", "weights and gradients sent", "others sent"], rows))
        return
    for name, axis, splits, stage in (
        ("`ep`, weights whole", "ep", None, 0),
        ("`ep`, experts split", "ep", "auto", 0),
        ("`dp`, ZeRO 3", "dp", None, 3),
    ):
        states, _, weights, others = bytes_of_layer(options.tokens, 8, axis, splits, stage)
        rows.append([name, f"{states / 1e9:.2f} GB", f"{weights / 1e6:.1f} MB", f"{others / 1e6:.1f} MB"])
    print(markdown(["8 ranks of", "parameters and states", "weights and gradients sent", "others sent"], rows))


def name_of_way(way: str, room: float) -> str:
    return f"`{way}`" + (f", room for {room:g} shares" if way == "exchange" else "")


def qwen3moe(**sizes: int) -> WithOwnLoss:
    """Qwen3-MoE with experts' products as one op each; sizes: beside those of Qwen3-30B-A3B."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    published = {
        "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960,
    }  # fmt: skip
    config = Qwen3MoeConfig(**published | sizes, use_cache=False)
    return WithOwnLoss(
        AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
        )
    )


def bytes_of_layer(tokens: int, *how: Any) -> tuple[float, ...]:
    """The difference of two plans, of which one has a layer more."""
    one, two = (bytes_of_model(tokens, layers, *how) for layers in (1, 2))
    return tuple(after - before for before, after in zip(one, two, strict=True))


def bytes_of_model(
    tokens: int,
    layers: int,
    ranks: int,
    axis: str,
    splits: str | None,
    stage: int,
    way: str = "auto",
    room: float = 1.25,
) -> tuple[float, ...]:
    """Bytes of a rank: of parameters and states, what the peak has beside them, sent of parameters and their gradients,
    and sent otherwise.

    splits: the SBPs of weights.  way: of experts that a data axis splits.
    """
    where = gz.placement("cpu", range(ranks), names=(axis,), virtual=True)
    with torch.device("meta"):
        model = qwen3moe(num_hidden_layers=layers)
    if splits is not None:
        gz.to_global(model.inner, where, splits)
    graph = TrainGraph(model, AdamW(model.parameters()), None, stage, where)
    graph.config.enable_amp()
    graph.config.set_split_experts(way, capacity=room)
    ids = torch.empty(ranks if axis == "dp" else 1, tokens, dtype=torch.long, device="meta")
    plan = graph.compile(ids, ids).plan
    weights = bytes_of(plan, "parameters") + bytes_of(plan, "gradients")
    states = plan.memory["parameters"] + plan.memory["optimizer_states"]
    return states, plan.memory.peak - states, weights, sum(c.bytes for c in plan.collectives) - weights


# ---- recomputation

PARTS = (0.75, 0.5, 0.35)  # of the bytes of activations


def show_recomputation(options: argparse.Namespace) -> None:
    del options
    with fake_world(64):
        plan_of_gpt2(None)  # loads what is loaded once
        rows, most = [], plan_of_gpt2(None)[0].memory.activations
        kinds = {"plain": None, '"checkpoint"': "checkpoint", **{f"{part:.0%}": int(part * most) for part in PARTS}}
        for name, memory in kinds.items():
            plan, seconds = plan_of_gpt2(memory)
            sizes = (plan.memory.activations / 1e9, plan.memory.peak / 1e9)
            rows.append([name, *(f"{size:.2f}" for size in sizes), f"{seconds:.1f}"])
    print("GPT-2 124M, stage 2, 64 ranks of a fake world, 4 sequences of 1,024 each, meta device\n")
    print(markdown(["activations", "most, GB", "peak, GB", "seconds to compile"], rows))


def plan_of_gpt2(memory: Any) -> tuple[Plan, float]:
    """The plan, and seconds of the processor for the whole of ``compile``."""
    with torch.device("meta"):
        model = gpt2(12, width=768, heads=12, vocabulary=50257, context=1024)
        ids = torch.zeros(4, 1024, dtype=torch.long)
    graph = TrainGraph(model, AdamW(model.parameters()), None, 2, gz.placement("cpu", range(64)))
    graph.config.set_activation_memory(memory)
    started = time.process_time()
    graph.compile(ids, ids)
    return graph.plan, time.process_time() - started


SUBJECTS = {
    "pipelines": show_pipelines, "sequences": show_sequences, "experts": show_experts,
    "recomputation": show_recomputation,
}  # fmt: skip
