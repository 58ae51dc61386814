"""Schedules as CSV, in the grammar of torch.distributed.pipelining: a line a pp rank, a cell an action."""

from __future__ import annotations

from graphzero.schedules.schedule import PipelineSchedule

BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # with which spreadsheets begin a file


def parse_csv(text: str, micro_batches: int | None = None, stages: int | None = None, name: str = "rows"
) -> PipelineSchedule:  # fmt: skip
    """The schedule that ``text`` describes; empty cells are idle.

    Raises ScheduleError with row, column and cell for a cell that is not an action in full.  Rows and columns count
    from 0, a row being a pp rank.  Whether the schedule is legal says ``check_schedule``.
    """
    lines = text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").removesuffix("\n").split("\n")
    return PipelineSchedule.from_rows([line.split(",") for line in lines], micro_batches, stages, name)
