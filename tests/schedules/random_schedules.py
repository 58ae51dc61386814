"""Legal schedules at random, and a judge of legality that shares no code with graphzero."""

from __future__ import annotations

import random
from graphlib import CycleError, TopologicalSorter

from graphzero.schedules import Action, ActionKind, PipelineSchedule

Rows = list[list[Action]]
F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def dependencies_of(actions: list[Action]) -> dict[Action, list[Action]]:
    """What each action waits for: the definition of a pipeline, over the actions that there are."""
    last_stage = max(action.stage for action in actions)
    present = set(actions)
    needed: dict[Action, list[Action]] = {}
    for action in actions:
        stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
        before = {
            F: [(stage - 1, F)] if stage else [],
            B: [(stage, F)] + ([(stage + 1, B), (stage + 1, INPUT)] if stage < last_stage else []),
            INPUT: [(stage, F)] + ([(stage + 1, B), (stage + 1, INPUT)] if stage < last_stage else []),
            WEIGHT: [(stage, INPUT)],
        }[kind]
        needed[action] = [one for one in (Action(*pair, micro_batch) for pair in before) if one in present]
    return needed


def is_legal(rows: Rows) -> bool:
    """By brute force: the rows and the dependencies have a common order, forward and weight gradients ascend."""
    needed = dependencies_of([action for row in rows for action in row])
    for row in rows:
        for first, second in zip(row, row[1:], strict=False):
            needed[second].append(first)
        sums: dict[tuple[int, bool], list[int | None]] = {}
        for action in row:
            if action.kind in (F, B, WEIGHT):
                sums.setdefault((action.stage, action.kind is F), []).append(action.micro_batch)
        if any(order != sorted(order, key=_micro_batch) for order in sums.values()):
            return False
    try:
        TopologicalSorter(needed).prepare()
    except CycleError:
        return False
    return True


def _micro_batch(micro_batch: int | None) -> int:
    assert micro_batch is not None
    return micro_batch


def random_rows(generator: random.Random) -> tuple[Rows, int, int]:
    """(rows, stages, micro-batches): stages on ranks at random, a random order that all ranks can run."""
    ranks = generator.randint(1, 4)
    stages = generator.randint(ranks, 2 * ranks)
    micro_batches = generator.randint(1, 5)
    rank_of = [*range(ranks), *(generator.randrange(ranks) for _ in range(stages - ranks))]
    generator.shuffle(rank_of)
    actions = []
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            backward = generator.choice([[B], [INPUT, WEIGHT]])
            actions += [Action(stage, kind, micro_batch) for kind in (F, *backward)]
    needed = dependencies_of(actions)
    for action in actions:
        if action.kind in (B, WEIGHT) and action.micro_batch:  # ascending
            needed[action] += [Action(action.stage, kind, action.micro_batch - 1) for kind in (B, WEIGHT)
                               if Action(action.stage, kind, action.micro_batch - 1) in needed]  # fmt: skip
        if action.kind is F and action.micro_batch:
            needed[action].append(Action(action.stage, F, action.micro_batch - 1))
    rows: Rows = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < len(actions):
        ready = [one for one in actions if one not in done and all(other in done for other in needed[one])]
        action = generator.choice(ready)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return rows, stages, micro_batches


def schedule_of(rows: Rows, stages: int, micro_batches: int) -> PipelineSchedule:
    return PipelineSchedule.from_rows(rows, micro_batches, stages)


def format_csv(schedule: PipelineSchedule) -> str:
    """The text that ``parse_csv`` reads as ``schedule``."""
    return "".join(",".join(str(cell) if cell else "" for cell in row) + "\n" for row in schedule.rows)
