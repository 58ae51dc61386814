"""Pipeline schedules as data: which action each pp rank runs after which, and what can be proved about that.

A schedule is a row of actions for each pp rank (:class:`PipelineSchedule`).  It comes from a generator
(:data:`GENERATORS`), from rows of the user or from a CSV file (``resolve_schedule``), all the same from there on:

=========================  ============================================================================================
``check_schedule``         it is complete, can run, sums in the order of micro-batches; else a sentence names the cell
``count_in_flight``        for how many micro-batches each stage keeps values, cell by cell
``simulate_schedule``      when each action runs, given what it costs; the makespan and the bubble
``draw_timeline``          the same as text
=========================  ============================================================================================

Pure Python, without torch.  What a stage contains, what its actions cost and how messages travel is for others.
"""

from graphzero.schedules.action import Action as Action
from graphzero.schedules.action import ActionKind as ActionKind
from graphzero.schedules.action import parse_action as parse_action
from graphzero.schedules.chart import draw_timeline as draw_timeline
from graphzero.schedules.check import check_schedule as check_schedule
from graphzero.schedules.csv_text import parse_csv as parse_csv
from graphzero.schedules.generators import GENERATORS as GENERATORS
from graphzero.schedules.generators import generate_schedule as generate_schedule
from graphzero.schedules.in_flight import count_in_flight as count_in_flight
from graphzero.schedules.in_flight import most_in_flight as most_in_flight
from graphzero.schedules.resolve import count_stages as count_stages
from graphzero.schedules.resolve import resolve_schedule as resolve_schedule
from graphzero.schedules.schedule import PipelineSchedule as PipelineSchedule
from graphzero.schedules.timeline import PipelineTimeline as PipelineTimeline
from graphzero.schedules.timeline import ScheduleCosts as ScheduleCosts
from graphzero.schedules.timeline import simulate_schedule as simulate_schedule
