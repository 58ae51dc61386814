"""The schedule that a user means: a name, rows, or a CSV file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from graphzero.errors import ScheduleError
from graphzero.schedules.action import Action
from graphzero.schedules.check import check_schedule
from graphzero.schedules.csv_text import parse_csv
from graphzero.schedules.generators import GENERATORS, STAGES_PER_RANK, generate_schedule
from graphzero.schedules.schedule import PipelineSchedule

Rows = Iterable[Iterable[Action | str | None]]


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
        return _read_csv_file(given, ranks, micro_batches, stages)
    elif given in GENERATORS and stages % ranks:
        raise ScheduleError(
            f"{given} has as many stages on each rank, but {stages} stages are not a multiple of {ranks}"
        )
    else:
        schedule = generate_schedule(given, ranks, micro_batches, stages // ranks)
    _check_sizes(schedule, ranks, micro_batches, stages)
    check_schedule(schedule)
    return schedule


def count_stages(given: str | PipelineSchedule, ranks: int) -> int:
    """Count the stages of the schedule ``given``; of a name, as many as it has by default on so many ranks.

    Raises ScheduleError for a file that is not a schedule.
    """
    if isinstance(given, PipelineSchedule):
        return given.stages
    if given.endswith(".csv"):
        return parse_csv(_read_text(given), name=given).stages
    return ranks * STAGES_PER_RANK.get(given, 1)


def _read_csv_file(path: str, ranks: int, micro_batches: int, stages: int) -> PipelineSchedule:
    text = _read_text(path)
    try:
        schedule = parse_csv(text, micro_batches, stages, name=path)
        _check_sizes(schedule, ranks, micro_batches, stages)
        check_schedule(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", error.row, error.column) from None
    return schedule


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {path} cannot be read: {error}") from error


def _check_sizes(schedule: PipelineSchedule, ranks: int, micro_batches: int, stages: int) -> None:
    for name, size, expected in (
        ("pp ranks", schedule.ranks, ranks),
        ("stages", schedule.stages, stages),
        ("micro-batches", schedule.micro_batches, micro_batches),
    ):
        if size != expected:
            raise ScheduleError(f"the schedule {schedule.name!r} is for {size} {name}, but there are {expected}")
