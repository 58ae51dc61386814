"""``gz.load_pretrained``: weights of safetensors files; each rank reads the bytes of its own pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture import LOSS_SCALE
from graphzero.checkpoint.files.chunks import whole_chunk
from graphzero.checkpoint.files.folder import absolute_path
from graphzero.checkpoint.files.index import StoredChunk, StoredTensor
from graphzero.checkpoint.files.json_values import MALFORMED
from graphzero.checkpoint.files.read_chunks import TensorRead, read_tensors
from graphzero.checkpoint.state_dict import loading
from graphzero.checkpoint.state_dict.comparison import difference_lines
from graphzero.errors import CheckpointError, ConfigError, hides_frames, shorten_list
from graphzero.graph import Graph
from graphzero.plugins.pretrained.meta_modules import check_values_exist, expected_places
from graphzero.plugins.pretrained.safetensors_header import INDEX, SINGLE, read_entries
from graphzero.runtime.json_file import parse_json
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.materialize import allocate_tensors, meta_tensors
from graphzero.runtime.world.consensus import Topic
from graphzero.serialization import checkpointer_of
from graphzero.step.user_graph import UserGraph

_LOAD = Topic("gz.load_pretrained of {}", "what is loaded", "Every rank must read the same files")
Rename = Mapping[str, str] | Callable[[str], str | None] | None


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
    checkpointer = checkpointer_of(graph, "load_pretrained", "loaded")
    source, program = checkpointer.source, checkpointer.program
    ranks, state = source.ranks, source.state()
    check_values_exist(source.name)
    with ranks.together(f"gz.load_pretrained of {source.name}"):
        name = ranks.agree_on(_LOAD, lambda: _module_name(source, module), lambda name: {"module": name})
        destination = source.modules[name]
        given = ranks.agree_on(_LOAD, lambda: _fitting_tensors(where, destination, rename, strict), _describe)
        if not source.placement.virtual:
            state.ensure_world()
        with loading.all_or_partial(state, "gz.load_pretrained()"), torch.no_grad():
            read_ids = {id(x) for key, x in destination.state_dict(keep_vars=True).items() if key in given}
            nds, homes = expected_places(source, program)
            entries = [entry for entry in meta_tensors(state) if id(entry.tensor) in read_ids]
            allocate_tensors(state, {entry.path: (entry, nds[entry.path]) for entry in entries}, homes)
            current = _tensors_of(destination, keep_vars=False)
            reads = [TensorRead(key, stored, current[key]) for key, stored in given.items()]
            read_tensors(reads, Path(), {}, source.placement)
        partial_update.clear_marks(_tensors_of(destination).values())


def _tensors_of(module: nn.Module, keep_vars: bool = True) -> dict[str, Tensor]:
    return {key: x for key, x in module.state_dict(keep_vars=keep_vars).items() if isinstance(x, Tensor)}


def _module_name(source: UserGraph, attribute: str | None) -> str:
    names = [name for name in source.modules if name != LOSS_SCALE]
    if attribute is None and len(names) == 1:
        return names[0]
    if attribute not in names:
        raise ConfigError(
            f"gz.load_pretrained(module={attribute!r}): say which module of {source.name} the files are of; it has "
            f"{', '.join(names) or 'none'}"
        )
    return attribute


def _fitting_tensors(path: Path, module: nn.Module, rename: Rename, strict: bool) -> dict[str, StoredTensor]:
    """Tensors of the files that a module takes, by its own names.  Raises CheckpointError for what does not fit."""
    given: dict[str, StoredTensor] = {}
    for old, stored in _read_entries_of(path).items():
        new = _renamed(old, rename)
        if new in given:
            raise CheckpointError(f"{path}: rename= makes '{new}' of two names, of which one is '{old}'")
        given |= {} if new is None else {new: stored}
    current = _tensors_of(module)
    fitting = {key: stored for key, stored in given.items() if key in current}
    covered = {id(current[key]) for key in fitting}
    missing = [key for key, x in current.items() if key not in given and id(x) not in covered]
    wrong = [
        f"{key} is {list(current[key].shape)} here, {list(stored.shape)} in the files"
        for key, stored in fitting.items()
        if tuple(current[key].shape) != stored.shape
    ]  # fmt: skip
    wrong += [
        f"{key} is {current[key].dtype} here, {stored.dtype} in the files"
        for key, stored in fitting.items()
        if not torch.can_cast(stored.dtype, current[key].dtype)
    ]
    lines = difference_lines(missing, [key for key in given if key not in current], wrong, strict)
    if lines:
        raise CheckpointError(
            f"{path} does not fit this {type(module).__name__}; nothing was loaded{lines}\n  rename= maps "
            'names of the files to those of the module, {"old prefix": "new prefix"}; strict=False loads what fits'
        )
    return fitting


def _renamed(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    fitting = [old for old in rename if name.startswith(old)]
    old = max(fitting, key=len, default=None)
    return name if old is None else rename[old] + name[len(old) :]


def _describe(given: Mapping[str, StoredTensor]) -> dict[str, str]:
    return {key: f"{stored.dtype} {list(stored.shape)} at {stored.pieces}" for key, stored in given.items()}


def _read_entries_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder that Hugging Face's ``save_pretrained`` wrote, by name."""
    index, single = path / INDEX, path / SINGLE
    try:
        is_folder, has_index, is_single = path.is_dir(), index.is_file(), single.is_file()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not is_folder:
        return _tensors_in(path)
    if has_index:
        return _of_shards(index)
    if is_single:
        return _tensors_in(single)
    raise CheckpointError(
        f"{path} holds neither model.safetensors.index.json nor model.safetensors; files of other formats "
        "(.bin, .pt) may hold code and are not read: save the model once with safe_serialization=True"
    )


def _tensors_in(file: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(entry.dtype, entry.shape, (StoredChunk(str(file), entry.start, whole_chunk(entry.shape)),))
        for name, entry in read_entries(file).items()
    }


def _of_shards(index: Path) -> dict[str, StoredTensor]:
    """Read each tensor from the file that the index names for it."""
    try:
        files = dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
            raise ValueError("it names files that are not in its folder")
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files: {type(error).__name__}: {error}"
        ) from error
    shards = {file: _tensors_in(index.parent / file) for file in sorted(set(files.values()))}
    absent = [f"'{name}' in {file}" for name, file in files.items() if name not in shards[file]]
    if absent:
        raise CheckpointError(f"{index} names tensors that are not there: {shorten_list(absent)}")
    return {name: shards[file][name] for name, file in files.items()}
