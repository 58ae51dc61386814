"""What one checkpoint in files consists of, as of now."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphzero._compat import storage_id
from graphzero.checkpoint.files import blocks, save_plan
from graphzero.checkpoint.files.index import CheckpointIndex
from graphzero.checkpoint.files.json_values import to_json
from graphzero.checkpoint.files.save_plan import SavePlan
from graphzero.checkpoint.state_dict import collect
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.shards import local_of
from graphzero.step.user_graph import UserGraph

EXTRA = "extra"


class Snapshot:
    """All of one.  outline: what there is to save, see ``collect.outline``.  extra: of the user.

    is_hashed: whether of frozen parameters only hashes are kept.

    Raises CheckpointError for values that are no whole step's, and for what no file can hold.
    """

    def __init__(self, source: UserGraph, outline: Mapping[str, Any], path: Path, extra: Any, is_hashed: bool) -> None:
        self._path = path
        state = source.state()
        torn = state.why_torn()
        if torn:
            raise CheckpointError(f"{source.name} is not saved: {torn}")
        self.tensors: dict[str, Tensor] = {}
        self._state = _in_words(collect.plain(outline), "", self._keep)
        self._extra = _in_words(extra, EXTRA, self._keep)
        self.step = int(outline["random"]["step"])
        self.placement = source.placement
        found = state.tensors().values()
        frozen = {storage_id(local_of(x.tensor)) for x in found if x.kind == "param" and not x.tensor.requires_grad}
        self.layout: SavePlan = save_plan.make_save_plan(
            self.tensors, self.placement, lambda _: state.program is None,
            lambda name: is_hashed and name.startswith("modules.") and self._storage(name) in frozen,
        )  # fmt: skip
        self.position = save_plan.rank_position(self.placement)

    def _keep(self, x: Tensor, path: str) -> str:
        name = path.removeprefix(".")
        while name in self.tensors:  # names with dots can come to the same
            name += "'"
        self.tensors[name] = x
        return name

    def _storage(self, name: str) -> int:
        return storage_id(local_of(self.tensors[name]))

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        values = {f"values of {part}": json.dumps(held) for part, held in self._state.items()}
        ties = {f"tie of {name}": held.same_as for name, held in self.layout.stored.items() if held.same_as}
        own = {name: blocks.sha256_of(local_of(x)) for name, x in self.tensors.items() if name.startswith(f"{EXTRA}.")}
        facts = {"path": str(self._path), EXTRA: json.dumps(self._extra), **values, **ties}
        return {
            **facts,
            **collect.describe_tensors(self.tensors),
            **{f"values of {name}": held for name, held in own.items()},
        }

    @property
    def is_first(self) -> bool:
        return self.position == 0

    @property
    def nbytes(self) -> int:
        return sum(save_plan.nbytes(self.layout, position) for position in range(len(self.layout.files)))

    def chunks(self) -> list[Tensor]:
        return save_plan.local_views(self.layout.files[self.position], self.tensors)

    def frozen(self) -> list[str]:
        """Hashes of what this rank only hashes, in order."""
        return [
            blocks.sha256_of(chunk) for chunk in save_plan.local_views(self.layout.frozen[self.position], self.tensors)
        ]

    def staged(self) -> list[Tensor]:
        """Copies of them, which the next step does not write to."""
        return [chunk.detach().to("cpu", copy=True).contiguous() for chunk in self.chunks()]

    def index(self, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> CheckpointIndex:
        made_by = {"torch": torch.__version__, "python": platform.python_version(), "ranks": self.placement.size}
        return CheckpointIndex(self.step, tensors, files, self._state, self._extra, made_by)


def _in_words(x: Any, path: str, tensor: Callable[[Tensor, str], str]) -> Any:
    try:
        return to_json(x, path, tensor)
    except RecursionError:
        raise CheckpointError(f"{path or 'the state'} contains itself, or is nested too deeply to be saved") from None
