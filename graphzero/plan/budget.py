"""A memory budget, and what is said where no program fits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphzero.errors import ConfigError
from graphzero.passes import Options
from graphzero.plan.plan import mega
from graphzero.plan.variants import Candidate


@dataclass(frozen=True)
class Budget:
    """Bytes that the plan of a step may peak at on one rank.  origin: in words, if they are not what the user said."""

    nbytes: int
    origin: str = ""

    def __str__(self) -> str:
        return f"{mega(self.nbytes)} per rank{self.origin}"


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
    if "gradients" in heavy and not options.optimizer_in_backward:
        advice.append("config.set_optimizer_in_backward()")
    advice += dict.fromkeys(_advice(name, least.stage) for name in heavy)
    return ConfigError(
        f"the memory budget is {budget.nbytes:,} bytes per rank{budget.origin}, and the plan of {least.name} on "
        f"{least.placement} at stage {least.stage} peaks at {least.memory.peak:,} bytes{others}\n"
        f"  its peak is at {least.memory.peak_at}: {at_peak_text}\n"
        f"  What it needs is config.set_memory_budget({least.memory.peak}); to need less: {'; '.join(advice)}"
    )


def _advice(category: str, stage: int) -> str:
    """What lowers a category of the peak."""
    if category in ("activations", "temporaries"):
        return "more micro-batches (config.set_gradient_accumulation_steps(n)), or fewer samples per rank"
    if category == "communication":
        return "a smaller config.bucket_bytes"
    return f"{f'a higher ZeRO stage than {stage}, or ' if stage < 3 else ''}more ranks"
