"""Settings of offload: what lies in host memory between its uses, and in which folder, if in files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from graphzero.config.setting import YES_OR_NO, Check, Checked, setting
from graphzero.errors import ConfigError


@dataclass(frozen=True, repr=False)
class OffloadSettings(Checked):
    """The values in host memory.

    states: whether optimizer states do.  activations: the bytes of these that may be on the device, "auto" for what the
    memory budget leaves, None for all.  path: the folder of the files that hold both; None for ordinary memory.
    """

    method = "enable_offload"

    states: bool = setting(False, YES_OR_NO, "enable_offload({})")
    path: str | None = setting(
        None,
        Check(lambda x: x is None or (isinstance(x, str) and x != ""), "give the path of a folder, or None for memory"),
    )
    activations: int | str | None = setting(
        None,
        Check(
            lambda x: x is None or (isinstance(x, str) and x == "auto") or (type(x) is int and x >= 1),
            "give the bytes of activations that one rank may have on its device, an int of 1 or more, "
            '"auto" for what the memory budget leaves, or None for all',
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and not self.is_on:
            raise ConfigError(
                f"enable_offload(False, path={self.path!r}): nothing would be written there; leave path out, or "
                "write enable_offload(path=...)"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything lies in host memory."""
        return self.states or self.activations is not None

    def __str__(self) -> str:
        states, path = "states" if self.states else "none", f" in {self.path}" if self.path is not None else ""
        return states + (f", activations={self.activations}" if self.activations is not None else "") + path


def offload_of(states: bool, activations: int | str | None, path: str | os.PathLike[str] | None) -> OffloadSettings:
    """Settings for the arguments of ``enable_offload``."""
    return OffloadSettings(states, os.fspath(path) if isinstance(path, os.PathLike) else path, activations)
