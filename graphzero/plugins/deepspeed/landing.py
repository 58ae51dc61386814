"""Mapping of the values of DeepSpeed's JSON to the settings of a Graph."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from graphzero.config import GraphConfig
from graphzero.errors import ConfigError
from graphzero.passes.schedule.bucket import LARGEST
from graphzero.plugins.deepspeed.document import Document
from graphzero.plugins.deepspeed.ported import Batch, DeepSpeed, batch_of, ported
from graphzero.sbp.placement import Placement

DTYPES = {
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip
NEVER = 2**31 - 1  # the most that a count of steps holds


def land(document: Document, placement: Placement, config: GraphConfig) -> DeepSpeed:
    """Apply the settings of a JSON; returns what is not a setting.  Raises ConfigError for values without a meaning."""
    batch = batch_of(document, placement)
    rest = ported(document, batch)
    config.set_gradient_accumulation_steps(batch.steps)
    _zero(document, batch, config)
    _offload(document, config)
    precision = _precision(document)
    if precision:
        config.enable_amp(**precision)
    _buckets(document, precision, config)
    return rest


def _zero(document: Document, batch: Batch, config: GraphConfig) -> None:
    path = "zero_optimization.stage"
    stage = document.count(path, 0)
    if stage > 3:
        raise document.wrong(path, "the stages are 0, 1, 2 and 3")
    threshold = document.count("zero_optimization.stage3_param_persistence_threshold", 0)
    if stage:
        config.enable_zero(stage=stage, shard_min_size=threshold // batch.ranks + 1 if stage == 3 else 1)


def _offload(document: Document, config: GraphConfig) -> None:
    """Optimizer states in host memory, or in files on an NVMe disk."""
    path = "zero_optimization.offload_optimizer"
    section = document.section(path)
    device, folder = section.get("device") or "none", section.get("nvme_path")
    if document.flag("zero_optimization.cpu_offload") and device == "none":
        device = "cpu"
    if device not in ("none", "cpu", "nvme"):
        raise document.wrong(path, 'its device is "none", "cpu" or "nvme"')
    if device == "nvme" and not (isinstance(folder, str) and folder):
        raise document.wrong(path, 'device "nvme" needs nvme_path, the folder in which states are to be')
    if device != "none":
        config.enable_offload(path=folder if device == "nvme" else None)


def _precision(document: Document) -> dict[str, Any]:
    """The arguments of ``enable_amp``; none for full precision."""
    switches = [name for name in ("fp16", "bf16", "torch_autocast") if document.flag(f"{name}.enabled")]
    if len(switches) > 1:
        raise ConfigError(f"{document.name}: {' and '.join(switches)} are both enabled; a step has one 16-bit dtype")
    reduced = _dtype(document, "communication_data_type")
    if not switches:
        if reduced not in (None, torch.float32):
            raise document.wrong(
                "communication_data_type", "without fp16 or bf16 gradients are reduced in float32; write fp32"
            )
        return {}
    if switches == ["fp16"]:
        return {"dtype": torch.float16, "reduce_dtype": reduced, **_scaling(document)}
    if switches == ["bf16"]:
        return {"dtype": torch.bfloat16, "reduce_dtype": reduced}
    dtype = _dtype(document, "torch_autocast.dtype")
    if dtype in (None, torch.float32):
        raise document.wrong("torch_autocast.dtype", "write bfloat16 or float16")
    return {"dtype": dtype, "reduce_dtype": reduced}


def _scaling(document: Document) -> dict[str, Any]:
    """The loss scale, with DeepSpeed's defaults."""
    static = float(document.number("fp16.loss_scale", 0))
    if static:
        return {"init_scale": static, "min_scale": static, "growth_interval": NEVER}
    return {
        "init_scale": 2.0 ** document.count("fp16.initial_scale_power", 16),
        "growth_interval": document.count("fp16.loss_scale_window", 1000, least=1),
        "hysteresis": document.count("fp16.hysteresis", 2, least=1),
        "consecutive_hysteresis": document.flag("fp16.consecutive_hysteresis"),
        "min_scale": float(document.number("fp16.min_loss_scale", 1)),
    }


def _buckets(document: Document, amp: dict[str, Any], config: GraphConfig) -> None:
    """Set ``bucket_bytes`` where its own default would be above the limit.

    Limits are some 1e9 bytes in most files.  Buckets of that size would gather a whole model at once at stage 3.
    """
    names = ("reduce_bucket_size", "allgather_bucket_size")
    limits = [document.count(f"zero_optimization.{name}", least=1) for name in names]
    dtype = (amp.get("reduce_dtype") or amp["dtype"]) if amp else torch.float32
    nbytes = min((limit for limit in limits if limit is not None), default=LARGEST) * dtype.itemsize
    if nbytes < LARGEST:
        config.bucket_bytes = nbytes


def _dtype(document: Document, path: str) -> torch.dtype | None:
    name = document.value(path)
    if name is not None and str(name).removeprefix("torch.").lower() not in DTYPES:
        raise document.wrong(path, "write fp16, bf16 or fp32")
    return None if name is None else DTYPES[str(name).removeprefix("torch.").lower()]


def read_deepspeed(config: GraphConfig, given: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeed:
    """The configuration that DeepSpeed's JSON says, for ``gz.Graph(config=...)``.

    given: the path of the JSON, or its dict.  placement: as for a Graph; by default all ranks of the world.

    Settings of the result are those of the other methods here, and may be changed by them.  Batch sizes, optimizer,
    schedule and clipping are not settings; they are in ``deepspeed``.  One warning names the keys whose work something
    else does.  docs/from_deepspeed.md says what becomes of each key.

    Raises ConfigError for batch sizes that contradict each other or the ranks, for keys that DeepSpeed does not
    know, for "auto" where it cannot be computed, and for keys without which results would be others.
    """
    document = Document(given)
    deepspeed = land(document, config.placement, config)
    if document.replaced:
        lines = "\n  ".join(document.replaced)
        warnings.warn(f"{document.name}: these keys are replaced here\n  {lines}", stacklevel=3)
    return deepspeed
