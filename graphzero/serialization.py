"""Functions that save, load and materialise a Graph: ``gz.save``, ``gz.load``, ``gz.load_pretrained`` and others.

A checkpoint is a folder: safetensors files, one a rank, and a JSON index with checksums of all their bytes.  It is
complete or has no name, nothing in it is code, and any placement, stage and number of ranks reads what any other wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphzero import _compat
from graphzero.checkpoint.checkpointer import Checkpointer
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.files.export import export
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
    checkpoints = _checkpointer_of(graph, "save", "saved")
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
    return _checkpointer_of(graph, "load", "loaded").load(absolute_path(path, "gz.load"), strict)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if nothing was saved yet.  No other rank takes part."""
    where = absolute_path(path, "gz.latest")
    if is_complete(where):
        return where
    checkpoints = complete_checkpoints(where)
    return checkpoints[-1] if checkpoints else None


@hides_frames
@_compat.cpu_by_default
def materialize(graph: Graph, init: Callable[[nn.Module], Any] | None = None) -> None:
    """Give values to everything in ``graph`` that is on the meta device; no rank ever holds the whole model.

    init: called with each module, children first, as by ``nn.Module.apply``; by default ``reset_parameters`` of modules
    that hold such tensors.  It is code for one device and sees whole tensors, one of which at a time is real.  The
    result equals, to the bit, that of one process that calls ``model.to_empty(device=...)`` and ``model.apply(init)``
    with the first rank's random state.

    Each rank keeps the pieces that its program reads: a shard at stage 3, and under AMP from stage 1 on, else
    everything.  So set the stage first, and call this before the first step.  Optimizers that exist already follow.
    Every rank calls it.

    Raises ConfigError for tensors that no code initialises (nothing has changed then).
    """
    _checkpointer_of(graph, "materialize", "loaded").materialize(init)


@hides_frames
@_compat.cpu_by_default
def load_pretrained(
    graph: Graph, path: str | os.PathLike[str], *, module: str | None = None,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None, strict: bool = True,
) -> None:  # fmt: skip
    """Load weights from safetensors files; each rank reads only the bytes of its own pieces.

    path: of one file, or of a folder as Hugging Face's ``save_pretrained`` writes it, in shards or not.
    module: the attribute whose weights they are, if the graph has several.
    rename: prefixes of names in the files and their replacements, or a function of a name; None leaves a tensor out.
    strict: whether all names must be in the files; one of several tied names is enough.  Shapes must always fit.

    Modules may be on the meta device, with or without tensor axes; values are cast to the dtypes of the module.  Every
    rank calls it.  Raises CheckpointError, before anything is written, for files that do not fit.
    """
    where = absolute_path(path, "gz.load_pretrained")
    _checkpointer_of(graph, "load_pretrained", "loaded").load_pretrained(where, module, rename, strict)


def save_pretrained(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, module: str | None = None,
    dtype: torch.dtype | None = None, config: Any = None, shard_bytes: int = 5_000_000_000,
) -> list[Path]:  # fmt: skip
    """Write the weights of a checkpoint as safetensors files that ``from_pretrained`` and ``load_pretrained`` read.

    One process calls it, at any time.  It reads ``checkpoint``, which ``gz.save`` wrote (or the newest one in a
    folder), one tensor at a time, and needs no Graph.

    module: the attribute whose weights to write, if there are several.  dtype: the dtype of floating tensors.
    config: an object with a method ``save_pretrained(path)``, such as ``model.config`` of transformers.
    shard_bytes: the size of the largest file.  Of tied tensors the first is written, as those readers expect.

    Returns the files.  Raises CheckpointError for a checkpoint that was altered.
    """
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ConfigError(f"gz.save_pretrained(shard_bytes={shard_bytes!r}): give the bytes of the largest file")
    caller = "gz.save_pretrained"
    out = absolute_path(path, caller)
    files = export(absolute_path(checkpoint, caller), out, module, dtype, shard_bytes)
    if config is not None:
        config.save_pretrained(out)
    return files


def _checkpointer_of(graph: Any, function: str, doing: str) -> Checkpointer:
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"gz.{function} takes a Graph first, not a {type(graph).__name__}: its placement says which rank holds "
            "what, and it has the modules and optimizers"
        )
    return graph.checkpoints(doing)
