"""Members of GraphConfig that are made of its settings, and what to say of a member that there is not."""

from __future__ import annotations

import difflib
import re
from typing import Any

from graphzero.config.setting import Setting, settings_of
from graphzero.config.settings import Settings

_VERB = re.compile("^(set|enable|add)_")


def add_members(kind: type) -> None:
    """Give ``kind``, whose objects hold ``settings``, a member for each setting of which it has none."""
    for one in settings_of(Settings).values():
        if one.name not in vars(kind):
            setattr(kind, one.name, _member(one))


def _member(one: Setting) -> property:
    """What reads a field, and sets it if no method does."""

    def read(config: Any) -> Any:
        return getattr(config.settings, one.name)

    def write(config: Any, value: Any) -> None:
        config._set(**{one.name: value})

    doc = one.doc or f"What ``{one.method}`` was given; {one.default!r} without it."
    return property(read, None if one.method else write, doc=doc)


def no_such_setting(kind: type, name: str) -> str:
    """The ways to make a setting; first those of which one who wrote ``name`` may have thought."""
    methods = {name: f"{name}(...)" for name in vars(kind) if _VERB.match(name)}
    assigned = {one.name: one.name for one in settings_of(Settings).values() if not one.method}
    about = {_VERB.sub("", name): way for name, way in (methods | assigned).items()}
    near = [about[found] for found in difflib.get_close_matches(_VERB.sub("", name), about, cutoff=0.5)]
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"there is no such setting. {guess}"
        f"Settings are made by {', '.join(methods.values())}, and the attributes {', '.join(assigned)}"
    )
