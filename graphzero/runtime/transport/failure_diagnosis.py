"""The error of a rank whose wait for others has failed: which rank stopped, ended or is silent, and why."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphzero.errors import RankError
from graphzero.runtime.transport.failure_report import PAUSE, WAITED, FailureReport, ReportStore

_UNSURE = 3.0  # seconds for other ranks to find out why a connection is closed
_FILES = 16  # file descriptors that connecting needs, about


class LostConnection(RankError):
    """A wait of ``rank`` for all ranks that has failed.

    purpose: what was waited for.  error: of gloo or of the store.
    """

    def __init__(self, rank: int, purpose: str, error: RuntimeError | None = None, is_silent: bool = False) -> None:
        text = str(error).lower()
        reason = f": {_last_line(error)}{_files_left()}" if error is not None else ""
        message = f"rank {rank} waited for {purpose}, and the connection is gone{reason}"
        super().__init__(message, (), is_silent or "timed out" in text or "timeout after" in text)
        self.purpose = purpose


@dataclass(frozen=True)
class FailureDiagnosis:
    """Facts of a call of one rank in which a wait has failed.

    label, number: of the call.  limit: the job's timeout in seconds.  reports: of all ranks, about this generation.
    find_ended: the ranks known to have ended, so many seconds after the failure.  remote: ranks of other hosts.
    close: ends this rank's connections.
    """

    rank: int
    ids: Sequence[int]
    label: str
    number: int
    limit: float
    reports: ReportStore
    find_ended: Callable[[float], list[int]]
    remote: frozenset[int]
    close: Callable[[], None]

    def explain(self, error: RankError) -> RankError:
        """The error to raise: what the rank reports that stopped; without a report, who has ended, or is silent."""
        self.reports.mark(WAITED, self.rank)
        report = self.reports.first_report()
        if report is not None:
            return self._as_error(report)
        if error.is_silent:
            return self._silent(error)
        began, ended = time.monotonic(), self.find_ended(0.0)
        while (report := self.reports.first_report()) is None and not ended:  # processes first, then the store
            if time.monotonic() - began > _UNSURE:  # nothing else reports anything: the failure is this rank's own
                self.reports.add(FailureReport.of_error(self.rank, self.label, self.number, error))
                return error
            time.sleep(PAUSE)
            ended = self.find_ended(time.monotonic() - began)
        return self._ended(error, ended) if report is None else self._as_error(report)

    def _as_error(self, report: FailureReport) -> RankError:
        return RankError(report.text_for(self.number), report.ranks, report.kind == "silent")

    def _ended(self, error: RankError, ended: list[int]) -> RankError:
        """Report ranks that have ended without a report of their own."""
        wait = f"waits for {rank_list(ended)}, which"
        if isinstance(error, LostConnection):
            wait = f"waited for {error.purpose}, and {rank_list(ended)}"
        cut_off = "cut off with its host, " if self.remote.intersection(ended) else ""
        text = (
            f"rank {self.rank} {wait} {_have(ended)} ended in or before this {self.label}: by an exception (the output "
            f"there says which), killed, {cut_off}or because of fewer calls; every rank must call a Graph equally "
            "often, also where its data ends earlier: see gz.until_all_end"
        )
        self.reports.add(FailureReport("ended", ended, self.label, self.number, text))
        return RankError(text, ended)

    def _silent(self, error: RankError) -> RankError:
        """Report the ranks that do not wait after the job's timeout: those that wait are woken, and mark that."""
        self.close()
        others = [rank for rank in self.ids if rank != self.rank]
        deadline, waiting = time.monotonic() + 1.0, self.reports.marks(WAITED, others)
        while waiting is not None and len(waiting) < len(others) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            waiting = self.reports.marks(WAITED, others)
        late = list(error.ranks) if waiting is None else [rank for rank in others if rank not in waiting]
        text = (
            f"rank {self.rank} has waited {self.limit:.0f} s in this {self.label} for {rank_list(late)}, which "
            f"{_have(late)} not ended: slow, stopped, or in another program. The limit is the "
            "process group's timeout: init_process_group(timeout=...)"
        )
        self.reports.add(FailureReport("silent", late, self.label, self.number, text))
        return RankError(text, late, is_silent=True)


def late_text(rank: int, label: str, purpose: str, late: Sequence[int], seconds: float, limit: float) -> str:
    """A warning that a rank has waited long for others, which do not wait."""
    return (
        f"rank {rank} has waited {seconds:.0f} s in its {label} for {purpose}; {rank_list(late)} "
        f"{'is' if len(late) == 1 else 'are'} not there. Every rank must call a Graph equally often "
        f"(gz.until_all_end, where its data ends earlier); after "
        f"{limit:.0f} s, the process group's timeout, this is an error"
    )


def rank_list(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the other ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__


def _files_left() -> str:
    """A hint where this process has run out of file descriptors, which gloo does not say."""
    try:
        import resource

        limit, is_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    except ImportError:
        return ""
    except OSError as error:
        return f". {error.strerror}: see ulimit -n" if error.errno == errno.EMFILE else ""
    return f". It has {is_open} files open and may have {limit}: see ulimit -n" if is_open + _FILES > limit else ""
