"""The data-parallel systems that are compared: graphzero's stages, and what PyTorch's users train with instead.

Each trains the same model with AdamW, in float32 or in mixed precision with float32 masters; DDP and FSDP2 are used as
their documentation does it, DeepSpeed on its CPU path.  bench/results/step_time.md says what is set otherwise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from parity import TrainGraph
from torch import Tensor, nn
from torch.optim import AdamW
from workloads import Workload

import graphzero as gz

Step = Callable[..., "Tensor | None"]  # what this rank is given of a batch -> the loss, of its part or of all, if any

BASE = "DDP + compile"  # what others are measured against
ROOMY = "graphzero + memory budget"  # with room for whole accumulators and kept gathers
EARLY = "graphzero + optimizer in backward"
ROUNDED = "graphzero + bfloat16 masters"  # rounded stochastically; only with --precision bfloat16
BUCKET = 25 * 2**20  # bytes
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # DeepSpeed's words
RATE = 1e-4  # small, so that rounding, which compilers change, does not grow within a run


@dataclass(frozen=True)
class System:
    """begin: a workload -> its training step, on every rank.  special: it is measured only where it is named."""

    name: str
    begin: Callable[[Workload], Step]
    needs: str = "torch"
    special: bool = False

    @property
    def missing(self) -> str | None:
        """The reason why it cannot run here, if there is one."""
        return None if find_spec(self.needs) else f"{self.name} is left out: there is no module {self.needs} here"


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=RATE, fused=True)


def build_graph(stage: int, workload: Workload, rounded: bool = False, **settings: Any) -> TrainGraph:
    """rounded: masters are bfloat16.  settings: what ``set_...`` of its configuration are given, by their names."""
    model = workload.model().to(torch.bfloat16 if rounded else torch.float32)
    graph = TrainGraph(model, adamw(model), None, stage)
    graph.config.set_gradient_accumulation_steps(workload.micro_batches)
    if rounded:
        graph.config.enable_amp(stochastic_rounding=True)
    elif workload.precision is not None:
        graph.config.enable_amp(dtype=workload.precision)
    for name, value in settings.items():
        getattr(graph.config, f"set_{name}")(value)
    return graph


def list_graphs(name: str, stages: Iterable[int], special: bool = False, **settings: Any) -> Iterator[System]:
    """A Graph at each of the stages, with these settings."""
    for stage in stages:
        yield System(f"{name}, stage {stage}", partial(build_graph, stage, **settings), special=special)


def build_loop(model: Any, optimizer: Any, micro_batches: int, precision: torch.dtype | None = None) -> Step:
    """The loop that one writes around a model; ranks meet for the last micro-batch's gradients.

    precision: of ``torch.autocast``, None for none.
    """

    def step(*batch: Tensor) -> Tensor:
        device = batch[0].device
        total = torch.zeros((), device=device)
        for i, part in enumerate(zip(*(x.chunk(micro_batches) for x in batch), strict=True)):
            with delay_gradient_sync(model, i < micro_batches - 1):
                with torch.autocast(device.type, precision, enabled=precision is not None):
                    loss: Tensor = model(*part) / micro_batches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def train_wrapped(
    wrap: Callable[[nn.Module], Any], workload: Workload, build_optimizer: Callable[[nn.Module], Any] = adamw,
    casts: bool = True,
) -> Step:  # fmt: skip
    """The loop around what ``wrap`` makes of the model.  casts: mixed precision is autocast's, not what it does."""
    model = workload.model()
    wrapped = wrap(model)
    precision = workload.precision if casts else None
    return build_loop(wrapped, build_optimizer(model), workload.micro_batches, precision)


@contextmanager
def delay_gradient_sync(model: Any, mode: bool) -> Iterator[None]:
    """Whether ranks keep their gradients to themselves, as DDP's and FSDP2's documentation says it."""
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "set_requires_gradient_sync"):
        inner.set_requires_gradient_sync(not mode)
    with inner.no_sync() if mode and hasattr(inner, "no_sync") else nullcontext():
        yield


def wrap_in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def split_adamw(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=AdamW, parameters_as_bucket_view=True, lr=RATE, fused=True
    )


def shard_fully(model: nn.Module, workload: Workload, compiled: bool = False) -> nn.Module:
    """FSDP2 block by block, resharded after forward; each block is compiled by itself before it is split."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=workload.precision)
    shard = partial(fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    blocks: Any = model.blocks
    for i, block in enumerate(blocks):
        blocks[i] = shard(torch.compile(block) if compiled else block)
    return shard(model)


def train_fsdp2(workload: Workload, compiled: bool = False) -> Step:
    return train_wrapped(partial(shard_fully, workload=workload, compiled=compiled), workload, casts=False)


def import_deepspeed() -> Any:
    """The package on its CPU path, without its notes."""
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed


def engine_config(workload: Workload, **zero: Any) -> dict[str, Any]:
    """zero: its ``zero_optimization``."""
    return {
        "train_micro_batch_size_per_gpu": workload.share // workload.micro_batches,
        "gradient_accumulation_steps": workload.micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }


def train_deepspeed(stage: int, workload: Workload) -> Step:
    elements, model = BUCKET // 4, workload.model()
    zero = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if stage == 3:  # gathered weights go after their last use, as they do in FSDP2 and here
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_prefetch_bucket_size": elements}
    config = engine_config(workload, **zero)
    config |= {KINDS[workload.precision]: {"enabled": True}} if workload.precision else {}
    return build_engine_loop(workload, model=model, optimizer=adamw(model), config=config)


def build_engine_loop(workload: Workload, **given: Any) -> Step:
    """The loop around DeepSpeed's engine.  given: to ``deepspeed.initialize``."""
    engine, *_ = import_deepspeed().initialize(dist_init_required=False, **given)
    count = workload.micro_batches

    def step(*batch: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in zip(*(x.chunk(count) for x in batch), strict=True):
            loss: Tensor = engine(*part)
            engine.backward(loss)  # which divides it by their number
            engine.step()
            total += loss.detach() / count
        return total

    return step


DDP = System("DDP", partial(train_wrapped, wrap_in_ddp))
SYSTEMS = [
    *list_graphs("graphzero", range(4)),
    *list_graphs("graphzero + inductor", range(4), executor="inductor"),
    *list_graphs(ROOMY, (2, 3), special=True, memory_budget=2**34),
    *list_graphs(EARLY, (2, 3), special=True, optimizer_in_backward=True),
    *list_graphs(ROUNDED, (0, 2, 3), special=True, rounded=True),
    *list_graphs("graphzero without an arena", (0, 3), special=True, arena=False),
    DDP,
    System(BASE, partial(train_wrapped, lambda model: torch.compile(wrap_in_ddp(model)))),
    System("DDP + ZeroRedundancyOptimizer", partial(train_wrapped, wrap_in_ddp, build_optimizer=split_adamw)),
    System("FSDP2", train_fsdp2),
    System("FSDP2 + compile", partial(train_fsdp2, compiled=True)),
    *(System(f"DeepSpeed, stage {stage}", partial(train_deepspeed, stage), "deepspeed") for stage in (1, 2, 3)),
]


# ---- ways of split experts


def train_split_experts(workload: Workload, way: str, room: float) -> TrainGraph:
    graph = build_graph(3, workload)
    graph.config.set_split_experts(way, capacity=room)
    return graph


WAYS = {
    "`weights`": ("weights", 1.25),
    "`tokens`": ("tokens", 1.25),
    "`exchange`, room for 1.25 shares": ("exchange", 1.25),
    "`exchange`, room for 2 shares": ("exchange", 2.0),
}
EXPERTS = [DDP, *(System(name, partial(train_split_experts, way=way, room=room)) for name, (way, room) in WAYS.items())]

# ---- one JSON, read by graphzero and by DeepSpeed itself


def write_document(stage: int, workload: Workload) -> dict[str, Any]:
    """With accumulation, clipping and a schedule.

    ``torch_adam``: DeepSpeed's own kernel needs a compiler, and its formula is the same.
    """
    adam = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_batch_size": workload.share * dist.get_world_size(),
        "gradient_accumulation_steps": workload.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage},
    }


class DocumentGraph(gz.Graph):
    """The step of a document."""

    def __init__(self, stage: int, workload: Workload) -> None:
        super().__init__(config=gz.GraphConfig.from_deepspeed(write_document(stage, workload)))
        self.model = workload.model()
        self.add_optimizer(**self.config.deepspeed.optimizer_arguments(self.model.parameters()))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)
        loss.backward()
        return loss


def train_document(stage: int, workload: Workload) -> Step:
    model, config = workload.model(), write_document(stage, workload)
    return build_engine_loop(workload, model=model, model_parameters=model.parameters(), config=config)


DOCUMENTS = [
    *(System(f"graphzero, stage {stage}", partial(DocumentGraph, stage)) for stage in range(4)),
    *(System(f"DeepSpeed, stage {stage}", partial(train_document, stage), "deepspeed") for stage in range(4)),
]
