"""A checkpoint read from files into the tensors of a Graph: judged as a whole first, then straight to where they stand.

Nothing is made whole on the way, and no rank needs another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture import LOSS_SCALE
from graphzero.checkpoint import frozen_hashes
from graphzero.checkpoint.expected_sbp import ExpectedSbp
from graphzero.checkpoint.files import blocks
from graphzero.checkpoint.files.index import NAME as INDEX
from graphzero.checkpoint.files.index import CheckpointIndex
from graphzero.checkpoint.files.json_values import MALFORMED, from_json
from graphzero.checkpoint.files.read_chunks import TensorRead, read_tensors
from graphzero.checkpoint.state_dict import collect, loading
from graphzero.checkpoint.state_dict.loss_scale import moved_in
from graphzero.checkpoint.state_dict.validate import StateKeys, validate_state_dict
from graphzero.errors import CheckpointError
from graphzero.runtime.state import materialize, partial_update
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.shards import local_of


class RestoreOperation:
    """One checkpoint, for one Graph.

    layouts: of what nobody holds yet.
    Raises CheckpointError for files that are not what was saved, and for what does not fit.
    """

    def __init__(
        self, where: Path, index: CheckpointIndex, state: State, schedulers: Sequence[Any], strict: bool,
        expected_states: StateKeys, layouts: ExpectedSbp,
    ) -> None:  # fmt: skip
        for name, summed in index.files.items():
            blocks.check_file_size(where / name, summed)
        self._where, self._index, self._state, self._layouts = where, index, state, layouts
        self._strict = strict
        self._stand_ins: dict[int, tuple[Tensor, str]] = {}  # by id: for the values of a tensor in the files
        try:
            given = collect.with_metadata(from_json(index.state, self._given_in(index.state)))
            self.extra = from_json(index.extra, self._whole)
        except MALFORMED as error:
            raise CheckpointError(f"{where / INDEX} has been altered: {type(error).__name__}: {error}") from error
        sd = moved_in(given, state.modules)
        self.checked = validate_state_dict(sd, state, schedulers, strict, expected_states, materializes=True)
        self._frozen = {
            f"modules.{attribute}.{key}": x
            for attribute, module in state.modules.items()
            for key, x in module.state_dict().items()
            if isinstance(x, Tensor) and self._is_hashed(f"modules.{attribute}.{key}")
        }
        frozen_hashes.check_present(index.tensors, self._frozen, str(where))

    def _is_hashed(self, name: str) -> bool:
        return name in self._index.tensors and bool(self._index.tensors[name].hashes)

    def different(self) -> list[str]:
        """Frozen parameters whose values are not those that were saved.  Every rank calls it."""
        state = self._state
        return frozen_hashes.different(self._index.tensors, self._frozen, state.placement, state.program is None)

    def check(self, names: list[str]) -> None:
        """Raise CheckpointError if some are different."""
        frozen_hashes.refuse(names, str(self._where))

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {str(self._where / INDEX): self._index.sha256}

    def _given_in(self, state: Any) -> Callable[[str], Tensor]:
        """What is given for a tensor by name: a stand-in until it is read, if it is a module's or an optimizer's state
        itself; within other values, as the extra state of a module, and for hyperparameters the tensor."""
        stand_ins = {name: self._stand_in(name) for name in self._index.tensors}
        outline = from_json(state, stand_ins.__getitem__)
        states = [held for optimizer in outline["optimizers"] for held in optimizer["state"].values()]
        tables = [*outline["modules"].values(), outline.get(LOSS_SCALE, {}), *states]
        later = {id(x) for held in tables for x in held.values() if isinstance(x, Tensor)}
        self._stand_ins = {
            id(x): (x, name) for name, x in stand_ins.items() if id(x) in later and not self._index.tensors[name].hashes
        }
        return lambda name: stand_ins[name] if id(stand_ins[name]) in later else self._whole(name)

    def _stand_in(self, name: str) -> Tensor:
        stored = self._index.tensors[name]
        return torch.zeros((), dtype=stored.dtype).expand(stored.shape)

    def _whole(self, name: str) -> Tensor:
        stored = self._index.tensors[name]
        if stored.hashes:
            raise ValueError(f"tensors.{name} has hashes for values, and is no parameter")
        found = torch.empty(stored.shape, dtype=stored.dtype)
        self._read([TensorRead(name, stored, found)])
        return found

    def _wish(self, given: Tensor, into: Tensor) -> TensorRead:
        _, name = self._stand_ins[id(given)]
        return TensorRead(name, self._index.tensors[name], into)

    def _read(self, wishes: list[TensorRead]) -> None:
        with torch.no_grad():
            read_tensors(wishes, self._where, self._index.files, self._state.placement)

    # ---- writing

    def run(self, state: State, schedulers: Sequence[Any]) -> None:
        with loading.written_whole(state, "gz.load()"), torch.no_grad():
            self._wake()
            states = dict(self._states())
            wishes = [self._wish(given, into) for given, into in states.values()]
            wishes += [wish for name, module in state.modules.items() for wish in self._of_module(name, module)]
            self._read(wishes)
            for name, module in state.modules.items():
                self._finish_module(name, module)
            found = state.tensors()
            for i, entry in enumerate(self.checked.optimizers):
                loading.load_optimizer(i, entry, state, found, lambda i, path, key, given, _: (
                    states[i, path, key][1] if isinstance(given, Tensor) else copy.deepcopy(given)))  # fmt: skip
            loading.load_rest(self.checked, state, schedulers)
        partial_update.heal(wish.into for wish in wishes)
        for name, module in state.modules.items():
            if name in self.checked.modules:
                partial_update.heal(entry.tensor for entry in tree.tensors({"": module}).values())

    def _wake(self) -> None:
        """Allocate what is on the meta device and in the files."""
        state, given = self._state, self.checked.modules
        found = [entry for entry in materialize.lifeless(state) if _is_given(entry.path, given)]
        nds = {entry.path: self._layouts.of_tensor(entry) for entry in found}
        materialize.put(state, {e.path: (materialize.allocated(e, nds[e.path], state), nds[e.path]) for e in found})

    def _states(self) -> Iterator[tuple[tuple[int, str, str], tuple[Tensor, Tensor]]]:
        """(optimizer, path, key) -> what stands in for its values, and the tensor that is to have them."""
        found = self._state.tensors()
        for i, entry in enumerate(self.checked.optimizers):
            for path, held in entry["state"].items():
                current = self._state.optimizers[i].state.get(found[path].tensor, {})
                for key, given in held.items():
                    if isinstance(given, Tensor):
                        yield (i, path, key), (given, self._room(i, path, key, given, current.get(key)))

    def _room(self, optimizer: int, path: str, key: str, given: Tensor, have: Any) -> Tensor:
        """The tensor that stands here if it is of the type of ``given``, else a new one."""
        shape, dtype = tuple(given.shape), given.dtype
        if isinstance(have, Tensor) and not have.is_meta and tuple(have.shape) == shape and have.dtype is dtype:
            return have
        if not shape:
            return torch.zeros((), dtype=dtype)
        known = isinstance(have, Tensor) and tuple(have.shape) == shape
        nd = self._state.nd_of(have) if known else self._layouts.of_state(optimizer, path, key, shape)
        return filled(shape, dtype, 0.0, nd, self._state.world)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[TensorRead]:
        """What is read straight into a module's tensors: all of it, if its state dict is these tensors."""
        given = self.checked.modules.get(name, {})
        have = module.state_dict()
        if _is_own(module, have):
            for key, x in have.items():
                if isinstance(x, Tensor) and id(given.get(key)) in self._stand_ins:  # else it stays as it is here
                    yield self._wish(given[key], x)

    def _finish_module(self, name: str, module: nn.Module) -> None:
        """Let a module load what is no tensor of it, and run the hooks of it."""
        given, have = self.checked.modules.get(name), module.state_dict()
        if given is None:
            return
        tensors_alone = all(isinstance(x, Tensor) for key, x in have.items() if key in given)
        if tensors_alone and _is_own(module, have) and not _compat.loads_by_code(module):
            return
        made: Any = copy.copy(given)
        for key, x in given.items():
            if isinstance(x, Tensor):
                made[key] = (
                    have[key] if _is_own(module, have) and key in have else self._whole(self._stand_ins[id(x)][1])
                )
        loading.load_module(module, made, self._state, self._strict)


def _is_given(path: str, modules: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a checkpoint has the parameter or buffer ``path``, "attribute.fqn"."""
    attribute, _, name = path.partition(".")
    return name in modules.get(attribute, {})


def _is_own(module: nn.Module, have: Mapping[str, Any]) -> bool:
    """Whether the tensors of a module's state dict are its own, not made by a hook."""
    own = {_where(entry.tensor) for entry in tree.tensors({"": module}).values()}
    return all(_where(x) in own for x in have.values() if isinstance(x, Tensor))


def _where(x: Tensor) -> tuple[Any, ...]:
    local = local_of(x)
    return _compat.storage_id(local), local.storage_offset(), x.shape, local.stride()
