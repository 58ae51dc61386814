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

    path: of one checkpoint, or of a folder of them, of which the newest complete one is taken.
    strict: whether names of tensors that are missing, or that nobody has here, are an error; shapes always are.

    Every rank calls it, and reads the parts that it holds, straight to where they belong; beside them it holds
    a few MiB.  Each block that is read is compared with its sum.  Raises CheckpointError, on all ranks, for files
    that are not what was saved (which), and for a checkpoint of another model (which names).
    """
    return _checkpointer_of(graph, "load", "loaded").load(absolute_path(path, "gz.load"), strict)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None where nothing was saved yet.  It asks no other rank."""
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
    that hold such tensors.  It is code for one device: it sees whole tensors, of which one at a time is real.  The
    result is, to the bit, that of one process which calls ``model.to_empty(device=...)`` and ``model.apply(init)`` with
    the first rank's random state.

    Each rank keeps what its program will want: a piece at stage 3, and under AMP from stage 1 on, else all.  So set the
    stage first, and call this before the first step.  Optimizers made before follow.  Every rank calls it.

    Raises ConfigError for tensors that nobody initialises (nothing has changed then).
    """
    _checkpointer_of(graph, "materialize", "loaded").materialize(init)


@hides_frames
@_compat.cpu_by_default
def load_pretrained(
    graph: Graph, path: str | os.PathLike[str], *, module: str | None = None,
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None, strict: bool = True,
) -> None:  # fmt: skip
    """Load weights from safetensors files, each rank only the bytes of its own pieces.

    path: of one file, or of a folder as Hugging Face's ``save_pretrained`` writes it, in shards or not.
    module: the attribute whose weights they are, if the graph has several.
    rename: prefixes of names in the files and what they become, or a function of a name; None leaves a tensor out.
    strict: whether all names must be there; one of several tied names is enough.  Shapes always must fit.

    Modules may be on the meta device, with or without tensor axes; dtypes are cast to those of the module.  Every rank
    calls it.  Raises CheckpointError, before anything is written, for files that do not fit.
    """
    where = absolute_path(path, "gz.load_pretrained")
    _checkpointer_of(graph, "load_pretrained", "loaded").load_pretrained(where, module, rename, strict)


def save_pretrained(
    checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, module: str | None = None,
    dtype: torch.dtype | None = None, config: Any = None, shard_bytes: int = 5_000_000_000,
) -> list[Path]:  # fmt: skip
    """Write the weights of a checkpoint as safetensors files that ``from_pretrained`` and ``load_pretrained`` read.

    One process calls it, at any time: it reads ``checkpoint``, which ``gz.save`` wrote (or the newest in a folder of
    them), one tensor at a time, and needs no Graph.

    module: the attribute whose weights are wanted, if there are several.  dtype: what floating tensors are cast to.
    config: something with a ``save_pretrained(path)`` of its own, as ``model.config`` of transformers.
    shard_bytes: of the largest file.  Of tied tensors the first is written, as those readers expect.

    Returns the files.  Raises CheckpointError for a checkpoint that is not what was saved.
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
