"""Pipeline schedules as data: which action each pp rank runs after which, and what can be proved about that.

A schedule is a row of actions for each pp rank (:class:`PipelineSchedule`).  It comes from a generator
(:data:`GENERATORS`), from rows of the user or from a CSV file (``resolve_schedule``), all the same from there on:

=========================  ============================================================================================
``check_schedule``         it is complete, can run, sums in the order of micro-batches; else a sentence names the cell
``lower_schedule``         it gets sends and receives, posted early or late
``check_launch_order``     it finishes with one communicator, where each runs its messages in launch order (NCCL)
``choose_communicators``   how many it needs otherwise
``least_receive_slots``    how many receive buffers each edge needs
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
from graphzero.schedules.csv_text import format_csv as format_csv
from graphzero.schedules.csv_text import parse_csv as parse_csv
from graphzero.schedules.generators import GENERATORS as GENERATORS
from graphzero.schedules.generators import generate_schedule as generate_schedule
from graphzero.schedules.in_flight import count_in_flight as count_in_flight
from graphzero.schedules.in_flight import most_in_flight as most_in_flight
from graphzero.schedules.launch_order import CommunicatorChoice as CommunicatorChoice
from graphzero.schedules.launch_order import check_launch_order as check_launch_order
from graphzero.schedules.launch_order import choose_communicators as choose_communicators
from graphzero.schedules.messages import Edge as Edge
from graphzero.schedules.messages import count_posted_receives as count_posted_receives
from graphzero.schedules.messages import edge_of as edge_of
from graphzero.schedules.messages import lower_schedule as lower_schedule
from graphzero.schedules.messages import matching_message as matching_message
from graphzero.schedules.messages import remove_messages as remove_messages
from graphzero.schedules.receive_slots import finishes_with_slots as finishes_with_slots
from graphzero.schedules.receive_slots import least_receive_slots as least_receive_slots
from graphzero.schedules.receive_slots import least_receive_slots_by_edge as least_receive_slots_by_edge
from graphzero.schedules.resolve import count_stages as count_stages
from graphzero.schedules.resolve import resolve_schedule as resolve_schedule
from graphzero.schedules.schedule import PipelineSchedule as PipelineSchedule
from graphzero.schedules.schedule import loop_stage_ranks as loop_stage_ranks
from graphzero.schedules.schedule import v_stage_ranks as v_stage_ranks
from graphzero.schedules.timeline import PipelineTimeline as PipelineTimeline
from graphzero.schedules.timeline import ScheduleCosts as ScheduleCosts
from graphzero.schedules.timeline import TimedAction as TimedAction
from graphzero.schedules.timeline import simulate_schedule as simulate_schedule
