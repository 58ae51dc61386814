"""Pipeline stages beside torch.distributed.pipelining and DeepSpeed's PipelineModule, on gloo ranks of one thread.

    python bench/stage_peers.py                   # step times on two ranks
    python bench/stage_peers.py --ranks 4
    python bench/stage_peers.py --what memory     # peak of resident memory of each rank
    python bench/stage_peers.py --what ragged     # losses where micro-batches have other numbers of labels

All train the same GPT from the same weights with AdamW, fused for the peers, on the same micro-batches, with equal runs
of blocks a stage, the embedding with the first and the head with the last.  A step is timed from a barrier of all ranks
to the next, so that it is the slowest rank's, optimizer included.  Rounds alternate, in another order each; a round's
first step does not count.  A ratio is that of medians in one round; shown are its median over rounds and its quartiles.
*CPU* are the processor's seconds in a step, mean over ranks: waiting is not in them, and other work on the machine
changes them less.
DeepSpeed is there if it can be imported (``pip install deepspeed``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from _run import markdown, on_gloo, options_of
from parity import TrainGraph
from peak_memory import MALLOC, high_water, mb, reset
from peers import add_options, peer_table
from step_time import Timed, time_in_turn
from systems import adamw, import_deepspeed
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F
from workloads import GPT, Shape, gpt

import graphzero as gz
from graphzero.schedules import generate_schedule

SIZES = {
    "toy": Shape(vocabulary=64, width=32, layers=8, heads=2, batch=8, context=16),
    "A": Shape(vocabulary=2048, width=256, layers=8, heads=4, batch=16, context=128),
    "B": Shape(vocabulary=2048, width=512, layers=8, heads=8, batch=16, context=64),
}
STEPS = 5  # steps whose memory is measured
Step = Callable[[Tensor, Tensor], "Tensor | None"]  # the whole batch -> the loss, on one rank at least


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages.  ranks: stages are on ``stages // ranks`` places of each rank."""

    shape: Shape
    schedule: str
    ranks: int
    micro_batches: int

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return generate_schedule(self.schedule, self.ranks, self.micro_batches).stage_ranks

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.shape)

    def blocks(self, stage: int) -> range:
        """Blocks of a stage."""
        layers = self.shape.layers
        return range(stage * layers // self.stages, (stage + 1) * layers // self.stages)


class StageModule(nn.Module):
    """One stage of a GPT: tokens or values -> values or scores."""

    def __init__(self, pipeline: Pipeline, stage: int, model: GPT):
        super().__init__()
        self.tokens, self.positions = (model.tokens, model.positions) if stage == 0 else (None, None)
        self.blocks = nn.ModuleList(model.blocks[i] for i in pipeline.blocks(stage))
        self.norm, self.head = (model.norm, model.head) if stage == pipeline.stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


# ---- the systems


def graphzero(pipeline: Pipeline, executor: str = "eager") -> Step:
    model = pipeline.model()
    graph = TrainGraph(model, adamw(model), placement=gz.placement("cpu", list(range(pipeline.ranks)), names=("pp",)))
    config, last = graph.config, pipeline.stages - 1
    for path, stage in (("tokens", 0), ("positions", 0), ("norm", last), ("head", last)):
        config.set_stage(f"model.{path}", stage)
    for stage in range(pipeline.stages):
        for block in pipeline.blocks(stage):
            config.set_stage(f"model.blocks.{block}", stage)
    config.set_pipeline(pipeline.schedule)
    config.set_gradient_accumulation_steps(pipeline.micro_batches)
    config.set_executor(executor)
    return graph


def torch_pipeline(pipeline: Pipeline, compiled: bool = False) -> Step:
    """As the documentation of torch.distributed.pipelining does it."""
    rank, model = dist.get_rank(), pipeline.model()
    own = [stage for stage, owner in enumerate(pipeline.stage_ranks) if owner == rank]
    modules = [StageModule(pipeline, stage, model) for stage in own]
    parameters = [p for module in modules for p in module.parameters()]
    del model
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    stages = [
        pipelining.PipelineStage(
            torch.compile(module) if compiled else module,  # type: ignore[arg-type]
            stage,
            pipeline.stages,
            torch.device("cpu"),
        )
        for stage, module in zip(own, modules, strict=True)
    ]
    make = schedules.get_schedule_class(TORCH_NAMES[pipeline.schedule])
    schedule: Any = make(
        stages[0] if pipeline.stages == pipeline.ranks else stages, pipeline.micro_batches, cross_entropy
    )

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        labels = {"target": y, "losses": losses} if pipeline.stages - 1 in own else {}
        schedule.step(*([x] if 0 in own else []), **labels)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return step


TORCH_NAMES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


def deepspeed(pipeline: Pipeline) -> Step:
    package = import_deepspeed()
    from deepspeed.pipe import PipelineModule

    model = pipeline.model()
    layers = [StageModule(pipeline, stage, model) for stage in range(pipeline.stages)]
    del model
    package.init_distributed("gloo", dist_init_required=False)
    module = PipelineModule(
        layers,
        num_stages=pipeline.ranks,
        loss_fn=cross_entropy,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    config = {
        "train_micro_batch_size_per_gpu": pipeline.shape.batch // pipeline.micro_batches,
        "gradient_accumulation_steps": pipeline.micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = package.initialize(model=module, optimizer=adamw(module), config=config, dist_init_required=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        count = pipeline.micro_batches
        loss: Tensor = engine.train_batch(iter(zip(x.chunk(count), y.chunk(count), strict=True)))
        return loss

    return step


@dataclass(frozen=True)
class System:
    """A system that trains a pipeline.  needs: a package without which it is left out."""

    name: str
    schedule: str
    begin: Callable[[Pipeline], Step]
    needs: str = "torch"


SYSTEMS = [
    *(System(f"graphzero, {name}", name, graphzero) for name in TORCH_NAMES),
    *(System(f"graphzero + inductor, {name}", name, partial(graphzero, executor="inductor")) for name in ("1f1b",)),
    *(System(f"torch, {name}", name, torch_pipeline) for name in TORCH_NAMES),
    *(
        System(f"torch + compile, {name}", name, partial(torch_pipeline, compiled=True))
        for name in ("1f1b", "interleaved")
    ),
    System("DeepSpeed, 1f1b", "1f1b", deepspeed, "deepspeed"),
]


def pipeline_of(system: System, options: argparse.Namespace) -> Pipeline:
    return Pipeline(SIZES[options.model], system.schedule, options.ranks, options.micro_batches)


def loss_of(loss: Tensor | None) -> float:
    """The loss on all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, None if loss is None else float(loss))
    return next(value for value in values if value is not None)


# ---- times


def time_systems(rank: int, options: argparse.Namespace) -> dict[str, Timed]:
    """Every rank: alternate rounds of all systems."""
    batches = [gpt(SIZES[options.model]).batch(step, SIZES[options.model].batch) for step in range(4)]
    systems = {s.name: s for s in SYSTEMS if s.name in options.systems}
    steps = {name: s.begin(pipeline_of(s, options)) for name, s in systems.items()}
    return time_in_turn(steps, batches, options.rounds, options.steps, loss_of, between_barriers=True)


def peers_of(name: str) -> list[str]:
    """The systems that a system is measured against: that of the same schedule, by others."""
    who, schedule = name.split(", ")
    if not who.startswith("graphzero"):
        return []
    return [f"{peer}, {schedule}" for peer in ("torch", "torch + compile", "DeepSpeed")]


# ---- memory


def measure_memory(rank: int, name: str, options: argparse.Namespace) -> list[int]:
    """Every rank: the most resident bytes of each rank beyond those before the model."""
    (system,) = (s for s in SYSTEMS if s.name == name)
    toy = Pipeline(SIZES["toy"], system.schedule, options.ranks, options.micro_batches)
    step = system.begin(toy)
    for i in range(3):
        loss_of(step(*gpt(toy.shape).batch(i, toy.shape.batch)))
    del step
    pipeline = pipeline_of(system, options)
    batches = [gpt(pipeline.shape).batch(i, pipeline.shape.batch) for i in range(STEPS)]
    dist.barrier()
    before = reset()
    step = system.begin(pipeline)
    loss_of(step(*batches[0]))
    reset()
    for batch in batches[1:]:
        loss_of(step(*batch))
    peaks: list[Any] = [None] * options.ranks
    dist.all_gather_object(peaks, high_water() - before)
    return peaks


def memory_table(options: argparse.Namespace) -> str:
    rows = []
    for name in options.systems:
        rows.append([name, *map(mb, on_gloo(options.ranks, measure_memory, name, options))])
        print(".", end="", file=sys.stderr, flush=True)
    ranks = [f"rank {rank}, MB" for rank in range(options.ranks)]
    return markdown(["", *ranks], rows)


# ---- ragged batches


def ragged_losses(rank: int, options: argparse.Namespace) -> dict[str, float]:
    """Every rank: the first loss of each system where only every ninth label of the later half counts."""
    x, y = gpt(SIZES[options.model]).batch(0, SIZES[options.model].batch)
    half = len(y) // 2
    y[half:][torch.arange(y[half:].numel()).view_as(y[half:]) % 9 > 0] = -100
    systems = {s.name: s for s in SYSTEMS if s.name in options.systems}
    losses = {}
    for name, system in systems.items():
        pipeline = pipeline_of(system, options)
        losses["plain PyTorch, whole batch"] = float(pipeline.model()(x, y).detach())
        losses[name] = loss_of(system.begin(pipeline)(x, y))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("time", "memory", "ragged"), default="time")
    parser.add_argument("--model", choices=SIZES, default="A")
    parser.add_argument("--micro-batches", type=int, default=8)
    add_options(parser)
    options = options_of(parser)
    names = options.systems or [s.name for s in SYSTEMS]
    options.systems = [s.name for s in SYSTEMS if s.name in names and find_spec(s.needs)]
    shape = SIZES[options.model]
    print(
        f"GPT, {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, {shape.batch} sequences of "
        f"{shape.context} in {options.micro_batches} micro-batches; {options.ranks} gloo ranks, one thread each\n"
    )
    if options.what == "time":
        print(peer_table(on_gloo(options.ranks, time_systems, options), peers_of))
    elif options.what == "memory":
        os.environ.update(MALLOC)
        print(memory_table(options))
    else:
        losses = on_gloo(options.ranks, ragged_losses, options)
        print(markdown(["", "loss"], [[name, f"{loss:.5f}"] for name, loss in losses.items()]))


if __name__ == "__main__":
    main()
