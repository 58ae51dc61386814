"""A pipeline schedule: one row of actions for each pp rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        that of its first computation.  ``check_schedule`` says whether the rest agrees with it.
        """
        parsed = tuple(
            tuple(_parse_cell(cell, row, column) for column, cell in enumerate(cells)) for row, cells in enumerate(rows)
        )
        first_ranks: dict[int, int] = {}
        last_micro_batch = -1
        for row, cells in enumerate(parsed):
            for cell in cells:
                for action in cell.computations if cell else ():
                    first_ranks.setdefault(action.stage, row)
                    last_micro_batch = max(last_micro_batch, action.micro_batch or 0)
        stages = max(first_ranks, default=-1) + 1 if stages is None else stages
        if not first_ranks or not stages:
            raise ScheduleError("the rows run nothing: expected the forward and backward actions of every stage")
        absent = next((stage for stage in range(stages) if stage not in first_ranks), None)
        if absent is not None:
            raise ScheduleError(f"no row runs stage {absent}, of {stages} stages: expected its actions in one row")
        micro_batches = last_micro_batch + 1 if micro_batches is None else micro_batches
        return cls(parsed, tuple(first_ranks[stage] for stage in range(stages)), micro_batches, name)

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.stage_ranks)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a pp rank, ascending."""
        return tuple(stage for stage, of in enumerate(self.stage_ranks) if of == rank)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """A pp rank's row, without idle cells."""
        return tuple(cell for cell in self.rows[rank] if cell)

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


def loop_stage_ranks(ranks: int, stages: int) -> tuple[int, ...]:
    """Of each stage its rank, in a loop: stages 0, 4, 8 are on rank 0 of 4."""
    return tuple(stage % ranks for stage in range(stages))


def v_stage_ranks(ranks: int, stages: int) -> tuple[int, ...]:
    """Of each stage its rank, up and down: stages 0 and 7 are on rank 0 of 4."""
    order: Sequence[int] = [*range(ranks), *reversed(range(ranks))]
    return tuple(order[stage % (2 * ranks)] for stage in range(stages))


def _parse_cell(cell: Action | str | None, row: int, column: int) -> Action | None:
    if not isinstance(cell, str):
        return cell
    try:
        return parse_action(cell) if cell.strip(" \t") else None
    except ScheduleError as error:
        raise ScheduleError(f"row {row}, column {column}: {error}", row, column) from None
