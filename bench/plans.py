"""Plans of large steps, without ranks.

    python bench/plans.py passes           # the passes of examples/passes, float32 parameters; --amp: bfloat16
    python bench/plans.py paper            # the ZeRO paper's model of 7.5 billion parameters; --layers 2: quickly
    python bench/plans.py pipelines        # Llama 3 70B on 512 ranks, pp 8 x dp 8 x tp 8: 40 minutes
    python bench/plans.py sequences        # Llama 3 8B and sequences of 131,072 tokens on 64 ranks
    python bench/plans.py experts          # a layer of Qwen3-30B-A3B on 8 ranks; --ways: on 64 data ranks

Models are on the meta device: nothing is computed, no weight is allocated, one core is used.  Seconds are the
processor's.  The last line says the most memory that the process had.  The figures stand in docs/ on the pages of these
subjects.

passes: twelve transformer MLP blocks of width 1024 (101 million parameters) at stage 3, on 2 nodes of 8 ranks, with
AdamW; bytes sent by axis and phase, bytes held.  paper: a GPT of 7.46 billion parameters on 64 ranks, Adam: for each
stage ``plan.memory.model_state``, the closed form of the ZeRO paper (arXiv 1910.02054), and the paper's Figure 1.

The others are in bfloat16 under float32 masters, with AdamW.  pipelines: 32 micro-batches of one sequence of 8,192
tokens on each data rank, clipping; "bubble" is that of the schedule by planned seconds of an H100, "sent" what one rank
of the fullest member sends in a step, and along pp next to it.  ``--zero 3 --schedule 1f1b --budget 72GB`` says what a
budget makes of it.  sequences: one on each data rank, cut over the axis cp, clipping, each layer computed again in
backward, ZeRO over both axes; GB of a rank at the peak, and sent in a step for attention, of parameters and of
gradients.  The first row of a placement has the seconds of tracing too.  experts: one sequence of ``--tokens`` in all
on an axis ``ep``, one on each rank of an axis ``dp``; embedding and head are not in a layer.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _run import markdown, options_of
from layouts import MEGATRON, parallelise
from models import WithOwnLoss, published_llama, published_qwen3moe
from parity import TrainGraph
from peers import name_of_way
from torch import Tensor, nn
from torch.optim import AdamW
from workloads import GPT, Shape

import graphzero as gz
from graphzero.cli.plan import size_of
from graphzero.passes.place.attention_ways import WAYS
from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_seconds import pipeline_seconds
from graphzero.sbp import S

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from passes.int8_gathers import Int8Gathers  # noqa: E402
from passes.node_local_copy import NodeLocalCopy  # noqa: E402
from passes.offload import Offload  # noqa: E402
from passes.two_hops import TwoHops  # noqa: E402


def print_head(head: list[str]) -> None:
    print(*markdown(head, [head]).splitlines()[:2], sep="\n")


def print_row(head: list[str], cells: list[Any]) -> None:
    print(markdown(head, [cells]).splitlines()[-1], flush=True)


# ---- passes

WIDTH, BLOCKS, BATCH = 1024, 12, (64, 128)
PASSES: dict[str, list[object]] = {
    "none": [],
    "two hops": [TwoHops()],
    "node-local copy": [NodeLocalCopy()],
    "int8 gathers": [Int8Gathers()],
    "offload": [Offload()],
    "all four": [Int8Gathers(), NodeLocalCopy(), TwoHops(), Offload()],
}
SENT = [("parameters", "forward"), ("parameters", "backward"), ("gradients", "backward")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down


class TrainBlocks(gz.Graph):
    def __init__(self, passes: list[object], amp: bool):
        super().__init__(gz.placement("cpu", torch.arange(16).view(2, 8), names=("dp_node", "dp_gpu"), virtual=True))
        with torch.device("meta"):
            self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.enable_zero(stage=3)
        self.config.enable_amp(amp)
        for one in passes:
            self.config.add_pass(one, after="fuse" if isinstance(one, Offload) else "cast_before_gather")

    def build(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        return loss


def show_passes(options: argparse.Namespace) -> None:
    print("MB that one rank sends between nodes + within one, and holds\n")
    head = ["passes", *(f"{what}, {phase}" for what, phase in SENT), "activations", "peak", "on the host"]
    print(markdown(head, [row_of_passes(name, passes, options.amp) for name, passes in PASSES.items()]))


def row_of_passes(name: str, passes: list[object], amp: bool) -> list[str]:
    plan = TrainBlocks(passes, amp).compile(torch.empty(*BATCH, WIDTH, device="meta")).plan
    sent: Counter[tuple[str, str, str]] = Counter()
    for one in plan.collectives:
        sent[one.what_for, one.phase, one.axis] += one.bytes  # type: ignore[assignment]
    moved = [" + ".join(megabytes(sent[(*key, axis)]) for axis in ("dp_node", "dp_gpu")) for key in SENT]
    memory = plan.memory
    return [name, *moved, megabytes(memory.activations), megabytes(memory.peak), megabytes(memory.host)]


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


# ---- the ZeRO paper

RANKS = 64
FIGURE = (120.0, 31.4, 16.6, 1.9)  # GB, by stage, for 7.5 billion parameters


def show_paper(options: argparse.Namespace) -> None:
    shape = Shape(vocabulary=50257, width=4096, layers=options.layers or 36, heads=32, batch=1, context=1024, tied=True)
    head = ["stage", "plan, GB", "closed form", "paper", "seconds"]
    print_head(head)
    with gz.testing.fake_world(RANKS):
        with torch.device("meta"):
            model, x = GPT(shape), torch.empty(1, shape.context, dtype=torch.long)
        graph = TrainGraph(model, torch.optim.Adam(model.parameters(), lr=1e-4))
        graph.config.enable_amp()
        parameters = sum(p.numel() for p in model.parameters())
        for stage in range(4):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            started = time.process_time()
            state = graph.compile(x, x).plan.memory.model_state
            form = closed_form(parameters, RANKS, stage)
            seconds = time.process_time() - started
            print_row(head, [stage, f"{state / 1e9:.2f}", f"{form / 1e9:.2f}", FIGURE[stage], f"{seconds:.0f}"])


def closed_form(parameters: float, ranks: int, stage: int) -> float:
    """Bytes of model states: 2 for 16-bit parameters, 2 for their gradients, 12 for Adam's states and the masters."""
    split = [1 if stage < 3 else ranks, 1 if stage < 2 else ranks, 1 if stage < 1 else ranks]
    return sum(bytes_ * parameters / n for bytes_, n in zip((2, 2, 12), split, strict=True))


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
        model = published_qwen3moe(num_hidden_layers=layers)
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


# ---- the command

SUBJECTS = {
    "passes": show_passes, "paper": show_paper, "pipelines": show_pipelines, "sequences": show_sequences,
    "experts": show_experts,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--amp", action="store_true", help="passes: bfloat16 parameters in forward and backward")
    parser.add_argument("--layers", type=int, help="of the model: by default all that it has")
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

    options = options_of(parser)
    warnings.simplefilter("ignore")
    SUBJECTS[options.subject](options)
    print(f"\nat most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory")


if __name__ == "__main__":
    main()
