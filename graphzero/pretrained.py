"""Models that are too large for one rank: brought to life from the meta device, and read from pretrained files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphzero import _compat
from graphzero.checkpoint.checkpointer import Checkpointer
from graphzero.checkpoint.files.export import export
from graphzero.checkpoint.files.folder import path_of
from graphzero.errors import ConfigError, hides_frames
from graphzero.graph import Graph


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
    _of(graph, "materialize").materialize(init)


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
    where = path_of(path, "gz.load_pretrained")
    _of(graph, "load_pretrained").load_pretrained(where, module, rename, strict)


def _of(graph: Any, name: str) -> Checkpointer:
    if not isinstance(graph, Graph):
        raise ConfigError(
            f"gz.{name} takes a Graph first, not a {type(graph).__name__}: its placement says who holds what"
        )
    return graph.checkpoints("loaded")


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
        raise ConfigError(f"gz.save_pretrained(shard_bytes={shard_bytes!r}): it is the bytes of the largest file")
    asked = "gz.save_pretrained"
    out = path_of(path, asked)
    made = export(path_of(checkpoint, asked), out, module, dtype, shard_bytes)
    if config is not None:
        config.save_pretrained(out)
    return made
