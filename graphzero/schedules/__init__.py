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

from graphzero.schedules.action import Action, ActionKind, parse_action
from graphzero.schedules.chart import draw_timeline
from graphzero.schedules.check import check_schedule
from graphzero.schedules.generators import GENERATORS, generate_schedule
from graphzero.schedules.resolve import count_stages, parse_csv, resolve_schedule
from graphzero.schedules.schedule import PipelineSchedule, count_in_flight, most_in_flight
from graphzero.schedules.timeline import PipelineTimeline, ScheduleCosts, simulate_schedule
