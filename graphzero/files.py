"""Checkpoint files: ``gz.save`` and ``gz.load``.

A checkpoint is a folder: safetensors files, one a rank, and a JSON index with sums of all their bytes.  It is
complete or has no name, nothing in it is code, and any placement, stage and number of ranks reads what any other wrote.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from graphzero import _compat
from graphzero.checkpoint.checkpointer import Checkpointer
from graphzero.checkpoint.files import folder
from graphzero.checkpoint.files.async_save import Saved
from graphzero.errors import ConfigError, hides_frames
from graphzero.graph import Graph


@hides_frames
@_compat.cpu_by_default
def save(
    graph: Graph, path: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False,
    extra: Any = None, frozen: str = "values",
) -> Saved:  # fmt: skip
    """Save all that ``graph`` needs to go on to the bit, as the next checkpoint in the folder ``path``.

    Modules, optimizer states, schedulers, loss scale, seed and step; ``extra`` is the user's own, of numbers, strings,
    tensors, lists and dicts, the same on every rank.  Every rank calls it, with one path that all hosts share, and
    writes what it holds.  A crash leaves the earlier checkpoints as they were.

    keep: remove all but the last so many, when this one is complete.
    asynchronous: return when the values are copied to host memory (bytes of this rank's file), and write them while the
    next steps are taken; the next save waits for it, and so does ``.wait()`` of what is returned.  If it fails, these
    raise; the log says so at once.
    frozen: "hash" keeps of parameters that need no gradient only what tells whether others are the same (sha256): a
    checkpoint of adapters is then as small as these.  ``gz.load`` compares them with those that stand in its Graph.

    Returns what was saved where; its text is a line with bytes, seconds and GB/s, which is also logged (logger
    "graphzero", level INFO).  Raises CheckpointError, on all ranks, if it cannot be written; nothing is left then.
    """
    checkpoints = _of(graph, "save", "saved")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"gz.save(keep={keep!r}): it is how many checkpoints stay, at least 1; None keeps all")
    if frozen not in ("values", "hash"):
        raise ConfigError(f"gz.save(frozen={frozen!r}): what is kept of frozen parameters is 'values' or 'hash'")
    return checkpoints.save(folder.path_of(path, "gz.save"), keep, bool(asynchronous), extra, frozen)


@hides_frames
@_compat.cpu_by_default
def load(graph: Graph, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load a checkpoint that ``gz.save`` wrote, of any placement, stage and number of ranks; returns its ``extra``.

    path: of one checkpoint, or of a folder of them, of which the newest complete one is taken.
    strict: whether names of tensors that are missing, or that nobody has here, are an error; shapes always are.

    Every rank calls it, and reads the parts that it holds, straight to where they belong; beside them it holds
    a few MiB.  Each block that is read is compared with its sum.  Raises CheckpointError, on all ranks, for files
    that are not what was saved (which), and for a checkpoint of another model (which names).
    """
    return _of(graph, "load", "loaded").load(folder.path_of(path, "gz.load"), strict)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None where nothing was saved yet.  It asks no other rank."""
    where = folder.path_of(path, "gz.latest")
    found = folder.complete(where)
    return where if folder.is_complete(where) else found[-1] if found else None


def _of(graph: Any, name: str, doing: str) -> Checkpointer:
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"gz.{name} takes the Graph and a path: gz.{name}(graph, path), not a {type(graph).__name__}; it covers "
            "the modules and optimizers of that"
        )
    return graph.checkpoints(doing)
