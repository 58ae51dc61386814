"""Members of GraphConfig that are made of its settings and of plug-ins, and the error for a missing one."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any

from graphzero.config.plugin_settings import plugin_methods, plugin_settings
from graphzero.config.setting import Setting, settings_of
from graphzero.config.settings import Settings
from graphzero.errors import ConfigError, shorten_repr
from graphzero.extensions import CONFIGS, SETTINGS, Extension, extensions

_VERB = re.compile("^(set|enable|add)_")
READER = "from_"  # how the class methods begin that read another system's configuration


def add_members(kind: type) -> None:
    """Give ``kind``, whose objects hold ``settings``, a member for each setting of which it has none."""
    for one in settings_of(Settings).values():
        if one.name not in (*vars(kind), "plugins"):
            setattr(kind, one.name, _member(one))


class PluginMembers(type):
    """The type of GraphConfig: members that plug-ins add are looked up when they are asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(READER) and (system := name.removeprefix(READER)) in extensions(CONFIGS):
            return MethodType(_reader(system), cls)
        if name.startswith("_") or name not in plugin_members(cls):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}", name=name, obj=cls)
        return plugin_members(cls)[name]

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *plugin_members(cls), *(READER + system for system in extensions(CONFIGS))})


@functools.cache
def plugin_members(kind: type) -> dict[str, Any]:
    """The members that plug-ins add to objects of GraphConfig: properties, and methods that set them.

    Raises ConfigError for a plug-in whose member is one that GraphConfig has.
    """
    members: dict[str, Any] = {}
    taken = {name for base in kind.__mro__ for name in vars(base)}
    for name, setting in plugin_settings().items():
        _add(members, taken, name, _member(setting, is_plugins=True), extensions(SETTINGS)[name])
    for method, (names, values_of) in plugin_methods().items():
        _add(members, taken, method, _method(names, values_of), extensions(SETTINGS)[names[0]])
    for system, plugin in extensions(CONFIGS).items():
        _add(members, taken, system, _reading(system), plugin)
    return members


def _add(members: dict[str, Any], taken: Collection[str], name: str, member: Any, plugin: Extension) -> None:
    if name in members or name in taken:
        raise plugin.refusal(f"adds config.{name}, which is there already")
    members[name] = member


def _method(names: Sequence[str], values_of: Callable[..., Any]) -> Callable[..., None]:
    plugin, name = extensions(SETTINGS)[names[0]], values_of.__name__
    own, *others = inspect.signature(values_of).parameters.values()
    signature = inspect.Signature([own.replace(name="self"), *others], return_annotation="None")

    @functools.wraps(values_of)
    def set_values(config: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(config, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"GraphConfig.{name}() {error}: it takes {inspect.Signature(others)}") from None
        with plugin.name_errors():
            values = values_of(config, *args, **kwargs)
        if len(names) > 1 and not (isinstance(values, dict) and values.keys() == {*names}):
            raise plugin.refusal(
                f"has config.{name} give {shorten_repr(values)}, which is no dict of {', '.join(names)}"
            )
        config._set_plugins(values if len(names) > 1 else {names[0]: values})

    set_values.__qualname__ = f"GraphConfig.{name}"
    set_values.__signature__ = signature  # type: ignore[attr-defined]
    return set_values


def _reading(system: str) -> property:
    def get_reading(config: Any) -> Any:
        if system not in config._readings:
            raise ConfigError(
                f"config.{system}: this configuration is not {READER}{system}'s; make it by "
                f"gz.GraphConfig.{READER}{system}(path), and give it to the Graph: super().__init__(config=...)"
            )
        return config._readings[system]

    doc = f"""What else ``{READER}{system}`` has read, besides settings.

        Raises ConfigError for a configuration that ``{READER}{system}`` has not made.
        """
    return property(get_reading, doc=doc)


@functools.cache
def _reader(system: str) -> Callable[..., Any]:
    plugin = extensions(CONFIGS)[system]
    reader = plugin.load()
    if not callable(reader):
        raise plugin.refusal("is not a reader of configurations: it cannot be called")

    def read_configuration(cls: Any, given: Any, placement: Any = None) -> Any:
        config = cls(placement)
        with plugin.name_errors():
            config._readings[system] = reader(config, given)
        return config

    read_configuration.__name__, read_configuration.__doc__ = READER + system, reader.__doc__
    read_configuration.__qualname__ = f"GraphConfig.{READER}{system}"
    return read_configuration


def _member(one: Setting, is_plugins: bool = False) -> property:
    """A property that reads a setting, of graphzero or a plug-in's, and sets it if no method does."""

    def get_value(config: Any) -> Any:
        return config.settings.plugin_value(one.name) if is_plugins else getattr(config.settings, one.name)

    def set_value(config: Any, value: Any) -> None:
        config._set_plugins({one.name: value}) if is_plugins else config._set(**{one.name: value})

    doc = one.doc or f"What ``{one.method}`` was given; {one.default!r} without it."
    return property(get_value, None if one.method else set_value, doc=doc)


def no_such_setting(kind: type, name: str) -> str:
    """The ways to make a setting; first those of which one who wrote ``name`` may have thought."""
    methods = {name: f"{name}(...)" for name in (*vars(kind), *plugin_methods()) if _VERB.match(name)}
    known = (settings_of(Settings) | dict(plugin_settings())).values()
    assigned = {one.name: one.name for one in known if not one.method and one.name != "plugins"}
    about = {_VERB.sub("", name): way for name, way in (methods | assigned).items()}
    near = [about[close] for close in difflib.get_close_matches(_VERB.sub("", name), about, cutoff=0.5)]
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"there is no such setting. {guess}Settings are made by\n  {', '.join(methods.values())}\n  and the attributes "
        f"{', '.join(assigned)}"
    )
