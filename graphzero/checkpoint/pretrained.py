"""Modules that begin on the meta device: initialised, or loaded from safetensors files, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphzero.capture import LOSS_SCALE
from graphzero.checkpoint.expected_sbp import ExpectedSbp
from graphzero.checkpoint.files import safetensors
from graphzero.checkpoint.files.chunks import whole_chunk
from graphzero.checkpoint.files.index import StoredChunk, StoredTensor
from graphzero.checkpoint.files.json_values import MALFORMED
from graphzero.checkpoint.files.read_chunks import TensorRead, read_tensors
from graphzero.checkpoint.state_dict import loading
from graphzero.checkpoint.state_dict.comparison import difference_lines
from graphzero.errors import CheckpointError, ConfigError, shorten_list
from graphzero.runtime.host_memory import freed_at_once
from graphzero.runtime.json_file import parse_json
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.deferred_init import DeferredInit, NoMemoryAccess, default_init, stand_ins_for
from graphzero.runtime.state.materialize import allocate_tensors, meta_tensors, replace_tensors
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.placement_checks import check_trained_apart
from graphzero.runtime.world.consensus import Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.types import Nd
from graphzero.step.program import StepProgram
from graphzero.step.user_graph import UserGraph

_INIT = Topic("gz.materialize of {}", "what is materialised", "Every rank must hold the same modules")
_LOAD = Topic("gz.load_pretrained of {}", "what is loaded", "Every rank must read the same files")
Rename = Mapping[str, str] | Callable[[str], str | None] | None


def materialize(source: UserGraph, program: StepProgram | None, init: Callable[[nn.Module], Any] | None) -> None:
    """See ``gz.materialize``.  program: compiled last, of which stages on ranks of their own are."""
    ranks, state = source.ranks, source.state()
    _check_world(source.name)
    with ranks.together(f"gz.materialize of {source.name}"):
        entries = meta_tensors(state)
        nds, homes = ranks.agree_on(_INIT, lambda: _expected_places(source, program), _describe_places)
        if not source.placement.virtual:
            state.ensure_world()
        own_rng_state = torch.get_rng_state()
        is_first = source.placement.virtual or not ranks.active or dist.get_rank() == int(ranks.placement.ranks.flat[0])
        torch.set_rng_state(ranks.share(torch.get_rng_state))
        try:
            with freed_at_once(), stand_ins_for(entries, state.world.device) as stand_ins, torch.no_grad():
                placed = {entry.path for entry in entries if isinstance(entry.tensor, DTensor)}
                everyone = source.whole_placement
                with DeferredInit(stand_ins, nds, placed, everyone, homes) as mode, NoMemoryAccess(mode):
                    for module in source.modules.values():
                        module.apply(init or _default_init_of(entries))
                values = ranks.agree_on(_INIT, mode.result, lambda _: {})
        finally:
            if not is_first:
                torch.set_rng_state(own_rng_state)
        replace_tensors(state, values)


def load_pretrained(
    source: UserGraph, program: StepProgram | None, path: Path, attribute: str | None, rename: Rename, strict: bool
) -> None:
    """See ``gz.load_pretrained``.  program: as ``materialize`` takes it."""
    ranks, state = source.ranks, source.state()
    _check_world(source.name)
    with ranks.together(f"gz.load_pretrained of {source.name}"):
        name = ranks.agree_on(_LOAD, lambda: _module_name(source, attribute), lambda name: {"module": name})
        module = source.modules[name]
        given = ranks.agree_on(_LOAD, lambda: _fitting_tensors(path, module, rename, strict), _describe)
        if not source.placement.virtual:
            state.ensure_world()
        with loading.all_or_partial(state, "gz.load_pretrained()"), torch.no_grad():
            read_ids = {id(x) for key, x in module.state_dict(keep_vars=True).items() if key in given}
            nds, homes = _expected_places(source, program)
            entries = [entry for entry in meta_tensors(state) if id(entry.tensor) in read_ids]
            allocate_tensors(state, {entry.path: (entry, nds[entry.path]) for entry in entries}, homes)
            current = _tensors_of(module, keep_vars=False)
            reads = [TensorRead(key, stored, current[key]) for key, stored in given.items()]
            read_tensors(reads, Path(), {}, source.placement)
        partial_update.clear_marks(_tensors_of(module).values())


def _tensors_of(module: nn.Module, keep_vars: bool = True) -> dict[str, Tensor]:
    return {key: x for key, x in module.state_dict(keep_vars=keep_vars).items() if isinstance(x, Tensor)}


def _default_init_of(entries: Sequence[ModuleTensor]) -> Callable[[nn.Module], None]:
    """``default_init`` of the modules that hold these tensors."""
    modules = {id(module) for entry in entries for module, _ in entry.places}
    return lambda module: default_init(module) if id(module) in modules else None


def _check_world(name: str) -> None:
    if has_fake_world():
        raise ConfigError(f"{name} has no values in a fake world: its other ranks are not there; compile() needs none")


def _expected_places(source: UserGraph, program: StepProgram | None) -> tuple[dict[str, Nd], dict[str, int]]:
    """SBP of what is on the meta device, by path, and the member of ``pp`` of what not all keep."""
    expected, entries = ExpectedSbp(source, program), meta_tensors(source.state())
    check_trained_apart(entries)
    nds = {entry.path: expected.of_tensor(entry) for entry in entries}
    return nds, {path: home for path, home in expected.homes.items() if path in nds}


def _describe_places(places: tuple[dict[str, Nd], dict[str, int]]) -> dict[str, str]:
    nds, homes = places
    return {path: f"{nd} on {homes.get(path, 'all')}" for path, nd in nds.items()}


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
    for old, stored in read_entries_of(path).items():
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


def read_entries_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder that Hugging Face's ``save_pretrained`` wrote, by name."""
    index, single = path / safetensors.INDEX, path / safetensors.SINGLE
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
        for name, entry in safetensors.read_entries(file).items()
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
