"""Profile of a step at each stage of ZeRO: compute, communication by kind, waiting, copies, overhead.

    python bench/step_profile.py            # a GPT of 7.4 M parameters on two gloo ranks of one thread each
    python bench/step_profile.py --model B  # one of 24 M; conv is a convolutional network
    python bench/step_profile.py --precision bfloat16 --micro-batches 4

Rank 0's seconds by ``gz.testing.profile_step``, line by line of the program, means over steps; stages take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch.distributed as dist
from _run import markdown, on_gloo, options_of, save
from systems import graph
from workloads import PLAIN, WORKLOADS, Variant

import graphzero as gz
from graphzero.testing.timer import StepTimes

KINDS = ("compute", "communication", "copies", "overhead")  # in the order of the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="A")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    Variant.add_options(parser)
    parser.add_argument("--save", metavar="FILE", help="also keep the table there, for bench/tables.py")
    options = options_of(parser)
    variant = Variant.from_options(options)
    found = on_gloo(options.ranks, work, options.model, options.rounds, options.steps, variant)
    print(
        f"{variant.apply(WORKLOADS[options.model]).describe(options.ranks)}; milliseconds of a step\n\n{table(found)}"
    )
    if options.save:
        save(options.save, f"{options.model}, {options.ranks} ranks{variant.title}", "profile", table(found))


def table(found: Mapping[str, StepTimes]) -> str:
    kinds = sorted({kind for times in found.values() for kind in times.seconds}, key=_order)
    rows = [
        [f"{what}: {detail}", *(_ms(times.seconds.get((what, detail), 0.0) / times.calls) for times in found.values())]
        for what, detail in kinds
    ]
    rows += [[f"all {what}", *(_ms(times.seconds_for(what)) for times in found.values())] for what in KINDS]
    rows.append(["all", *(_ms(times.total) for times in found.values())])
    return markdown(["", *found], rows)


def _order(kind: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    return KINDS.index(kind[0]), kind


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds else "-"


def work(rank: int, model: str, rounds: int, steps: int, variant: Variant = PLAIN) -> dict[str, StepTimes]:
    """Every rank: profile the stages in turns."""
    workload = variant.apply(WORKLOADS[model])
    batches = [workload.part(step, rank, dist.get_world_size()) for step in range(steps)]
    graphs = {f"stage {stage}": graph(stage, workload) for stage in range(4)}
    found = {name: StepTimes() for name in graphs}
    for turn in range(rounds + 1):
        for name, step in graphs.items():
            dist.barrier()
            step(*batches[0])  # compiles in the first turn, and fills the caches after the other stages
            for batch in batches[1:] if turn else []:
                gz.testing.profile_step(step, *batch, times=found[name])
    return found


if __name__ == "__main__":
    main()
