"""What graphzero says of its own work: a structured log, and lines of progress while something long goes on.

Nothing here asks another rank for anything.
"""

from graphzero.logs.progress import phase, working
from graphzero.logs.records import OPTIONS, event, is_on, note_rank, set_logs

__all__ = ["OPTIONS", "event", "is_on", "note_rank", "phase", "set_logs", "working"]
