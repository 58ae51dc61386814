"""Modules that begin on the meta device: initialised, or loaded from safetensors files, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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
from graphzero.errors import CheckpointError, ConfigError
from graphzero.runtime.host_memory import freed_at_once
from graphzero.runtime.json_file import parse_json
from graphzero.runtime.state import materialize as meta_tensors
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.deferred_init import Initialising, NoMemory, default_init, stood_in
from graphzero.runtime.state.modules import Found
from graphzero.runtime.state.placement_checks import check_trained_apart
from graphzero.runtime.state.state import State
from graphzero.runtime.world.consensus import Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.step.user_graph import UserGraph

_INIT = Topic("gz.materialize of {}", "what comes to life", "Every rank must hold the same modules")
_LOAD = Topic("gz.load_pretrained of {}", "what is loaded", "Every rank must read the same files")
_SHOWN = 6
Names = Callable[[str], str | None]


def materialize(source: UserGraph, init: Callable[[nn.Module], Any] | None) -> None:
    """See ``gz.materialize``."""
    ranks, state = source.ranks, source.state()
    _check_world(source.name)
    with ranks.together(f"gz.materialize of {source.name}"):
        entries = meta_tensors.lifeless(state)
        nds = ranks.agree_on(_INIT, lambda: _nds(source, state), lambda nds: {k: str(nd) for k, nd in nds.items()})
        if not source.placement.virtual:
            state.ensure_world()
        own = torch.get_rng_state()
        is_first = source.placement.virtual or not ranks.active or state.world.local_ranks[0] == 0
        torch.set_rng_state(ranks.share(torch.get_rng_state))
        try:
            with freed_at_once(), stood_in(entries, state.world.device) as stand_ins, torch.no_grad():
                placed = {entry.path for entry in entries if isinstance(entry.tensor, DTensor)}
                with Initialising(stand_ins, nds, placed, source.placement) as mode, NoMemory(mode):
                    for module in source.modules.values():
                        module.apply(init or _default(entries))
                made = ranks.agree_on(_INIT, mode.result, lambda _: {})
        finally:
            if not is_first:
                torch.set_rng_state(own)
        meta_tensors.put(state, made)


def load_pretrained(
    source: UserGraph, path: Path, attribute: str | None, rename: Mapping[str, str] | Names | None, strict: bool
) -> None:
    """See ``gz.load_pretrained``."""
    ranks, state = source.ranks, source.state()
    _check_world(source.name)
    with ranks.together(f"gz.load_pretrained of {source.name}"):
        name = ranks.agree_on(_LOAD, lambda: _module_name(source, attribute), lambda name: {"module": name})
        module = source.modules[name]
        given = ranks.agree_on(_LOAD, lambda: _given(path, module, rename, strict), _facts)
        if not source.placement.virtual:
            state.ensure_world()
        with loading.written_whole(state, "gz.load_pretrained()"), torch.no_grad():
            _wake(source, state, module, given)
            have = {key: x for key, x in module.state_dict().items() if isinstance(x, Tensor)}
            read_tensors(
                [TensorRead(key, stored, have[key]) for key, stored in given.items()], Path(), {}, source.placement
            )
        partial_update.heal(x for x in module.state_dict(keep_vars=True).values() if isinstance(x, Tensor))


def _default(entries: Sequence[Found]) -> Callable[[nn.Module], None]:
    """``default_init`` of the modules in which these stand."""
    theirs = {id(module) for entry in entries for module, _ in entry.places}
    return lambda module: default_init(module) if id(module) in theirs else None


def _check_world(name: str) -> None:
    if has_fake_world():
        raise ConfigError(f"{name} has no values in a fake world: its other ranks are not there; compile() needs none")


def _nds(source: UserGraph, state: State) -> dict[str, Any]:
    layouts, entries = ExpectedSbp(source, {}), meta_tensors.lifeless(state)
    check_trained_apart(entries)
    return {entry.path: layouts.of_tensor(entry) for entry in entries}


def _wake(source: UserGraph, state: State, module: nn.Module, given: Mapping[str, StoredTensor]) -> None:
    """Allocate what is on the meta device and in the files."""
    held = {id(x) for key, x in module.state_dict(keep_vars=True).items() if key in given}
    nds = _nds(source, state)
    found = [entry for entry in meta_tensors.lifeless(state) if id(entry.tensor) in held]
    meta_tensors.put(state, {e.path: (meta_tensors.allocated(e, nds[e.path], state), nds[e.path]) for e in found})


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


def _given(
    path: Path, module: nn.Module, rename: Mapping[str, str] | Names | None, strict: bool
) -> dict[str, StoredTensor]:
    """What of the files a module takes, by its own names.  Raises CheckpointError for what does not fit."""
    found: dict[str, StoredTensor] = {}
    for old, stored in files_of(path).items():
        new = _renamed(old, rename)
        if new in found:
            raise CheckpointError(f"{path}: rename= makes '{new}' of two names, of which one is '{old}'")
        found |= {} if new is None else {new: stored}
    have = {key: x for key, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    lines = []
    covered = {id(have[key]) for key in found if key in have}
    missing = [key for key, x in have.items() if key not in found and id(x) not in covered]
    unexpected = [key for key in found if key not in have]
    wrong = [
        f"{key} is {list(have[key].shape)} here, {list(stored.shape)} in the files"
        for key, stored in found.items()
        if key in have and tuple(have[key].shape) != stored.shape
    ]  # fmt: skip
    wrong += [
        f"{key} is {have[key].dtype} here, {stored.dtype} in the files"
        for key, stored in found.items()
        if key in have and not torch.can_cast(stored.dtype, have[key].dtype)
    ]
    kinds = [("missing", missing), ("unexpected", unexpected)] if strict else []
    for kind, names in [*kinds, ("wrong", wrong)]:
        if names:
            more = f" ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"\n  {kind}: {', '.join(names[:_SHOWN])}{more}")
    if lines:
        raise CheckpointError(
            f"{path} does not fit this {type(module).__name__}; nothing was loaded{''.join(lines)}\n  rename= maps "
            'names of the files to those of the module, {"old prefix": "new prefix"}; strict=False loads what fits'
        )
    return {key: stored for key, stored in found.items() if key in have}


def _renamed(name: str, rename: Mapping[str, str] | Names | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    fitting = [old for old in rename if name.startswith(old)]
    old = max(fitting, key=len, default=None)
    return name if old is None else rename[old] + name[len(old) :]


def _facts(given: Mapping[str, StoredTensor]) -> dict[str, str]:
    return {key: f"{stored.dtype} {list(stored.shape)} at {stored.pieces}" for key, stored in given.items()}


def files_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a folder that Hugging Face's ``save_pretrained`` wrote, by name."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if not path.is_dir():
        return _tensors_in(path)
    if index.is_file():
        return _of_shards(index)
    if single.is_file():
        return _tensors_in(single)
    raise CheckpointError(
        f"{path} holds neither model.safetensors.index.json nor model.safetensors; files of other formats "
        "(.bin, .pt) may hold code and are not read: save the model once with safe_serialization=True"
    )


def _tensors_in(file: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(entry.dtype, entry.shape, (StoredChunk(str(file), entry.start, whole_chunk(entry.shape)),))
        for name, entry in safetensors.entries(file).items()
    }


def _of_shards(index: Path) -> dict[str, StoredTensor]:
    """Each tensor from the file that the index names for it."""
    try:
        names = dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
            raise ValueError("it names files that do not stand beside it")
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}") from error
    shards = {file: _tensors_in(index.parent / file) for file in sorted(set(names.values()))}
    absent = [f"'{name}' in {file}" for name, file in names.items() if name not in shards[file]]
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise CheckpointError(f"{index} names tensors that are not there: {', '.join(absent[:_SHOWN])}{more}")
    return {name: shards[file][name] for name, file in names.items()}
