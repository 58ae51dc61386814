"""Answers to build where it asks whether it is being traced: ``torch.compiler.is_compiling()``, FakeTensor.

Packages ask before plain PyTorch would read values, and take another branch while traced, which does not always compute
the same function.  So build is answered no and takes the branch of plain PyTorch.  It can be traced where the values
that it reads are known, are checks, or are not read after all.  Where it cannot, build is traced once more and answered
yes at that place.  torch itself is always answered yes.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FrameType

from graphzero import _compat
from graphzero.capture.problems import traced_code
from graphzero.errors import GraphZeroError
from graphzero.ir.source_location import line_of

_ATTEMPTS = 6  # at most, in which a place learns yes by itself; then all do
_Calls = tuple[tuple[CodeType, int], ...]  # innermost first


class CompilingAnswers:
    """The answers for one build, over all attempts to trace it.

    yes: the ends of stacks in which the answer is yes.  no: where it was no in this attempt, with the frames there.
    """

    def __init__(self) -> None:
        self.yes: set[_Calls] = set()
        self.always, self.attempts = False, 0
        self.no: dict[_Calls, list[int]] = {}
        self.told: dict[str, None] = {}  # the lines that were answered yes in this attempt

    @_compat.contextmanager
    def answering(self) -> Iterator[None]:
        """While this is open, one attempt is made."""
        self.no, self.told = {}, {}
        with _compat.is_compiling(), _compat.answers_whether_traced(self._answer):
            yield

    def _answer(self, asker: FrameType) -> bool:
        """Return whether build is being traced, for the frame that asks."""
        if f"{asker.f_globals.get('__name__')}.".startswith("torch."):
            return True
        if self.always:
            return self._tell(asker)
        frames: list[FrameType] = []
        frame: FrameType | None = asker
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back if frame.f_code is not traced_code() else None
        calls = tuple((frame.f_code, frame.f_lasti) for frame in frames)
        answered = next((frame for n, frame in enumerate(frames, 1) if calls[:n] in self.yes), None)
        if answered is not None:
            return self._tell(answered)
        self.no[calls] = [id(frame) for frame in frames]
        return False

    def _tell(self, frame: FrameType) -> bool:
        self.told[line_of(frame.f_code, frame.f_lineno)] = None
        return True

    def learns(self, error: Exception) -> bool:
        """Return whether build is to be traced again, with another answer than the one that ended in ``error``.

        The answer that changes is the one given to the innermost function that had not returned.  What the code itself
        raises, plain PyTorch would raise too.
        """
        depths: dict[tuple[int, CodeType], int] = {}
        traceback = error.__traceback__
        while traceback is not None:
            depths[id(traceback.tb_frame), traceback.tb_frame.f_code] = len(depths)
            traceback = traceback.tb_next
        if not self.no or (is_raised(error) and not isinstance(error, GraphZeroError)):
            return False
        running_calls: list[tuple[int, _Calls]] = []
        for calls, frames in self.no.items():
            keys = [(frame, code) for frame, (code, _) in zip(frames, calls, strict=True)]
            running = next((i for i, key in enumerate(keys) if key in depths), None)
            if running is not None:
                running_calls.append((depths[keys[running]], calls[: running + 1]))
        deepest = max((depth for depth, _ in running_calls), default=0)
        self.yes |= {calls for depth, calls in running_calls if depth == deepest}
        self.attempts += 1
        self.always = not running_calls or self.attempts > _ATTEMPTS
        return True


def is_raised(error: Exception) -> bool:
    """Return whether a line of Python raises it, with ``raise`` or ``assert``."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        traceback is not None and dis.opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    )
