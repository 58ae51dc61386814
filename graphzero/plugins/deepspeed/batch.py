"""The arithmetic of a batch: all of it = micro-batch of a rank * micro-batches * data ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphzero.errors import ConfigError
from graphzero.plugins.deepspeed.document import Document
from graphzero.sbp.placement import Placement

ALL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of a step on all ranks, of a micro-batch on one rank, micro-batches of a step, and data ranks."""

    all: int
    micro: int
    steps: int
    ranks: int


def batch_of(document: Document, placement: Placement) -> Batch:
    """Batch sizes of the JSON, and those that follow. Raises ConfigError for numbers that contradict each other."""
    whole, micro, steps = (document.count(name, least=1) for name in (ALL, MICRO, STEPS))
    ranks = math.prod(placement.hierarchy[placement.axis(name)] for name in placement.data_axes)
    if whole is None and micro is None:
        raise ConfigError(
            f"{document.name}: give {ALL} or {MICRO}; the Hugging Face Trainer fills in the second from "
            "TrainingArguments.per_device_train_batch_size"
        )
    if whole is None:
        steps = steps or 1
        whole = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = whole // (steps * ranks)
    elif steps is None:
        steps = whole // (micro * ranks)
    if whole != micro * steps * ranks or 0 in (micro, steps):
        raise ConfigError(_contradiction(document, whole, ranks))
    return Batch(whole, micro, steps, ranks)


def _contradiction(document: Document, whole: int, ranks: int) -> str:
    micro, steps = document.count(MICRO), document.count(STEPS)
    given = [f"{name} {value}" for name, value in ((MICRO, micro), (STEPS, steps)) if value is not None]
    said = " * ".join([*given, f"{ranks} data ranks"])
    product = (micro or 1) * (steps or 1) * ranks
    if micro is not None and steps is not None:
        return (
            f"{document.name}: {ALL} {whole} is not {said} = {product}; change one of them, or take one out, which is "
            "then computed"
        )
    return f"{document.name}: {ALL} {whole} does not divide by {said} = {product}; change one of them, or the ranks"
