"""A memory budget, limits for a search, and the error where no program fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphzero.errors import ConfigError
from graphzero.passes import Options
from graphzero.plan.memory.memory_estimate import EstimatedMemory
from graphzero.plan.plan import mega
from graphzero.plan.variants import Candidate

ANY = 1 << 60  # bytes, where there is no limit


@dataclass(frozen=True)
class Budget:
    """Bytes that the plan of a step may peak at on one rank.  origin: in words, if they are not what the user said."""

    nbytes: int
    origin: str = ""

    def __str__(self) -> str:
        return f"{mega(self.nbytes)} per rank{self.origin}"


@dataclass(frozen=True)
class Limits:
    """Bytes: of all that is held up to the end of backward, and of what forward leaves for it."""

    total: int = ANY
    activations: int = ANY

    @property
    def least(self) -> int:
        """The smaller one."""
        return min(self.total, self.activations)

    @property
    def none(self) -> Limits:
        """No bytes at all, of what is limited."""
        return self.less(self.total, self.activations)

    def over(self, total: int, activations: int) -> int:
        """The number of bytes above the limits, 0 or less if within them."""
        return max(total - self.total, activations - self.activations)

    def excess(self, memory: EstimatedMemory) -> tuple[int, int]:
        """The number of bytes above the limits, 0 or less if within them, and the sum of those above over time."""
        beyond = memory.total - self.total, memory.activations - self.activations
        return max(int(nbytes.max()) for nbytes in beyond), sum(int(np.maximum(nbytes, 0).sum()) for nbytes in beyond)

    def worst(self, memory: EstimatedMemory) -> tuple[bool, int]:
        """Whether the limit that is missed most is that of all that is held, and the position."""
        is_total = memory.total.max() - self.total >= memory.activations.max() - self.activations
        return is_total, int((memory.total if is_total else memory.activations).argmax())

    def less(self, total: int, activations: int) -> Limits:
        """Return limits that are lower by these bytes."""
        pairs = (self.total, total), (self.activations, activations)
        return Limits(*(limit if limit == ANY else limit - nbytes for limit, nbytes in pairs))

    def is_within(self, other: Limits) -> bool:
        """Whether these are nowhere above ``other``."""
        return self.total <= other.total and self.activations <= other.activations

    def halfway(self, other: Limits) -> Limits:
        """Return the limits halfway to ``other``."""
        return Limits((self.total + other.total) // 2, (self.activations + other.activations) // 2)


def does_not_fit(budget: Budget, tried: Sequence[Candidate], options: Options) -> ConfigError:
    """The error for a budget that none of these programs fits."""
    least = min(tried, key=lambda one: one.peak).plan
    at_peak = sorted(least.memory.at_peak.items(), key=lambda item: -item[1])
    at_peak_text = ", ".join(f"{name} {mega(nbytes)}" for name, nbytes in at_peak if nbytes)
    others = "".join(f", stage {one.plan.stage} at {one.peak:,}" for one in tried if one.plan is not least)
    if least.recomputed:
        at_peak_text += f"; {len(least.recomputed)} values of forward are computed again in backward"
    advice = ["leave keep_gathered out, and the budget decides what stays gathered"] if least.kept else []
    heavy = [name for name, nbytes in at_peak if nbytes * 8 > least.memory.peak]
    if "gradients" in heavy and not options.optimizer_in_backward and not options.pipeline_stages:
        advice.append("config.set_optimizer_in_backward()")
    advice += dict.fromkeys(_advice(name, least.stage) for name in heavy)
    return ConfigError(
        f"the memory budget is {budget.nbytes:,} bytes per rank{budget.origin}, and the plan of {least.name} on "
        f"{least.placement} at stage {least.stage} peaks at {least.memory.peak:,} bytes{others}\n"
        f"  its peak is at {least.memory.peak_at}: {at_peak_text}\n"
        f"  What it needs is config.set_memory_budget({least.memory.peak}); to need less: {'; '.join(advice)}"
    )


def _advice(category: str, stage: int) -> str:
    """Name the setting that lowers a category of the peak."""
    if category in ("activations", "temporaries"):
        return "more micro-batches (config.set_gradient_accumulation_steps(n)), or fewer samples per rank"
    if category == "communication":
        return "a smaller config.bucket_bytes"
    return f"{f'a higher ZeRO stage than {stage}, or ' if stage < 3 else ''}more ranks"
