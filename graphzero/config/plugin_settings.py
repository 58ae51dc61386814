"""Settings that plug-ins add, at the extension point ``graphzero.settings``."""

from __future__ import annotations

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
    if not setting.check.is_met(value):
        raise setting.refusal(value)
    others = [one for one in values if one.name != name]
    return tuple(sorted([*others, *[PluginValue(name, value)] * (value != setting.default)], key=lambda one: one.name))


@cache
def _added() -> Mapping[str, PluginSetting]:
    added = {}
    for name, plugin in extensions(SETTINGS).items():
        added[name] = plugin.load()
        if not isinstance(added[name], PluginSetting):
            raise plugin.refusal("is not a setting: give a graphzero.config.PluginSetting")
        if not added[name].check.is_met(added[name].default):
            raise plugin.refusal(f"has a default that its own check refuses, {added[name].default!r}")
    return added


def _setting(name: str, added: PluginSetting) -> Setting:
    said = f"{added.method.__name__}({{}})" if added.method is not None else ""
    return Setting(name, added.default, added.check, added.said or said, added.doc, added.in_program)
