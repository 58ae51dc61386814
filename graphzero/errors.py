"""The errors graphzero raises.

Every message says what is wrong, where (file and line of the user, the value, the op), the facts
(shapes, SBPs, allowed signatures) and the next step.  This module is the root of the import order:
it imports nothing of graphzero.
"""

from __future__ import annotations

from collections.abc import Iterable


class GraphZeroError(Exception):
    """Base of every error that graphzero raises on purpose."""


class ConfigError(GraphZeroError, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class PlacementError(GraphZeroError, ValueError):
    """Ranks, devices or a hierarchy that do not exist or do not fit together."""


class CaptureError(GraphZeroError):
    """The user's step cannot be written down as one graph."""


class CheckError(GraphZeroError, AssertionError):
    """A check in build is not met: the step stopped before it changed anything."""


class SbpError(GraphZeroError, ValueError):
    """An SBP that a value cannot have."""


class VerifyError(GraphZeroError):
    """A graph that breaks a law of the intermediate representation."""


class CheckpointError(GraphZeroError):
    """A state dict that does not fit the graph it is loaded into."""


class RankError(GraphZeroError):
    """Another rank has stopped, has ended, or does not answer, so that this one cannot go on with its call.

    ranks: which, where that is known.  is_silent: whether this rank has waited as long as the job's timeout allows.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), is_silent: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.is_silent = tuple(ranks), is_silent
