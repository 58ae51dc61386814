"""The schedule that a user means: a name, rows, or a CSV file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from graphzero.errors import ScheduleError
from graphzero.schedules.action import Action
from graphzero.schedules.check import check_schedule
from graphzero.schedules.generators import GENERATORS, STAGES_PER_RANK, generate_schedule
from graphzero.schedules.schedule import PipelineSchedule

Rows = Iterable[Iterable[Action | str | None]]
BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"  # with which spreadsheets begin a file


def resolve_schedule(
    given: str | Rows | PipelineSchedule, ranks: int, micro_batches: int, stages: int
) -> PipelineSchedule:
    """The schedule ``given``, proved to be legal for these ranks, micro-batches and stages.

    given: a name of GENERATORS, a path that ends in .csv, rows of actions, or a schedule.
    Raises ScheduleError for what is not legal, or is for another number of ranks, micro-batches or stages.
    """
    if isinstance(given, PipelineSchedule):
        schedule = given
    elif not isinstance(given, str):
        schedule = PipelineSchedule.from_rows(given, micro_batches, stages)
    elif given.endswith(".csv"):
        text = _read_text(given)
        try:
            return _checked(parse_csv(text, micro_batches, stages, name=given), ranks, micro_batches, stages)
        except ScheduleError as error:
            raise ScheduleError(f"{given}: {error}", error.row, error.column) from None
    elif given in GENERATORS and stages % ranks:
        raise ScheduleError(
            f"{given} has as many stages on each rank, but {stages} stages are not a multiple of {ranks}"
        )
    else:
        schedule = generate_schedule(given, ranks, micro_batches, stages // ranks)
    return _checked(schedule, ranks, micro_batches, stages)


def count_stages(given: str | PipelineSchedule, ranks: int) -> int:
    """Count the stages of the schedule ``given``; of a name, as many as it has by default on so many ranks.

    Raises ScheduleError for a file that is not a schedule.
    """
    if isinstance(given, PipelineSchedule):
        return given.stages
    if given.endswith(".csv"):
        return parse_csv(_read_text(given), name=given).stages
    return ranks * STAGES_PER_RANK.get(given, 1)


def parse_csv(
    text: str, micro_batches: int | None = None, stages: int | None = None, name: str = "rows"
) -> PipelineSchedule:
    """The schedule in CSV, in the grammar of torch.distributed.pipelining: a line a pp rank, a cell an action or idle.

    Raises ScheduleError with row, column and cell for a cell that is not an action in full.  Rows and columns count
    from 0.  Whether the schedule is legal says ``check_schedule``.
    """
    lines = text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").removesuffix("\n").split("\n")
    return PipelineSchedule.from_rows([line.split(",") for line in lines], micro_batches, stages, name)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {path} cannot be read: {error}") from error


def _checked(schedule: PipelineSchedule, ranks: int, micro_batches: int, stages: int) -> PipelineSchedule:
    """The schedule, proved to be legal and of these sizes."""
    for name, size, expected in (
        ("pp ranks", schedule.ranks, ranks),
        ("stages", schedule.stages, stages),
        ("micro-batches", schedule.micro_batches, micro_batches),
    ):
        if size != expected:
            raise ScheduleError(f"the schedule {schedule.name!r} is for {size} {name}, but there are {expected}")
    check_schedule(schedule)
    return schedule
