"""Systems that split a model into stages, or sequences into pieces.

Pipelines are graphzero's, torch.distributed.pipelining's and DeepSpeed's PipelineModule.  All have equal runs of blocks
a stage, the embedding with the first and the head with the last.

Sequences are split in graphzero's ways, and by DeepSpeed's Ulysses: its ``DistributedAttention`` in a model that is
written for pieces, under DDP.  *In turn*: tokens are dealt out in turn, so that ranks have equal work under the causal
mask.  torch's ``context_parallel`` has no attention for a CPU (docs/sequences.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from parity import TrainGraph
from systems import RATE, Step, System, adamw, engine_config, import_deepspeed, train_wrapped
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, Workload

import graphzero as gz
from graphzero.sbp import S
from graphzero.schedules import generate_schedule

# ---- stages


class Pipeline:
    """A model that is cut into stages, one or more of them on each rank; ``stage_ranks``: the rank of each stage."""

    def __init__(self, workload: Workload, schedule: str) -> None:
        self.ranks = dist.get_world_size()
        self.stage_ranks = generate_schedule(schedule, self.ranks, workload.micro_batches).stage_ranks
        self.stages = len(self.stage_ranks)

    def blocks(self, stage: int, layers: int) -> range:
        """Blocks of a stage."""
        return range(stage * layers // self.stages, (stage + 1) * layers // self.stages)


class StageModule(nn.Module):
    """One stage of a GPT: tokens or values -> values or scores."""

    def __init__(self, pipeline: Pipeline, stage: int, model: GPT):
        super().__init__()
        self.tokens, self.positions = (model.tokens, model.positions) if stage == 0 else (None, None)
        self.blocks = nn.Sequential(*(model.blocks[i] for i in pipeline.blocks(stage, len(model.blocks))))
        self.norm, self.head = (model.norm, model.head) if stage == pipeline.stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def train_graph_pipeline(workload: Workload, schedule: str, executor: str = "eager") -> Step:
    pipeline, model = Pipeline(workload, schedule), workload.model()
    graph = TrainGraph(model, adamw(model), placement=gz.placement("cpu", list(range(pipeline.ranks)), names=("pp",)))
    config, last = graph.config, pipeline.stages - 1
    for path, stage in (("tokens", 0), ("positions", 0), ("norm", last), ("head", last)):
        config.set_stage(f"model.{path}", stage)
    for stage in range(pipeline.stages):
        for block in pipeline.blocks(stage, len(model.blocks)):
            config.set_stage(f"model.blocks.{block}", stage)
    config.set_pipeline(schedule)
    config.set_gradient_accumulation_steps(workload.micro_batches)
    config.set_executor(executor)
    return graph


def train_torch_pipeline(workload: Workload, schedule: str, compiled: bool = False) -> Step:
    """As the documentation of torch.distributed.pipelining does it."""
    pipeline, rank, model = Pipeline(workload, schedule), dist.get_rank(), workload.model()
    own = [stage for stage, owner in enumerate(pipeline.stage_ranks) if owner == rank]
    modules = [StageModule(pipeline, stage, model) for stage in own]
    parameters = [p for module in modules for p in module.parameters()]
    del model
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    if compiled:
        modules = list(map(torch.compile, modules))
    stages = [
        pipelining.PipelineStage(module, stage, pipeline.stages, torch.device("cpu"))
        for stage, module in zip(own, modules, strict=True)
    ]
    schedule_class: Any = schedules.get_schedule_class(TORCH_NAMES[schedule])
    own_stages = stages[0] if pipeline.stages == pipeline.ranks else stages
    running = schedule_class(own_stages, workload.micro_batches, cross_entropy)

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        labels = {"target": y, "losses": losses} if pipeline.stages - 1 in own else {}
        running.step(*([x] if 0 in own else []), **labels)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return step


TORCH_NAMES = {
    "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}  # fmt: skip


def train_deepspeed_pipeline(workload: Workload) -> Step:
    package, pipeline, count = import_deepspeed(), Pipeline(workload, "1f1b"), workload.micro_batches
    from deepspeed.pipe import PipelineModule

    model = workload.model()
    layers = [StageModule(pipeline, stage, model) for stage in range(pipeline.stages)]
    del model
    options = {"partition_method": "uniform", "activation_checkpoint_interval": 0}
    module = PipelineModule(layers, num_stages=pipeline.ranks, loss_fn=cross_entropy, **options)
    config = engine_config(workload, stage=1)
    engine, *_ = package.initialize(model=module, optimizer=adamw(module), config=config, dist_init_required=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine.train_batch(iter(zip(x.chunk(count), y.chunk(count), strict=True)))
        return loss

    return step


PIPELINES = [
    *(System(f"graphzero, {name}", partial(train_graph_pipeline, schedule=name)) for name in TORCH_NAMES),
    System("graphzero + inductor, 1f1b", partial(train_graph_pipeline, schedule="1f1b", executor="inductor")),
    *(System(f"torch, {name}", partial(train_torch_pipeline, schedule=name)) for name in TORCH_NAMES),
    System("torch + compile, 1f1b", partial(train_torch_pipeline, schedule="1f1b", compiled=True)),
    System("torch + compile, interleaved", partial(train_torch_pipeline, schedule="interleaved", compiled=True)),
    System("DeepSpeed, 1f1b", train_deepspeed_pipeline, "deepspeed"),
    System("PyTorch, whole batch", lambda w: train_wrapped(lambda m: m, replace(w, micro_batches=1)), special=True),
]

# ---- sequences

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, length, heads, dim] each


def train_split_graph(workload: Workload, way: str, executor: str = "eager", in_turn: bool = False) -> Step:
    """A Graph with contiguous pieces, or with tokens that are dealt out in turn."""
    ranks, rank, model = dist.get_world_size(), dist.get_rank(), workload.model()
    graph = TrainGraph(model, adamw(model), placement=gz.placement("cpu", [list(range(ranks))], names=("dp", "cp")))
    graph.config.set_split_attention(way)
    graph.config.set_executor(executor)
    sections = model.positions.num_embeddings // ranks if in_turn else 1
    for name in ("x", "y"):
        graph.config.set_input(name, sbp=(S(0), S(1, sections)))
    if in_turn:
        return lambda x, y: graph(x[:, rank::ranks].contiguous(), y[:, rank::ranks].contiguous())
    return lambda x, y: graph(take_piece(x), take_piece(y))


def take_piece(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class PieceOfGPT(nn.Module):
    """The model for one rank's piece of every sequence: places are its own, and the loss is the mean over the piece."""

    def __init__(self, model: GPT, attention: Attention):
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start, model = dist.get_rank() * x.shape[1], self.model
        h = model.tokens(x) + model.positions(torch.arange(start, start + x.shape[1]))
        for block in model.blocks:
            q, k, v = block.qkv(block.norm1(h)).unflatten(-1, (3, block.heads, -1)).unbind(2)
            h = h + block.out(self.attention(q, k, v).flatten(2))
            h = h + block.mlp(block.norm2(h))
        return F.cross_entropy(model.head(model.norm(h)).flatten(0, 1), y.flatten())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


def train_ulysses(workload: Workload) -> Step:
    import_deepspeed()
    from deepspeed.sequence.layer import DistributedAttention

    exchange = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def wrap(model: GPT) -> nn.Module:
        return DistributedDataParallel(PieceOfGPT(model, lambda q, k, v: exchange(q, k, v, 0)))

    step = train_wrapped(wrap, workload)
    return lambda x, y: step(take_piece(x), take_piece(y))


SEQUENCES = [
    *(System(f"graphzero, {way}", partial(train_split_graph, way=way)) for way in ("exchange", "gather", "ring")),
    *(
        System(f"graphzero, {way}, in turn", partial(train_split_graph, way=way, in_turn=True))
        for way in ("gather", "ring")
    ),
    System("graphzero + inductor, exchange", partial(train_split_graph, way="exchange", executor="inductor")),
    System("DeepSpeed", train_ulysses, "deepspeed"),
]
