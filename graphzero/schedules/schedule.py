"""A pipeline schedule: one row of actions for each pp rank, and for how many micro-batches these keep values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphzero.errors import ScheduleError
from graphzero.schedules.action import Action, ActionKind, parse_action

Row = tuple[Action | None, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which each pp rank runs the actions of its stages.

    rows: by pp rank.  A cell of None is idle: it takes a column, and nothing else.
    stage_ranks: of each stage, the pp rank that it is on.
    has_backward: False for evaluation, whose rows are the forward actions alone.
    """

    rows: tuple[Row, ...]
    stage_ranks: tuple[int, ...]
    micro_batches: int
    name: str = "rows"
    has_backward: bool = True

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Iterable[Action | str | None]],
        micro_batches: int | None = None,
        stages: int | None = None,
        name: str = "rows",
    ) -> PipelineSchedule:
        """The schedule of rows that a user gives, in Actions or in their text; "" is an idle cell.

        What is not given is read from the rows: the highest stage and micro-batch, and the rank of each stage, which is
        the one with most of its actions.  ``check_schedule`` says whether the rest agrees with it.  Rows of forward
        actions alone are those of evaluation.
        """
        parsed = tuple(
            tuple(_parse_cell(cell, row, column) for column, cell in enumerate(cells)) for row, cells in enumerate(rows)
        )
        computations = [
            (row, action) for row, cells in enumerate(parsed) for cell in cells if cell for action in cell.computations
        ]
        rows_of: dict[int, Counter[int]] = defaultdict(Counter)
        for row, action in computations:
            rows_of[action.stage][row] += 1
        if stages is None:
            stages = max(rows_of, default=0) + 1
        if micro_batches is None:
            micro_batches = max((action.micro_batch or 0 for _, action in computations), default=0) + 1
        absent = next((stage for stage in range(stages) if stage not in rows_of), None)
        if absent is not None:
            raise ScheduleError(f"no row runs stage {absent}, of {stages} stages: expected its actions in one row")
        stage_ranks = tuple(rows_of[stage].most_common(1)[0][0] for stage in range(stages))
        has_backward = any(action.kind is not ActionKind.FORWARD for _, action in computations)
        return cls(parsed, stage_ranks, micro_batches, name, has_backward)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a pp rank, ascending."""
        return tuple(stage for stage, of in enumerate(self.stage_ranks) if of == rank)

    def cells(self) -> Iterator[tuple[int, int, Action]]:
        """(row, column, action) of each cell that is not idle, row by row."""
        for row, cells in enumerate(self.rows):
            for column, cell in enumerate(cells):
                if cell:
                    yield row, column, cell

    def crosses_ranks(self, stage: int) -> bool:
        """Whether what ``stage`` hands to ``stage + 1``, and gets back, is sent from rank to rank."""
        return stage + 1 < self.stages and self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def forward_only(self) -> PipelineSchedule:
        """The rows of evaluation: this schedule's forward actions, in its order."""
        rows = tuple(
            tuple(part for cell in cells if cell for part in cell.computations if part.kind is ActionKind.FORWARD)
            for cells in self.rows
        )
        return replace(self, rows=rows, has_backward=False)


def count_in_flight(schedule: PipelineSchedule, rank: int) -> tuple[dict[int, int], ...]:
    """While each cell of a rank runs: by stage, the micro-batches whose forward values are kept.

    They are kept from F to the end of B, or of W.  Nothing is kept for evaluation, beyond the action itself.
    """
    in_flight = dict.fromkeys(schedule.stages_on(rank), 0)
    counts = []
    for cell in schedule.rows[rank]:
        actions = cell.computations if cell else ()
        for action in actions:
            in_flight[action.stage] += action.kind is ActionKind.FORWARD
        counts.append(dict(in_flight))
        for action in actions:
            is_end = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) or not schedule.has_backward
            in_flight[action.stage] -= is_end
    return tuple(counts)


def most_in_flight(schedule: PipelineSchedule) -> tuple[float, ...]:
    """Of each rank, the most micro-batches at a time; one that only some of a rank's stages keep counts in part."""
    return tuple(
        max((sum(counts.values()) / len(counts) for counts in count_in_flight(schedule, rank)), default=0.0)
        for rank in range(schedule.ranks)
    )


def _parse_cell(cell: object, row: int, column: int) -> Action | None:
    """The action that has the text of ``cell``, which may also be an action of torch."""
    text = "" if cell is None else str(cell)
    try:
        return parse_action(text) if text.strip(" \t") else None
    except ScheduleError as error:
        raise ScheduleError(f"row {row}, column {column}: {error}", row, column) from None
