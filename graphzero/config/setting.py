"""One setting: a field of a frozen dataclass, with its default, its check, and its method.

What a setting is for is at its field, nowhere else; which settings there are is ``settings``'s and ``zero``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from graphzero.errors import ConfigError, shorten_repr

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """Condition on a value. end: of the message, which says what is allowed, or a function that returns it."""

    is_met: Callable[[Any], bool]
    end: str | Callable[[], str]

    @property
    def allowed(self) -> str:
        """Text on what is allowed."""
        return self.end if isinstance(self.end, str) else self.end()


def choices(names: Iterable[str]) -> str:
    return "choose one of " + ", ".join(repr(name) for name in names)


def one_of(*names: str) -> Check:
    return Check(lambda x: isinstance(x, str) and x in names, choices(names))


def whole_number(least: int, allowed: str, or_none: bool = False) -> Check:
    def is_met(x: Any) -> bool:
        return (or_none and x is None) or (isinstance(x, int) and not isinstance(x, bool) and x >= least)

    return Check(is_met, allowed)


def tuple_of(kind: type, allowed: str) -> Check:
    return Check(lambda x: isinstance(x, tuple) and all(isinstance(item, kind) for item in x), allowed)


YES_OR_NO = Check(lambda x: isinstance(x, bool), "say True or False")


@dataclass(frozen=True)
class Setting:
    """Facts about a setting besides its values.

    said: how a user sets it, with {} for the value, ``set_executor({})``; by assignment if empty.
    doc: what its value means; of one that a method sets, the method's text does.
    in_program: whether another value may make another program.
    """

    name: str
    default: Any
    check: Check
    said: str
    doc: str
    in_program: bool

    @property
    def method(self) -> str:
        """The method of GraphConfig that sets it, "" if an assignment does."""
        method, bracket, _ = self.said.partition("(")
        return method if bracket else ""

    def refusal(self, value: Any, problem: str = "") -> ConfigError:
        """The error for a value that cannot be taken, by default because its check does not."""
        said = self.said or f"config.{self.name} = {{}}"
        return ConfigError(f"{said.format(shorten_repr(value))}: {problem or self.check.allowed}")


def setting(default: T, check: Check, said: str = "", *, doc: str = "", in_program: bool = True) -> T:
    """A field that is a setting; see ``Setting``."""
    facts = {"check": check, "said": said, "doc": doc, "in_program": in_program}
    default_field: T = field(default=default, metadata=facts)
    return default_field


def settings_of(kind: type[Checked]) -> dict[str, Setting]:
    """Settings of a dataclass by name, in the order of its fields."""
    settings = {}
    for one in fields(kind):
        said = one.metadata["said"] or (f"{kind.method}({one.name}={{}})" if kind.method else "")
        settings[one.name] = Setting(one.name, one.default, **{**one.metadata, "said": said})
    return settings


@dataclass(frozen=True, repr=False)
class Checked:
    """Base of frozen dataclasses whose fields are settings: none of them holds a value that its check refuses.

    method: of GraphConfig, which has an argument for each field; "" where each has a method of its own.
    Raises ConfigError for such a value.
    """

    method: ClassVar[str] = ""

    @property
    def _fields(self) -> Collection[Setting]:
        return settings_of(type(self)).values()

    def __post_init__(self) -> None:
        for one in self._fields:
            if not one.check.is_met(getattr(self, one.name)):
                raise one.refusal(getattr(self, one.name))

    @property
    def _values(self) -> list[tuple[Setting, Any]]:
        return [(one, getattr(self, one.name)) for one in self._fields]

    @cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """The values that may make another program; hashable."""
        return tuple(value for one, value in self._values if one.in_program)

    @cached_property
    def texts(self) -> dict[str, str]:
        """Each value as text that is equal in every process."""
        return {one.name: text(value) for one, value in self._values}

    @cached_property
    def description(self) -> str:
        """The texts of what is not as by default."""
        changed = [one.name for one, value in self._values if value != one.default]
        return ", ".join(f"{name}={self.texts[name]}" for name in changed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.description})"


def text(value: Any) -> str:
    """A setting's value as text, the items of a tuple as theirs."""
    return f"({', '.join(map(text, value))})" if type(value) is tuple else str(value)
