"""Pipeline schedules as data: which action each pp rank runs after which, and what can be proved about that.

A schedule is a row of actions for each pp rank (:class:`PipelineSchedule`).  It comes from a generator
(:data:`GENERATORS`), from rows of the user or from a CSV file, all the same from there on: it is checked
(:func:`check_schedule`), lowered to sends and receives, simulated and drawn.  Pure Python, without torch: what a stage
contains, what its actions cost and who sends are for others.
"""

from graphzero.schedules.action import Action as Action
from graphzero.schedules.action import ActionKind as ActionKind
from graphzero.schedules.action import parse_action as parse_action
from graphzero.schedules.check import check_schedule as check_schedule
from graphzero.schedules.csv_text import format_csv as format_csv
from graphzero.schedules.csv_text import parse_csv as parse_csv
from graphzero.schedules.generators import GENERATORS as GENERATORS
from graphzero.schedules.generators import generate_schedule as generate_schedule
from graphzero.schedules.schedule import PipelineSchedule as PipelineSchedule
from graphzero.schedules.schedule import loop_stage_ranks as loop_stage_ranks
from graphzero.schedules.schedule import v_stage_ranks as v_stage_ranks
