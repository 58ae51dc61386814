"""Settings that grow call by call, under a name: how an input lies, and which pass is after another."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from graphzero.config.setting import choices
from graphzero.errors import ConfigError, shorten_repr
from graphzero.passes import pass_name
from graphzero.passes.pass_list import GROUPS, pass_names
from graphzero.sbp.placement import PIPELINE, Placement
from graphzero.sbp.types import B, Nd, Sbp


class InputSbp(NamedTuple):
    """SBP of the input ``name`` of build."""

    name: str
    sbp: Nd

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.sbp))}"


class UserPass(NamedTuple):
    """A pass of the user's.  It counts by identity: the same object is the same pass, and is expected not to change."""

    own: Callable[[Any], Any]
    after: str

    def __str__(self) -> str:
        return f"{pass_name(self.own)} after {self.after}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserPass) and self.own is other.own and self.after == other.after

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((id(self.own), self.after))


def with_input(inputs: tuple[InputSbp, ...], name: str, sbp: Any, placement: Placement) -> tuple[InputSbp, ...]:
    """``inputs`` and this one, by name.  Raises ConfigError for what is not a name, or not an SBP on ``placement``."""
    if not isinstance(name, str):
        raise ConfigError(f"set_input({shorten_repr(name)}, ...): give the input's name in build, a text")
    nd = (sbp,) if isinstance(sbp, Sbp) else tuple(sbp) if isinstance(sbp, (tuple, list)) else (sbp,)
    count = len(placement.names)
    if not all(isinstance(item, Sbp) for item in nd):
        raise ConfigError(f"set_input({name!r}, sbp={shorten_repr(sbp)}): write gz.sbp.B, gz.sbp.S(0) or gz.sbp.P")
    is_of_stage = PIPELINE in placement.names and len(nd) == count - 1
    if len(nd) != count and not is_of_stage:
        raise ConfigError(
            f"set_input({name!r}, sbp={shorten_repr(sbp)}): {placement!r} has {count} axes "
            f"({', '.join(placement.names)}); give one SBP for each, a tuple of {count}"
        )
    if PIPELINE in placement.names and not is_of_stage:
        at = placement.axis(PIPELINE)
        if nd[at] is not B:
            raise ConfigError(
                f"set_input({name!r}, sbp={shorten_repr(sbp)}): write B along {PIPELINE}: each stage has the input"
            )
        nd = (*nd[:at], *nd[at + 1 :]) or (B,)
    return tuple(InputSbp(*one) for one in sorted({**dict(inputs), name: nd}.items()))


def with_pass(passes: tuple[UserPass, ...], own: Callable[[Any], Any], after: str) -> tuple[UserPass, ...]:
    """``passes`` and this one, after them.  Raises ConfigError for what is not a pass, or follows none."""
    _check_pass(own)
    known = (*pass_names(), *GROUPS, *(pass_name(one.own) for one in passes))
    if not (isinstance(after, str) and after in known):
        allowed = textwrap.fill(choices(known), 110, initial_indent="  ", subsequent_indent="  ")
        raise ConfigError(f"add_pass({pass_name(own)}, after={after!r}): no pass has that name;\n{allowed}")
    return (*passes, UserPass(own, after))


def _check_pass(pass_: Any) -> None:
    """Raise ConfigError for what ``add_pass`` cannot take."""
    if not callable(pass_):
        raise ConfigError(
            f"add_pass({shorten_repr(pass_)}): a pass is a callable that takes a StepGraph and returns one"
        )
    if isinstance(pass_, type):
        raise ConfigError(f"add_pass({pass_.__name__}): that is a class; add an object of it: {pass_.__name__}()")
    if not _takes_one(pass_):
        raise ConfigError(
            f"add_pass({pass_name(pass_)}): it cannot be called with one argument; a pass takes a StepGraph and "
            "returns one: def my_pass(graph): ...; fix others by functools.partial"
        )


def _takes_one(function: Callable[..., Any]) -> bool:
    """Return whether it can be called with one argument, as far as Python tells."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
