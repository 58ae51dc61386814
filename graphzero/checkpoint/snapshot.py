"""The contents of one checkpoint in files, at the time of the call that saves it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphzero._compat import storage_id
from graphzero.checkpoint.files import blocks, save_plan
from graphzero.checkpoint.files.index import CheckpointIndex
from graphzero.checkpoint.files.json_values import to_json
from graphzero.checkpoint.state_dict import collect
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.shards import local_of, position_of
from graphzero.step.user_graph import UserGraph

EXTRA = "extra"


class CheckpointSnapshot:
    """Contents of one checkpoint.  outline: see ``collect.outline``.  extra: the user's own.

    is_hashed: whether of frozen parameters only hashes are kept.

    Raises CheckpointError for values that are not those of a whole step, and for what no file can hold.
    """

    def __init__(self, source: UserGraph, outline: Mapping[str, Any], path: Path, extra: Any, is_hashed: bool) -> None:
        state, self._path = source.state(), path
        reason = state.partial_update_reason()
        if reason:
            raise CheckpointError(f"{source.name} is not saved: {reason}")
        self.tensors: dict[str, Tensor] = {}
        self._state = self._to_json(collect.to_plain_dicts(outline), "")
        self._extra = self._to_json(extra, EXTRA)
        self.step = int(outline["random"]["step"])
        self.placement = source.whole_placement
        params = [entry.tensor for entry in state.tensors().values() if entry.kind == "param"]
        frozen = {storage_id(local_of(x)) for x in params if not x.requires_grad} if is_hashed else set()
        self.plan = save_plan.make_save_plan(
            self.tensors, self.placement, state.program is None,
            lambda name: name.startswith("modules.") and storage_id(local_of(self.tensors[name])) in frozen,
        )  # fmt: skip
        self.position = position_of(self.placement)

    def _to_json(self, x: Any, path: str) -> Any:
        try:
            return to_json(x, path, self._add_tensor)
        except RecursionError:
            what = path or "the state"
            raise CheckpointError(f"{what} contains itself, or is nested too deeply to be saved") from None

    def _add_tensor(self, x: Tensor, path: str) -> str:
        name = path.removeprefix(".")
        while name in self.tensors:  # two paths of keys with dots can be the same text
            name += "'"
        self.tensors[name] = x
        return name

    def describe(self) -> dict[str, str]:
        """Text by name of what must be the same on all ranks."""
        facts = {"path": str(self._path), EXTRA: json.dumps(self._extra)}
        facts |= {f"values of {part}": json.dumps(values) for part, values in self._state.items()}
        facts |= {f"tie of {name}": stored.same_as for name, stored in self.plan.stored.items() if stored.same_as}
        facts |= collect.describe_tensors(self.tensors)
        extra = {name: x for name, x in self.tensors.items() if name.startswith(f"{EXTRA}.")}
        return facts | {f"values of {name}": blocks.sha256_of(local_of(x)) for name, x in extra.items()}

    @property
    def nbytes(self) -> int:
        return sum(map(self.plan.file_bytes, range(len(self.plan.files))))

    def chunks(self) -> list[Tensor]:
        """Views of what this rank writes, in order."""
        return save_plan.local_views(self.plan.files[self.position], self.tensors)

    def hash_frozen(self) -> list[str]:
        """Hashes of the chunks that this rank only hashes, in order."""
        return [blocks.sha256_of(x) for x in save_plan.local_views(self.plan.frozen[self.position], self.tensors)]

    def copy_chunks(self) -> list[Tensor]:
        """Copies in host memory of what this rank writes, which the next step does not change."""
        return [chunk.detach().to("cpu", copy=True).contiguous() for chunk in self.chunks()]

    def make_index(self, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> CheckpointIndex:
        made_by = {"torch": torch.__version__, "python": platform.python_version(), "ranks": self.placement.size}
        return CheckpointIndex(self.step, tensors, files, self._state, self._extra, made_by)
