"""Settings of offload: what lies in host memory between its uses, and in which folder, if in files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from graphzero.config.setting import YES_OR_NO, Check, Checked, setting
from graphzero.errors import ConfigError


@dataclass(frozen=True, repr=False)
class OffloadSettings(Checked):
    """The values in host memory.  states: whether optimizer states are.  path: the folder of the files that hold them;
    None for ordinary memory."""

    states: bool = setting(False, YES_OR_NO, "enable_offload({})")
    path: str | None = setting(
        None,
        Check(lambda x: x is None or (isinstance(x, str) and x != ""), "give the path of a folder, or None for memory"),
        "enable_offload(path={})",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and not self.states:
            raise ConfigError(
                f"enable_offload(False, path={self.path!r}): nothing would lie in that folder; leave path out, or "
                "write enable_offload(path=...)"
            )

    def __str__(self) -> str:
        return ("states" if self.states else "none") + (f" in {self.path}" if self.path is not None else "")


def offload_of(states: bool, path: str | os.PathLike[str] | None) -> OffloadSettings:
    """Settings for the arguments of ``enable_offload``."""
    return OffloadSettings(states, os.fspath(path) if isinstance(path, os.PathLike) else path)
