"""Functions that save and load a Graph: ``gz.save``, ``gz.load``, ``gz.latest``.

A checkpoint is a folder: safetensors files, one a rank, and a JSON index with checksums of all their bytes.  It is
complete or has no name, nothing in it is code, and any placement, stage and number of ranks reads what any other wrote.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from graphzero import _compat
from graphzero.checkpoint.checkpointer import Checkpointer
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.files.folder import absolute_path, complete_checkpoints, is_complete
from graphzero.errors import ConfigError, hides_frames
from graphzero.graph import Graph


@hides_frames
@_compat.cpu_by_default
def save(
    graph: Graph, path: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False,
    extra: Any = None, frozen: str = "values",
) -> Saved:  # fmt: skip
    """Save everything that ``graph`` needs to continue to the bit, as the next checkpoint in the folder ``path``.

    A checkpoint has modules, optimizer states, schedulers, loss scale, seed and step, and ``extra``: the user's own
    numbers, strings, tensors, lists and dicts, the same on every rank.  Every rank calls it, with one path that all
    hosts share, and writes what it holds.  A crash leaves earlier checkpoints as they were.

    keep: when this checkpoint is complete, remove all but the last ``keep``.
    asynchronous: return when the values have been copied to host memory (the bytes of this rank's file), and write them
    while the next steps run.  The next save waits for it, and so does ``.wait()`` of the result.  If it fails, these
    raise; the log says so at once.
    frozen: "hash" saves only a hash (sha256) of each parameter that needs no gradient, so a checkpoint of adapters is
    as small as the adapters.  ``gz.load`` compares the hashes with the parameters of its Graph.

    Returns the path and the size; the text is a line with bytes, seconds and GB/s, which is also logged (logger
    "graphzero", level INFO).  Raises CheckpointError, on all ranks, if it cannot be written; nothing is left then.
    """
    checkpoints = checkpointer_of(graph, "save", "saved")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"gz.save(keep={keep!r}): give the number of checkpoints to keep, at least 1; None keeps all")
    if frozen not in ("values", "hash"):
        raise ConfigError(f"gz.save(frozen={frozen!r}): what is kept of frozen parameters is 'values' or 'hash'")
    return checkpoints.save(absolute_path(path, "gz.save"), keep, bool(asynchronous), extra, frozen)


@hides_frames
@_compat.cpu_by_default
def load(graph: Graph, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load a checkpoint that ``gz.save`` wrote, of any placement, stage and number of ranks; returns its ``extra``.

    path: of one checkpoint, or of a folder of checkpoints, whose newest complete one is taken.
    strict: whether missing names of tensors, and names that the Graph does not have, are an error; shapes must always
    fit.

    Every rank calls it, and reads the parts that it holds directly to their places; it needs a few MiB in addition.
    Each block that is read is compared with its sum.  Raises CheckpointError, on all ranks, for altered files, with
    their names, and for a checkpoint of another model, with the names that do not fit.
    """
    return checkpointer_of(graph, "load", "loaded").load(absolute_path(path, "gz.load"), strict)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if nothing was saved yet.  No other rank takes part."""
    where = absolute_path(path, "gz.latest")
    if is_complete(where):
        return where
    checkpoints = complete_checkpoints(where)
    return checkpoints[-1] if checkpoints else None


def checkpointer_of(graph: Any, function: str, doing: str) -> Checkpointer:
    """For the rest of graphzero: what saves and loads a Graph. function, doing: "load", "loaded"."""
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"gz.{function} takes a Graph first, not a {type(graph).__name__}: its placement says which rank holds "
            "what, and it has the modules and optimizers"
        )
    return graph.checkpoints(doing)
