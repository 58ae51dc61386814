"""A folder of checkpoints: their names, which is the newest, and how one comes and goes at once.

``000003.step-120`` is the third that was saved there.  It is written under another name, beginning with a dot, and
gets its own when everything in it is on the disk: what has a name is complete.  What was left by a crash is removed
when the next one is saved.  The first rank holds a lock on what it writes, by which others see that it is no remains.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphzero.errors import CheckpointError
from graphzero.logs import event
from graphzero.runtime.files.index import NAME as INDEX

_NAME = re.compile(r"(\d{6,})\.step-(\d+)")
_PARTIAL = re.compile(r"\.(\d{6,})\.step-(\d+)\.(partial|removed)")
_locks: dict[Path, int] = {}  # what this process writes -> the open file that holds the lock


def path_of(given: object, asked: str) -> Path:
    """What a user gives as a path, absolute.  Raises CheckpointError for what is none.  asked: "gz.save"."""
    try:
        found = Path(given).expanduser().absolute()  # type: ignore[arg-type]
        if "\0" not in str(found):
            return found
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(f"{asked}: the path {given!r:.80} is none: {error}") from None
    raise CheckpointError(f"{asked}: the path {given!r:.80} is none: it holds a null character")


def complete(path: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first; none if there is no such folder.  Raises CheckpointError for one that
    cannot be looked into."""
    try:
        found = [(int(match[1]), child) for child in path.iterdir() if (match := _NAME.fullmatch(child.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return [child for _, child in sorted(found) if is_complete(child)]


def is_complete(checkpoint: Path) -> bool:
    """Whether it is one.  Raises CheckpointError where one may not look."""
    try:
        return (checkpoint / INDEX).is_file()
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error.strerror}") from error


def chosen(path: Path) -> Path:
    """The checkpoint that ``path`` is, or the newest of those in it.  Raises CheckpointError if there is none."""
    if is_complete(path):
        return path
    found = complete(path)
    if found:
        return found[-1]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; gz.latest({str(path)!r}) is None where nothing was saved yet")
    begun = " Saving one has begun and not ended;" * any(_PARTIAL.fullmatch(child.name) for child in _children(path))
    raise CheckpointError(
        f"{path} holds no complete checkpoint.{begun} gz.latest({str(path)!r}) is None where nothing was saved yet"
    )


def _children(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def begin(path: Path, step: int) -> Path:
    """A new empty folder in ``path`` to write the next checkpoint to; what earlier ones left unfinished is removed."""
    with explained(f"the checkpoint folder {path}"):
        if is_complete(path):
            raise CheckpointError(
                f"{path} is a checkpoint itself; give the folder that holds checkpoints: {str(path.parent)!r}"
            )
        path.mkdir(parents=True, exist_ok=True)
        numbers = [0]
        for child in path.iterdir():
            unfinished, named = _PARTIAL.fullmatch(child.name), _NAME.fullmatch(child.name)
            if unfinished and _is_being_written(child):
                numbers.append(int(unfinished[1]))
            elif unfinished:
                shutil.rmtree(child, ignore_errors=True)
            elif named:
                numbers.append(int(named[1]))
        made = path / f".{max(numbers) + 1:06d}.step-{step}.partial"
        made.mkdir()
        _locks[made] = os.open(made, os.O_RDONLY)
        _lock(_locks[made])
        return made


def _lock(handle: int) -> bool:
    """Whether nobody else has locked it; where files cannot be locked nobody has."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_being_written(partial: Path) -> bool:
    """By another Graph or job that lives."""
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _release(partial: Path) -> None:
    handle = _locks.pop(partial, None)
    if handle is not None:
        with suppress(OSError):  # a process forked meanwhile has it open too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def named(partial: Path) -> Path:
    """What an unfinished checkpoint will be called."""
    return partial.with_name(partial.name[1 : -len(".partial")])


def finish(partial: Path) -> Path:
    """Give it its name.  All of its files are on the disk."""
    sync(partial)
    done = named(partial)
    partial.rename(done)
    _release(partial)
    sync(done.parent)
    return done


def drop(partial: Path) -> None:
    """Remove what was not finished; other ranks may be writing there, and find it gone."""
    _release(partial)
    _remove(partial, partial.with_suffix(".removed"))


def keep_last(path: Path, count: int) -> None:
    """Remove all complete checkpoints but the last ``count``."""
    for old in complete(path)[:-count]:
        if not _remove(old, old.with_name(f".{old.name}.removed")):
            message = f"{old} could not be removed, as keep={count} asks"
            event("checkpoint_kept", message, logging.WARNING, path=str(old))


def _remove(path: Path, hidden: Path) -> bool:
    """Whether nobody finds it any more.  It gets another name first: it is gone at once, and nobody adds to it."""
    try:
        path.rename(hidden)
    except OSError:
        return not path.exists()
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def sync(path: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(what: str, needed: int = 0) -> Iterator[None]:
    """Raise what the system says of writing as a CheckpointError.  needed: bytes."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        need = f"; this rank writes {needed} bytes" if error.errno in (errno.ENOSPC, errno.EDQUOT) and needed else ""
        raise CheckpointError(
            f"{what} cannot be written: {error.strerror or error}{where}{need}. Nothing was saved; earlier "
            "checkpoints are as they were"
        ) from error
