"""Logs of graphzero: structured records, and lines of progress during long work.

Nothing here asks another rank for anything.
"""

from graphzero.logs.progress import phase, working
from graphzero.logs.records import OPTIONS, event, is_on, note_rank, set_logs

__all__ = ["OPTIONS", "event", "is_on", "note_rank", "phase", "set_logs", "working"]
