"""Attributes that build binds: buffers, parameters and modules that it adds, replaces or removes, and plain tensors.

A buffer that is bound to another tensor of its shape and dtype is the step's update.  A cache, a tensor that follows
from constants and from state that the step leaves alone, is computed in every step, so nothing depends on where it was
kept.  Any other binding that a later step of plain PyTorch would read, and a graph would not, is refused at its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture.guards.attribute_guards import AttributeGuards
from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.objects.iterator_snapshot import IteratorSnapshot
from graphzero.capture.objects.object_snapshot import DictSnapshot, ObjectSnapshot, TensorSnapshot
from graphzero.capture.objects.scope_snapshot import GlobalsSnapshot
from graphzero.capture.problems import form_of, place_of, problem, user_lines
from graphzero.capture.trace.captured_constants import CapturedConstants
from graphzero.errors import CaptureError

_REGISTERS = ("_parameters", "_buffers", "_modules")
_KINDS = dict(zip(_REGISTERS, ("parameter", "buffer", "module"), strict=True))
_FIRST = (
    "Give it its shape and a first value before the first call: register_buffer(name, torch.zeros(...)), with a second "
    "buffer that says whether it has been set, and torch.where(is_set, a, b) in place of `if`"
)
_PARAMETER = (
    "An optimizer goes on with the parameter that it was given. Write into it, with torch.no_grad(): p.copy_(new), or "
    "keep what changes in a buffer"
)
_MODULE = "Make modules in __init__, all that any step uses, so that the optimizer and the ranks have their parameters"
_GONE = "Let it stay, and keep what decides in a buffer: torch.where(is_used, a, b)"
_FORM = (
    "The buffers of a step keep shape and dtype: make it in its full size and write into a part of it, "
    "self.rows[i] = row, or cast what is bound: new.to(self.total.dtype)"
)
_SHARED = "Bind all of them, or write in place, which all of them see: self.total.copy_(new)"
_ALIAS = "Bind a copy, .clone(): in plain PyTorch it changes whenever the other one is written to"
_PLAIN = (
    "What a step keeps for the next one belongs in a buffer: self.register_buffer(name, torch.zeros(...)) in __init__, "
    "and self.name = new or self.name.copy_(new) in forward"
)


Place = tuple[str, str, str]  # the path of a module, the register, the name in it


class AttributeBindings:
    """Bindings of one trace of build.

    root: of the modules.  build: the user's.
    """

    def __init__(self, root: nn.Module, build: Callable[..., Any]) -> None:
        self.build = build
        self.owner = getattr(build, "__self__", None)
        self.modules = {path: module for path, module in root.named_modules() if path}
        self._of_step = {id(x) for x in (*self.modules.values(), self.owner)}
        self._lines: dict[tuple[int, str], list[str]] = {}  # of the last binding of an attribute, by object and name
        self._bound_to: dict[tuple[int, str], dict[int, int]] = {}  # the tensors, by id, and their versions then
        self._before: dict[Place, Any] = {}
        self._versions: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of the trace's inputs, by id of their fakes

    def watching(self, values: Sequence[Any]) -> AbstractContextManager[None]:
        """While this is open, lines that bind are noted.  values: the inputs of the trace; modules hold their fakes."""
        self._before = dict(self._bound())
        self._versions = {id(x): x._version for x in self._before.values() if isinstance(x, Tensor)}
        self._numbers = {id(x): i for i, x in enumerate(values)}
        kinds = [nn.Module] + [type(self.owner)] * (self.owner is not None and not isinstance(self.owner, nn.Module))
        places: list[tuple[Any, str]] = [(kind, name) for kind in kinds for name in ("__setattr__", "__delattr__")]
        places += [(nn.Module, name) for name in ("register_buffer", "register_parameter", "add_module")]
        return _compat.patched_all((kind, name, self._noting(getattr(kind, name))) for kind, name in places)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def bind(holder: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if id(holder) in self._of_step:
                self._lines[id(holder), name] = user_lines()
                versions = self._bound_to.setdefault((id(holder), name), {})
                for x in args:
                    if isinstance(x, Tensor):
                        versions.setdefault(id(x), x._version)
            return original(holder, name, *args, **kwargs)

        return bind

    def line(self, holder: Any, name: str) -> str:
        """The user's line that has bound an attribute, "" if that is not known."""
        return next(iter(self._lines.get((id(holder), name), [])), "")

    # ---- registers of modules

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as the step leaves them, by path.  Raises CaptureError for what it cannot carry on."""
        now = dict(self._bound())
        for place in dict.fromkeys((*self._before, *now)):
            before, after = self._before.get(place), now.get(place)
            if before is not after and (reason := self._reason(place, before, after, now)) is not None:
                raise self._problem(self.modules[place[0]], place[2], *reason)
        by_path = {}
        for place, x in self._before.items():
            if place[1] == "_buffers" and isinstance(x, Tensor):
                after = now[place]
                by_path[f"{place[0]}.{place[2]}"] = after if _form(after) == _form(x) else x
        return by_path

    def _bound(self) -> Iterator[tuple[Place, Any]]:
        for path, module in self.modules.items():
            for register in _REGISTERS:
                for name, x in vars(module)[register].items():
                    yield (path, register, name), x

    def _reason(self, place: Place, before: Any, after: Any, now: dict[Place, Any]) -> tuple[str, str] | None:
        """The reason why a step cannot carry on an attribute that build has bound, and what to do."""
        path, register, name = place
        what = f"{_KINDS[register]} {path}.{name}"
        if register != "_buffers":
            how = "takes out" if after is None else "makes" if before is None else "replaces"
            return f"build {how} {what}", _PARAMETER if register == "_parameters" else _MODULE
        if after is None:
            return f"build takes out {what}", _GONE
        if before is None:
            reason = f"build gives a first value to {what}, which had none"
            final = {id(after): after._version}
            is_final = self._bound_to.get((id(self.modules[path]), name), final) == final
            return None if is_final and self._is_cache(after, now) else (reason, _FIRST)
        others = [_path(p) for p, x in self._before.items() if x is before and now.get(p) is not after]
        if others:
            return f"build rebinds {what}, which is {', '.join(others)} as well", _SHARED
        if _form(before) != _form(after):
            change = f"build turns {what}, {form_of(before)}, into {form_of(after)}"
            return None if self._is_cache(after, now) else (change, _FORM)
        alias = self._alias(place, after, now)
        return (f"build binds {what} to the memory of {alias}", _ALIAS) if alias else None

    def _alias(self, place: Place, x: Tensor, now: dict[Place, Any]) -> str:
        """The parameter or buffer whose memory a buffer has been bound to, from now on, or ""."""
        memory = _compat.storage_id(x)
        for other, y in now.items():
            if other != place and isinstance(y, Tensor) and self._before.get(place) is not self._before.get(other):
                lasts = y is x or y is self._before.get(other)
                if lasts and y.layout is torch.strided and _compat.storage_id(y) == memory:
                    return _path(other)
        return ""

    def _is_cache(self, x: Any, now: dict[Place, Any] | None = None) -> bool:
        """Return whether the next step would make ``x`` again as it is."""
        if isinstance(x, HostNumber):
            return False
        bound = {id(y) for y in (now if now is not None else dict(self._bound())).values()}
        fixed = {
            self._numbers.get(id(y))
            for y in self._before.values()
            if isinstance(y, Tensor) and id(y) in bound and not y.requires_grad and y._version == self._versions[id(y)]
        }
        return (_compat.traced_from(x) or set()) <= fixed

    # ---- plain attributes and containers

    def refuse_state(
        self, snapshots: Iterable[ObjectSnapshot], free: CapturedConstants, guards: AttributeGuards
    ) -> None:
        """Refuse what build keeps for later steps outside of buffers: a tensor in the place of one that it has read.

        snapshots: all that build reaches, as it was before.
        """
        for contents in snapshots:
            if isinstance(contents, (TensorSnapshot, GlobalsSnapshot, IteratorSnapshot)) or not contents.differs():
                continue
            owner, name = contents.owner
            if isinstance(contents, DictSnapshot) and name not in _REGISTERS:
                for key, before, after in contents.changed():
                    is_read = free.has_met(before) or (not name and before is None and guards.was_none(owner, key))
                    if is_read and self._is_kept(after):
                        raise self._lost(owner, name or str(key))
            elif any(map(free.has_met, contents.content)) and any(map(self._is_kept, contents.new_content())):
                raise self._lost(owner, name)

    def _is_kept(self, x: Any) -> bool:
        return isinstance(x, (_compat.FakeTensor, HostNumber)) and not self._is_cache(x)

    def _lost(self, owner: Any, name: str) -> CaptureError:
        return self._problem(
            owner, name, f"build reads {type(owner).__name__}.{name} and sets it for the next step", _PLAIN
        )

    def _problem(self, holder: Any, name: str, what: str, hint: str) -> CaptureError:
        return problem(what, hint, self._lines.get((id(holder), name), [place_of(self.build)]))


def _path(place: Place) -> str:
    return f"{place[0]}.{place[2]}"


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype
