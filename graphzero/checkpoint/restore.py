"""A checkpoint read from files into the tensors of a Graph: checked as a whole first, then straight to where they are.

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
from graphzero.checkpoint.state_dict.collect import move_into_modules
from graphzero.checkpoint.state_dict.validate import StateKeys, validate_state_dict
from graphzero.errors import CheckpointError
from graphzero.runtime.state import materialize, partial_update
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.layout import filled
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.shards import memory_key
from graphzero.runtime.tensors.stage_tensors import home_of


class RestoreOperation:
    """The loading of one checkpoint into one Graph.

    In its state dict stand-ins, tensors without memory, take the place of values until these are read.

    expected_sbp: of tensors that the Graph does not hold yet.
    Raises CheckpointError for files that are not what was saved, and for a state dict that does not fit.
    """

    def __init__(
        self, where: Path, index: CheckpointIndex, state: State, schedulers: Sequence[Any], strict: bool,
        expected_states: StateKeys, expected_sbp: ExpectedSbp,
    ) -> None:  # fmt: skip
        for name, checksums in index.files.items():
            blocks.check_file_size(where / name, checksums)
        self._where, self._index, self._state, self._schedulers = where, index, state, schedulers
        self._strict, self._expected_sbp = strict, expected_sbp
        self._stand_ins: dict[int, tuple[Tensor, str]] = {}  # id -> stand-in, and its name in the files
        try:
            given = collect.from_plain_dicts(from_json(index.state, self._stand_ins_or_values(index.state)))
            self.extra = from_json(index.extra, self._read_tensor)
        except MALFORMED as error:
            raise CheckpointError(f"{where / INDEX} has been altered: {type(error).__name__}: {error}") from error
        sd = move_into_modules(given, state.modules)
        self.valid = validate_state_dict(sd, state, schedulers, strict, expected_states, materializes=True)
        self._frozen = {
            name: x
            for attribute, module in state.modules.items()
            for name, x in ((f"modules.{attribute}.{key}", x) for key, x in module.state_dict().items())
            if isinstance(x, Tensor) and name in index.tensors and index.tensors[name].hashes
        }
        frozen_hashes.check_hashable(index.tensors, self._frozen, str(where))

    def find_changed_frozen(self) -> list[str]:
        """Frozen parameters whose values are not those that were saved.  Every rank calls it."""
        state = self._state
        return frozen_hashes.find_changed(
            self._index.tensors, self._frozen, state.ranks.placement, state.program is None
        )

    def describe(self) -> dict[str, str]:
        """Text by name of what must be the same on all ranks."""
        return {str(self._where / INDEX): self._index.sha256}

    def _stand_ins_or_values(self, state: Any) -> Callable[[str], Tensor]:
        """For a name in the files: a stand-in, if it is a tensor of a module or an optimizer's state itself; its values
        if it is within other values, as the extra state of a module, or a hyperparameter."""
        tensors = self._index.tensors
        stand_ins = {name: torch.zeros((), dtype=x.dtype).expand(x.shape) for name, x in tensors.items()}
        outline = from_json(state, stand_ins.__getitem__)
        states = [state for optimizer in outline["optimizers"] for state in optimizer["state"].values()]
        tables = [*outline["modules"].values(), outline.get(LOSS_SCALE, {}), *states]
        read_later = {id(x) for table in tables for x in table.values() if isinstance(x, Tensor)}
        self._stand_ins = {
            id(x): (x, name) for name, x in stand_ins.items() if id(x) in read_later and not tensors[name].hashes
        }
        return lambda name: stand_ins[name] if id(stand_ins[name]) in read_later else self._read_tensor(name)

    def _read_tensor(self, name: str) -> Tensor:
        stored = self._index.tensors[name]
        if stored.hashes:
            raise ValueError(f"tensors.{name} has hashes for values, and is not a parameter")
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        self._read_tensors([TensorRead(name, stored, whole)])
        return whole

    def _read_into(self, stand_in: Tensor, into: Tensor) -> TensorRead:
        name = self._stand_ins[id(stand_in)][1]
        return TensorRead(name, self._index.tensors[name], into)

    def _read_tensors(self, reads: list[TensorRead]) -> None:
        with torch.no_grad():
            read_tensors(reads, self._where, self._index.files, self._state.placement)

    # ---- writing

    def load_values(self) -> None:
        state, valid = self._state, self.valid
        with loading.all_or_partial(state, "gz.load()"), torch.no_grad():
            self._materialize()
            states = dict(self._optimizer_states())
            reads = [self._read_into(stand_in, into) for stand_in, into in states.values()]
            reads += [read for name, module in state.modules.items() for read in self._module_reads(name, module)]
            self._read_tensors(reads)
            for name, module in state.modules.items():
                self._load_other_values(name, module)
            tensors = state.tensors()
            for i, entry in enumerate(valid.optimizers):
                loading.load_optimizer(i, entry, state, tensors, lambda i, path, key, given, _: (
                    states[i, path, key][1] if isinstance(given, Tensor) else copy.deepcopy(given)))  # fmt: skip
            loading.load_schedulers_and_random(valid, state, self._schedulers)
        partial_update.clear_marks(read.into for read in reads)
        for name, module in state.modules.items():
            if name in valid.modules:
                partial_update.clear_marks(entry.tensor for entry in tree.tensors({"": module}).values())

    def _materialize(self) -> None:
        """Allocate tensors on the meta device whose values are in the files."""
        state, modules = self._state, self.valid.modules
        paths = {f"{attribute}.{key}" for attribute, given in modules.items() for key in given}
        entries = [entry for entry in materialize.meta_tensors(state) if entry.path in paths]
        expected = self._expected_sbp
        materialize.allocate_tensors(state, {e.path: (e, expected.of_tensor(e)) for e in entries}, expected.homes)

    def _optimizer_states(self) -> Iterator[tuple[tuple[int, str, str], tuple[Tensor, Tensor]]]:
        """(optimizer, path, key) -> stand-in, and the tensor that its values are read into."""
        tensors = self._state.tensors()
        for i, entry in enumerate(self.valid.optimizers):
            for path, states in entry["state"].items():
                current = self._state.optimizers[i].state.get(tensors[path].tensor, {})
                for key, given in states.items():
                    if isinstance(given, Tensor):
                        yield (i, path, key), (given, self._state_tensor(i, path, key, given, current.get(key)))

    def _state_tensor(self, optimizer: int, path: str, key: str, given: Tensor, current: Any) -> Tensor:
        """The current tensor if it is of the type of ``given``, else a new one."""
        shape, dtype = tuple(given.shape), given.dtype
        same_shape = current if isinstance(current, Tensor) and tuple(current.shape) == shape else None
        if same_shape is not None and not same_shape.is_meta and same_shape.dtype is dtype:
            return same_shape
        if not shape:
            return torch.zeros((), dtype=dtype)
        expected = self._expected_sbp.of_state
        nd = expected(optimizer, path, key, shape) if same_shape is None else self._state.nd_of(same_shape)
        home = self._expected_sbp.homes.get(path)
        if same_shape is not None:
            home = home_of(same_shape, self._state.ranks.placement)
        return filled(shape, dtype, 0.0, nd, self._state.world, home)

    def _module_reads(self, name: str, module: nn.Module) -> Iterator[TensorRead]:
        """Reads straight into a module's tensors: of all of them, if its state dict consists of these."""
        given, current = self.valid.modules.get(name, {}), tree.module_state_dict(module)
        if _holds_own_tensors(module, current):
            for key, x in current.items():
                if isinstance(x, Tensor) and id(given.get(key)) in self._stand_ins:  # else it stays as it is here
                    yield self._read_into(given[key], x)

    def _load_other_values(self, name: str, module: nn.Module) -> None:
        """Let a module load values that are not its tensors, and run its hooks."""
        given, current = self.valid.modules.get(name), tree.module_state_dict(module)
        if given is None:
            return
        is_own = _holds_own_tensors(module, current)
        has_only_tensors = all(isinstance(x, Tensor) for key, x in current.items() if key in given)
        if has_only_tensors and is_own and not _compat.loads_by_code(module):
            return
        values: Any = copy.copy(given)
        for key, x in given.items():
            if isinstance(x, Tensor):
                is_read = is_own and key in current
                values[key] = current[key] if is_read else self._read_tensor(self._stand_ins[id(x)][1])
        loading.load_module(module, values, self._state, self._strict)


def _holds_own_tensors(module: nn.Module, current: Mapping[str, Any]) -> bool:
    """Return whether the tensors of a module's state dict are its own, not made by a hook."""
    own = {memory_key(entry.tensor) for entry in tree.tensors({"": module}).values()}
    return all(memory_key(x) in own for x in current.values() if isinstance(x, Tensor))
