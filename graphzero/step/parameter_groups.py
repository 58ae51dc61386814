"""The numbers and flags of optimizers' parameter groups, read again by every call.

What has not changed is not looked into again: a group's entries are compared by identity, and those that can change in
place are read each time.  Which entries are numbers that a program reads, and which a capture holds fixed, is
``capture``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from graphzero.capture import OptimizerSpec, constants_of_group, counts_in_states, hyperparameters_of_group
from graphzero.ir.value import Role

_PLAIN = (float, int, bool, str, type(None))


class _GroupRecord:
    """Record of one parameter group: its entries, the role and value of its numbers, and its constants."""

    def __init__(self, optimizer: int, spec: OptimizerSpec, index: int) -> None:
        group = spec.optimizer.param_groups[index]
        hypers = hyperparameters_of_group(optimizer, spec.optimizer, index)
        self.names, self.entries = list(group), list(group.values())
        self.numbers = {hyper.role: hyper.value for hyper in hypers}
        self.baked = constants_of_group(optimizer, spec.optimizer, index)
        self._roles = {hyper.key: hyper.role for hyper in hypers}
        self._changes_in_place = any(not _is_plain(x) for name, x in group.items() if name != "params")
        self._changes_in_place |= counts_in_states(spec.optimizer, index)

    def follows(self, group: dict[str, Any]) -> bool:
        """Take over what ``group`` holds now; False where more than run-time numbers has changed."""
        entries = list(group.values())
        if self._changes_in_place or list(group) != self.names:
            return False
        if all(map(is_, entries, self.entries)):
            return True
        for name, entry, last in zip(self.names, entries, self.entries, strict=True):
            if entry is last or name == "params":
                continue
            if type(entry) is not type(last) or type(entry) not in (float, int) or name not in self._roles:
                return False
            role = self._roles[name]
            self.numbers[role] = type(self.numbers[role])(entry)
        self.entries = entries
        return True


class ParameterGroups:
    """The parameter groups of optimizers; ``read_groups`` reads them, the rest says what they were then.

    numbers: the value of every hyperparameter by role.  baked: what a capture holds fixed.
    """

    def __init__(self, specs: Sequence[OptimizerSpec] = ()) -> None:
        self.numbers: dict[Role, float] = {}
        self.baked: tuple[Any, ...] = ()
        self._known: list[tuple[OptimizerSpec, list[_GroupRecord]]] = []
        self.read_groups(specs)

    def read_groups(self, specs: Sequence[OptimizerSpec]) -> None:
        """Read them."""
        groups_by_spec, is_new, has_changed = [], len(specs) != len(self._known), False
        for i, spec in enumerate(specs):
            known = self._known[i][1] if i < len(self._known) and self._known[i][0] is spec else []
            now = spec.optimizer.param_groups
            is_new |= len(known) != len(now)
            groups = []
            for g, group in enumerate(now):
                record = known[g] if g < len(known) else None
                before = record and record.entries
                if record is None or not record.follows(group):
                    record, is_new = _GroupRecord(i, spec, g), True
                has_changed |= record.entries is not before
                groups.append(record)
            groups_by_spec.append((spec, groups))
        if is_new or has_changed:
            self.numbers = {
                role: x for _, groups in groups_by_spec for record in groups for role, x in record.numbers.items()
            }
        if is_new:
            self._known = groups_by_spec
            self.baked = tuple(
                (*(record.baked for record in groups), (spec.clip_grad_norm, spec.norm_type, spec.clip_grad_value))
                for spec, groups in groups_by_spec
            )


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN or type(x) is tuple and all(map(_is_plain, x))
