"""Files that commands write: looked at before anything runs, and whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from graphzero.errors import ConfigError


def check_output(option: str, path: str) -> None:
    """Raise ConfigError, before anything runs, where nothing can be written."""
    where = Path(path)
    folder = where.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}; make it, or choose another")
    if where.is_dir():
        raise ConfigError(f"{option} {path}: it is a folder; give the name of a file in it")
    if not os.access(where if where.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path}: nothing may be written there; choose another place")


def write_output(option: str, path: str, text: str) -> None:
    """Write a file under its name when all of it is written.  Raises ConfigError where it cannot be."""
    where = Path(path).resolve()
    is_file = where.is_file() or not where.exists()  # no terminal, pipe or device
    at = where.with_name(f"{where.name}.{os.getpid()}.part") if is_file else where
    try:
        at.write_text(text, encoding="utf-8")
        if is_file:
            at.replace(where)
    except OSError as error:
        if is_file:
            at.unlink(missing_ok=True)
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from None
