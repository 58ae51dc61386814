"""A folder of checkpoints: their names, which is the newest, and which of them stay.

``000003.step-120`` is the third that was saved there.  It is written under another name, beginning with a dot, and
gets its own when everything in it is on the disk: what has a name is complete.  Those that have none: see
``partial_checkpoint``.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphzero.checkpoint.files.index import NAME as INDEX
from graphzero.checkpoint.files.partial_checkpoint import (
    NAME,
    PARTIAL,
    REMOVED,
    PartialCheckpoint,
    remove,
    remove_abandoned,
)
from graphzero.errors import CheckpointError
from graphzero.logs import event


def absolute_path(given: object, caller: str) -> Path:
    """A path from a user, absolute.  Raises CheckpointError for other objects.  caller: "gz.save"."""
    try:
        path = Path(given).expanduser().absolute()  # type: ignore[arg-type]
        os.fsencode(path)
        if "\0" not in str(path) and given != "":
            return path
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{caller}: {given!r:.80} is not a path: {error}") from None
    why = "it holds a null character" if given else "it is empty"
    raise CheckpointError(f"{caller}: {given!r:.80} is not a path: {why}")


def complete_checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first; none if there is no such folder.  Raises CheckpointError for one that
    cannot be read."""
    try:
        numbered = [(int(match[1]), child) for child in path.iterdir() if (match := NAME.fullmatch(child.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return [child for _, child in sorted(numbered) if is_complete(child)]


def is_complete(checkpoint: Path) -> bool:
    """Return whether a folder is a complete checkpoint.  Raises CheckpointError where it cannot be read."""
    try:
        return (checkpoint / INDEX).is_file()
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error.strerror}") from error


def find_checkpoint(path: Path) -> Path:
    """The checkpoint ``path``, or the newest in the folder ``path``.  Raises CheckpointError if there is none."""
    if is_complete(path):
        return path
    checkpoints = complete_checkpoints(path)
    if checkpoints:
        return checkpoints[-1]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; gz.latest({str(path)!r}) is None where nothing was saved yet")
    children = path.iterdir() if path.is_dir() else ()
    begun = " Saving one has begun and not ended;" * any(PARTIAL.fullmatch(child.name) for child in children)
    raise CheckpointError(
        f"{path} holds no complete checkpoint.{begun} gz.latest({str(path)!r}) is None where nothing was saved yet"
    )


def begin(partial: PartialCheckpoint, path: Path, step: int) -> Path:
    """A new empty folder in ``path`` to write the next checkpoint to; what earlier ones left unfinished is removed."""
    with explain_write_errors(f"the checkpoint folder {path}"):
        if is_complete(path):
            raise CheckpointError(
                f"{path} is a checkpoint itself; give the folder that holds checkpoints: {str(path.parent)!r}"
            )
        make_folder(path)
        for child in path.iterdir():
            if PARTIAL.fullmatch(child.name):
                remove_abandoned(child)
            elif REMOVED.fullmatch(child.name):
                shutil.rmtree(child, ignore_errors=True)
        return partial.begin(path, step)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it.  Raises OSError, which names the file or the link that is in its place."""
    for place in (path, *path.parents):
        if os.path.lexists(place) and not place.is_dir():
            what = f"a link to {os.readlink(place)}, which is not a folder" if place.is_symlink() else "a file"
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is {what}; give the path of a folder, or a new path")
    path.mkdir(parents=True, exist_ok=True)


def keep_last(done: Path, count: int) -> None:
    """Remove all complete checkpoints besides ``done``, which has just been saved, but for the last ``count``."""
    for old in complete_checkpoints(done.parent)[:-count]:
        if old != done and not remove(old, old.parent):  # other jobs that save there may have later ones
            message = f"{old} could not be removed, as keep={count} asks"
            event("checkpoint_kept", message, logging.WARNING, path=str(old))


@contextmanager
def explain_write_errors(what: str, nbytes: int = 0) -> Iterator[None]:
    """A block whose OSErrors are raised as a CheckpointError.  nbytes: that it writes."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        need = f"; this rank writes {nbytes} bytes" if error.errno in (errno.ENOSPC, errno.EDQUOT) and nbytes else ""
        raise CheckpointError(
            f"{what} cannot be written: {error.strerror or error}{where}{need}. Nothing was saved; earlier "
            "checkpoints are as they were"
        ) from error
