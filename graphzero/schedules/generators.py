"""Generators of the usual schedules.

All but ZB-V are one form: each rank runs some forward actions to warm up, then a forward and a backward action in turn,
then the backward actions that are left.  They differ in the length of the warm-up, in the order of the stages of one
rank, and in whether backward is split, with its weight part some actions later.

==============================  =======================================================================================
gpipe                           GPipe (Huang et al., 2018): all forward actions, then all backward actions
1f1b                            PipeDream-Flush (Memory-Efficient Pipeline-Parallel DNN Training, Narayanan et al.,
                                2020): no more micro-batches in flight than there are stages from a rank to the end
interleaved                     Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM
                                (Narayanan et al., 2021): several stages a rank, micro-batches in groups
looped_bfs                      Breadth-First Pipeline Parallelism (Lamy-Poirier, 2022): gpipe with several stages a
                                rank.  Backward takes micro-batches ascending, so that sums of gradients keep their
                                order; torch's LoopedBFS descends
zb1p, interleaved_zero_bubble   ZB-H1 of Zero Bubble Pipeline Parallelism (Qi et al., 2023): 1f1b whose weight gradients
                                fill the bubble; with several stages a rank, on the interleaved order
zbv                             ZB-V, of the same paper: two stages a rank in the form of a V, with the memory of 1f1b
==============================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from graphzero.errors import ScheduleError
from graphzero.schedules.action import Action, ActionKind
from graphzero.schedules.schedule import PipelineSchedule
from graphzero.schedules.values import INPUT, WEIGHT, B, F

Pair = tuple[int, int]  # stage, micro-batch
Generator = Callable[[int, int, int], PipelineSchedule]  # of ranks, micro-batches, stages a rank


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """All forward actions, then all backward actions, one stage a rank."""
    _require_stages(1, stages_per_rank, "gpipe", "looped_bfs")
    return replace(looped_bfs(ranks, micro_batches, 1), name="gpipe")


def one_forward_one_backward(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """1F1B: a rank begins backward as soon as it can, and each forward action waits for a backward one."""
    _require_stages(1, stages_per_rank, "1f1b", "interleaved")
    pairs = [_list_pairs([rank], micro_batches, micro_batches) for rank in range(ranks)]
    rows = [_alternate(pairs[rank], pairs[rank], warmup=ranks - rank - 1) for rank in range(ranks)]
    return _build_loop(rows, ranks, micro_batches, 1, "1f1b")


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """1F1B over several stages a rank: the bubble is divided by their number, messages are multiplied by it."""
    rows = _interleave(ranks, micro_batches, stages_per_rank, ahead=2, is_split=False)
    return _build_loop(rows, ranks, micro_batches, stages_per_rank, "interleaved")


def looped_bfs(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """All forward actions, stage by stage, then all backward actions, from the last stage to the first."""
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forward = _list_pairs(stages, micro_batches, micro_batches)
        backward = _list_pairs(stages[::-1], micro_batches, micro_batches)
        rows.append(_alternate(forward, backward, warmup=len(forward)))
    return _build_loop(rows, ranks, micro_batches, stages_per_rank, "looped_bfs")


def zb1p(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """ZB-H1: 1F1B whose weight gradients come later on later ranks, with one stage a rank."""
    _require_stages(1, stages_per_rank, "zb1p", "interleaved_zero_bubble")
    return replace(interleaved_zero_bubble(ranks, micro_batches, 1), name="zb1p")


def interleaved_zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """ZB-H1 on the interleaved order: ``rank`` weight gradients wait on each rank, which evens out memory."""
    rows = _interleave(ranks, micro_batches, stages_per_rank, ahead=1, is_split=True)
    return _build_loop(rows, ranks, micro_batches, stages_per_rank, "interleaved_zero_bubble")


def zbv(ranks: int, micro_batches: int, stages_per_rank: int) -> PipelineSchedule:
    """ZB-V: of the two stages of a rank one is on the way down, ``rank``, one on the way up.

    It is written for two micro-batches a rank or more; of fewer, those that do not exist are left out.
    """
    _require_stages(2, stages_per_rank, "zbv", "interleaved_zero_bubble")
    rows = [
        _drop_absent(_build_v_row(rank, ranks, max(micro_batches, 2 * ranks)), micro_batches) for rank in range(ranks)
    ]
    stage_ranks = (*range(ranks), *reversed(range(ranks)))
    return PipelineSchedule(tuple(map(tuple, rows)), stage_ranks, micro_batches, "zbv")


GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb1p": zb1p,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zbv": zbv,
}
STAGES_PER_RANK = {"interleaved": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2, "zbv": 2}  # 1 of all others


def generate_schedule(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> PipelineSchedule:
    """The schedule of a name.  Raises ScheduleError for an unknown one, and for stages that it cannot have."""
    if name not in GENERATORS:
        raise ScheduleError(f"no schedule is called {name!r}: expected one of {', '.join(GENERATORS)}")
    stages_per_rank = STAGES_PER_RANK.get(name, 1) if stages_per_rank is None else stages_per_rank
    for count, what in ((ranks, "ranks"), (micro_batches, "micro-batches"), (stages_per_rank, "stages a rank")):
        if count < 1:
            raise ScheduleError(f"a schedule of {count} {what}: expected 1 or more")
    return GENERATORS[name](ranks, micro_batches, stages_per_rank)


def _require_stages(expected: int, stages_per_rank: int, name: str, other: str) -> None:
    if stages_per_rank != expected:
        raise ScheduleError(
            f"{name} has {expected} stage{'s' * (expected > 1)} a rank, not {stages_per_rank}: {other} takes any number"
        )


def _build_loop(
    rows: Iterable[Iterable[Action]], ranks: int, micro_batches: int, stages_per_rank: int, name: str
) -> PipelineSchedule:
    stage_ranks = tuple(range(ranks)) * stages_per_rank
    return PipelineSchedule(tuple(map(tuple, rows)), stage_ranks, micro_batches, name)


def _list_pairs(stages: Iterable[int], micro_batches: int, group: int) -> list[Pair]:
    """Each stage with each micro-batch: group by group, in a group stage by stage."""
    order = list(stages)
    return [
        (stage, micro_batch)
        for first in range(0, micro_batches, group)
        for stage in order
        for micro_batch in range(first, min(first + group, micro_batches))
    ]


def _interleave(
    ranks: int, micro_batches: int, stages_per_rank: int, ahead: int, is_split: bool
) -> Iterator[list[Action]]:
    """Rows that take micro-batches in groups: one stage of a rank runs all of a group, then the next one does.

    ahead: by how many forward actions the warm-up of a rank is longer than that of the next.
    A group has as many micro-batches as there are ranks, or up to twice as many where that leaves less of the last
    group empty.  Rows are written for full groups: in one that is not, ranks get out of step with each other, which
    can deadlock.
    """
    group = min(range(ranks, 2 * ranks), key=lambda size: (-micro_batches % size, size))
    of_full_groups = micro_batches + -micro_batches % group
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        row = _alternate(
            _list_pairs(stages, of_full_groups, group),
            _list_pairs(stages[::-1], of_full_groups, group),
            warmup=(stages_per_rank - 1) * group + ahead * (ranks - rank - 1),
            weights_after=rank if is_split else None,
        )
        yield _drop_absent(row, micro_batches)


def _drop_absent(row: Iterable[Action], micro_batches: int) -> list[Action]:
    """``row`` without the micro-batches that do not exist.  None waits for another, so the rest stays legal."""
    return [action for action in row if (action.micro_batch or 0) < micro_batches]


def _alternate(
    forward: list[Pair], backward: list[Pair], warmup: int, weights_after: int | None = None
) -> Iterator[Action]:
    """``warmup`` forward actions, then one of each, then the backward ones that are left.

    weights_behind: how many weight gradients wait at most; None: backward is not split.
    """
    warmup = min(warmup, len(forward))
    yield from (Action(stage, F, micro_batch) for stage, micro_batch in forward[:warmup])
    for at, (stage, micro_batch) in enumerate(backward):
        if warmup + at < len(forward):
            yield Action(forward[warmup + at][0], F, forward[warmup + at][1])
        if weights_after is None:
            yield Action(stage, B, micro_batch)
            continue
        yield Action(stage, INPUT, micro_batch)
        if at >= weights_after:
            yield Action(backward[at - weights_after][0], WEIGHT, backward[at - weights_after][1])
    for stage, micro_batch in backward[max(0, len(backward) - (weights_after or 0)) :]:
        yield Action(stage, WEIGHT, micro_batch)


def _build_v_row(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    """A row of ZB-V; the stages are called down and up, by their side of the V."""
    down, up = rank, 2 * ranks - 1 - rank
    next_micro_batch = dict.fromkeys([(stage, kind) for stage in (down, up) for kind in (F, INPUT, WEIGHT)], 0)

    def take(stage: int, *kinds: ActionKind) -> Iterator[Action]:
        for kind in kinds:
            if next_micro_batch[stage, kind] < micro_batches:
                yield Action(stage, kind, next_micro_batch[stage, kind])
                next_micro_batch[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from take(down, F)
    for _ in range(rank):
        yield from take(up, F)
        yield from take(down, F)
    for _ in range(ranks - rank):
        yield from take(up, F, INPUT, WEIGHT)
    while next_micro_batch[up, F] < micro_batches:
        yield from take(down, F, INPUT, WEIGHT)
        yield from take(up, F, INPUT, WEIGHT)
    for _ in range(rank):
        yield from take(down, INPUT)
        yield from take(up, INPUT)
    for _ in range(ranks - rank):
        yield from take(down, INPUT, WEIGHT)
    for stage in (up, down):
        yield from take(stage, *[WEIGHT] * micro_batches)
