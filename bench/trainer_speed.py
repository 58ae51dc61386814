"""The Trainer of examples/trainer.py beside transformers' own, which is DDP: losses, step time, resident memory.

    python bench/trainer_speed.py                        # stages 0 to 3 on two gloo ranks of one thread
    python bench/trainer_speed.py --rounds 2 --steps 4   # only shows that all of it runs

Each run is a Trainer in fresh processes; rounds alternate.  A step is timed from the Trainer's ``on_step_begin`` to
``on_step_end``, on rank 0; the first steps, which compile, do not count.  A ratio is that of medians in one round;
shown is its median over rounds, with its quartiles.  Memory is the high-water mark of rank 0 over the later steps,
beyond what the process held before the model was made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from _run import markdown, on_gloo, options_of
from peak_memory import MALLOC, high_water, mb, reset
from step_time import ms

FIRST = 3  # steps that do not count
SYSTEMS = ("transformers", *(f"graphzero, stage {stage}" for stage in range(4)))


@dataclass(frozen=True)
class Run:
    """Figures of one run: the loss of each step, seconds of later steps, bytes."""

    losses: list[float]
    seconds: list[float]
    memory: int


def train(rank: int, system: str, steps: int, width: int, context: int) -> Run:
    import trainer
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Notes when steps begin and end."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)
            if len(self.seconds) == FIRST:
                reset()

    clock, before = Clock(), reset()
    more: dict[str, Any] = {"train_dataset": trainer.windows(16 * steps, context), "callbacks": [clock]}
    if system != SYSTEMS[0]:
        stage = int(system[-1])
        more["configure"] = lambda config: config.enable_zero(stage > 0, stage=stage or 1)
    # Unless told otherwise, the Trainer has DDP look for unused parameters in every step.
    arguments = {"max_steps": steps, "ddp_find_unused_parameters": False}
    kind = trainer.Trainer if system == SYSTEMS[0] else trainer.GraphTrainer
    with tempfile.TemporaryDirectory() as folder:
        one = kind(trainer.make_model(context, width), trainer.arguments(folder, **arguments), **more)
        one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    return Run(losses, clock.seconds[FIRST:], high_water() - before)


def table(runs: dict[str, list[Run]]) -> str:
    base = runs[SYSTEMS[0]]
    rows = []
    for name, own in runs.items():
        pairs = zip(own, base, strict=True)
        ratios = [statistics.median(one.seconds) / statistics.median(other.seconds) for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        apart = max(abs(a - b) for one in own for a, b in zip(one.losses, base[0].losses, strict=True))
        median = statistics.median(statistics.median(one.seconds) for one in own)
        memory = statistics.median(one.memory for one in own)
        rows.append([name, ms(median), f"{middle:.2f} ({low:.2f} to {high:.2f})", mb(int(memory)), f"{apart:.0e}"])
    return markdown(["", "step, ms", "ratio (quartiles)", "resident, MB", "losses apart"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    options = options_of(parser)
    os.environ.update(MALLOC, TRANSFORMERS_VERBOSITY="error")
    runs: dict[str, list[Run]] = defaultdict(list)
    for i in range(options.rounds):
        for system in options.systems[i % len(options.systems) :] + options.systems[: i % len(options.systems)]:
            runs[system].append(on_gloo(options.ranks, train, system, options.steps, options.width, options.context))
    print(table({system: runs[system] for system in options.systems}))


if __name__ == "__main__":
    main()
