"""Settings that plug-ins add, at the extension point ``graphzero.settings``."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from graphzero.config.setting import Check, Setting, text
from graphzero.extensions import SETTINGS, extensions


@dataclass(frozen=True)
class PluginSetting:
    """A setting of a plug-in: ``graph.config.NAME``, where NAME is that of its entry point.

    default: the value without the user's word.  check: what other values must meet; they are hashable, and ``str`` of
    one is the same in every process, because ranks compare it.
    method: a function that makes the value of the GraphConfig and further arguments; GraphConfig then has a method of
    that name, which takes those and sets the value.  Without one, the value is assigned.  Where several settings have
    the same one, it makes a dict of their values by name.
    said: how messages write what sets it, with {} for the value; by default ``METHOD({})`` or ``config.NAME = {}``.
    doc, in_program: see ``Setting``.
    """

    default: Any
    check: Check
    doc: str = ""
    method: Callable[..., Any] | None = None
    in_program: bool = True
    said: str = ""


_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # as Python shows an object without a text of its own


class PluginValue(NamedTuple):
    """A value of a plug-in's setting that is not the default."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={text(self.value)}"


@cache
def plugin_settings() -> Mapping[str, Setting]:
    """The settings of installed plug-ins, by name.  Raises ConfigError for a plug-in that cannot be used."""
    return {name: _setting(name, added) for name, added in _added().items()}


@cache
def plugin_methods() -> Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]:
    """Method of GraphConfig -> the settings that it sets, and what makes their values of its arguments.

    Raises ConfigError for two plug-ins with methods of one name.
    """
    methods: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
    for name, one in _added().items():
        if one.method is not None:
            names, method = methods.get(one.method.__name__, ((), one.method))
            if method is not one.method:
                raise extensions(SETTINGS)[name].refusal(f"adds config.{method.__name__}, which is there already")
            methods[method.__name__] = (*names, name), method
    return methods


def with_value(values: tuple[PluginValue, ...], name: str, value: Any) -> tuple[PluginValue, ...]:
    """``values`` with this one, by name.  Raises ConfigError for a value that the setting's check refuses."""
    setting = plugin_settings()[name]
    with extensions(SETTINGS)[name].name_errors():
        if not setting.check.is_met(value):
            raise setting.refusal(value)
        if not _is_hashable(value):
            raise setting.refusal(value, f"programs are found by it, and a {type(value).__name__} has no hash")
        if _ADDRESS.search(text(value)):
            raise setting.refusal(value, "ranks compare its text, which is another one in each process; define __str__")
        is_default = bool(value == setting.default)
    others = [one for one in values if one.name != name]
    return tuple(sorted([*others, *[PluginValue(name, value)] * (not is_default)], key=lambda one: one.name))


@cache
def _added() -> Mapping[str, PluginSetting]:
    added = {}
    for name, plugin in extensions(SETTINGS).items():
        added[name] = plugin.load()
        with plugin.name_errors():
            if problem := _problem_of(name, added[name]):
                raise plugin.refusal(problem)
    return added


def _problem_of(name: str, one: Any) -> str:
    """Return why a plug-in's setting cannot be used, "" if it can."""
    if not isinstance(one, PluginSetting):
        return "is not a setting: give a graphzero.config.PluginSetting"
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        return f"adds config.{name}, which nobody can write: name the entry point as a public attribute of Python's"
    if not isinstance(one.check, Check) or not (isinstance(one.check.end, str) or callable(one.check.end)):
        return (
            f"has the check {one.check!r}; give a graphzero.config.Check of a function and of words on what is allowed"
        )
    if not one.check.is_met(one.default):
        return f"has a default that its own check refuses, {one.default!r}"
    if not _is_hashable(one.default):
        return f"has a default without a hash, {one.default!r}; programs are found by it"
    method = one.method
    if method is not None and not (
        inspect.isfunction(method) and method.__name__.isidentifier() and inspect.signature(method).parameters
    ):
        return f"has the method {method!r}; give a function, by the name that users call, of the GraphConfig and more"
    one.said.format("")
    return ""


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _setting(name: str, added: PluginSetting) -> Setting:
    said = f"{added.method.__name__}({{}})" if added.method is not None else ""
    return Setting(name, added.default, added.check, added.said or said, added.doc, added.in_program)
