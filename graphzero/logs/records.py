"""The structured log: events with a name and fields.

An event is a record of the logger "graphzero", with the attributes ``event`` and ``fields``, and a line of JSON in the
file that was asked for, if one was.  Rank 0 alone writes the file, unless its path has ``{rank}`` in it.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from graphzero.errors import ConfigError

LOG = logging.getLogger("graphzero")
PROGRESS = ("auto", "lines", "off")
_FILE, _STEPS, _PROGRESS = "GRAPHZERO_LOG", "GRAPHZERO_LOG_STEPS", "GRAPHZERO_PROGRESS"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass
class LogOptions:
    """file: the path of JSON lines; None for none.  steps: whether each step is an event.  progress: of ``PROGRESS``.

    rank: of this process, as far as it is known.
    """

    file: str | None = None
    steps: bool = False
    progress: str = "auto"
    rank: int = 0
    _opened: IO[str] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the file."""
        return self.file is not None and (self.rank == 0 or "{rank}" in self.file)

    def open(self) -> None:
        """Be ready to write.  Raises OSError."""
        assert self.file is not None
        path = Path(self.file.replace("{rank}", str(self.rank)))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._opened = path.open("a", encoding="utf-8", buffering=1)  # line by line

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def write_line(self, line: str) -> None:
        """Add a line.  A file that cannot be written is warned of once and given up: a log stops no training."""
        with self._lock:
            try:
                if self._opened is None:
                    self.open()
                assert self._opened is not None
                self._opened.write(line + "\n")
            except OSError as error:
                self.file, self._opened = None, None
                warnings.warn(f"the log {error.filename or ''} cannot be written, and ends here: {error}", stacklevel=4)


def set_logs(*, file: str | os.PathLike[str] | None = None, steps: bool = False, progress: str = "auto") -> None:
    """Set what graphzero logs in this process from now on; each call replaces all options.

    file: a path to which events are added as JSON lines, by rank 0 alone; one with ``{rank}`` in it by every rank, each
    to its own.  None: no file.  As the environment variable: ``GRAPHZERO_LOG``.
    steps: log every step with its seconds (on CUDA those until the host is done with it): ``GRAPHZERO_LOG_STEPS=1``.
    progress: what a compile of more than two seconds prints to stderr, on the first rank: "auto", one line that tqdm
    updates on a terminal, where it is installed, and plain lines elsewhere; "lines", plain lines; "off", nothing.
    ``GRAPHZERO_PROGRESS``.

    Events go to the logger "graphzero" too, at level INFO, with the attributes ``event`` and ``fields``.
    Raises ConfigError for a file that cannot be written, and for another ``progress``.
    """
    if progress not in PROGRESS:
        raise ConfigError(f"set_logs(progress={progress!r}): it is one of {', '.join(map(repr, PROGRESS))}")
    OPTIONS.close()
    OPTIONS.steps, OPTIONS.progress = bool(steps), progress
    OPTIONS.file = None if file is None else os.fspath(file)
    if OPTIONS.writes:
        try:
            OPTIONS.open()
        except OSError as error:
            OPTIONS.file = None
            raise ConfigError(f"set_logs(file={os.fspath(file or '')!r}) cannot be written: {error}") from error


def note_rank(rank: int) -> None:
    """The number of this process among those of the job."""
    if rank != OPTIONS.rank:
        OPTIONS.close()
        OPTIONS.rank = rank


def is_on(level: int = logging.INFO) -> bool:
    """Return whether anybody reads events: what is dear to find out need not be found out otherwise."""
    return OPTIONS.writes or LOG.isEnabledFor(level)


def event(name: str, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log what has happened: ``name`` for programs, ``message`` for people, ``fields`` of JSON's kinds."""
    if LOG.isEnabledFor(level):
        LOG.log(level, "%s", message, extra={"event": name, "fields": fields}, stacklevel=2)
    if OPTIONS.writes:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        head = {"time": now, "level": logging.getLevelName(level), "rank": OPTIONS.rank, "event": name}
        OPTIONS.write_line(json.dumps({**head, "message": message, **fields}, default=str))


def _from_environment() -> LogOptions:
    read = os.environ.get
    progress = read(_PROGRESS, "auto").lower()
    progress = "off" if progress in _NO[1:] else progress
    if progress not in PROGRESS:
        warnings.warn(f"{_PROGRESS}={progress} is none of {', '.join(PROGRESS)}; auto is used", stacklevel=2)
        progress = "auto"
    rank = read("RANK", "0")
    steps = read(_STEPS, "").lower() in _YES
    return LogOptions(read(_FILE) or None, steps, progress, int(rank) if rank.isdigit() else 0)


OPTIONS = _from_environment()
