"""Extension points: what distributions add to graphzero, declared as entry points of theirs.

=====================  ================================================================================
graphzero.commands     a command of ``graphzero``: ``SUMMARY``, ``add_arguments(parser)``, ``run(options)``
graphzero.passes       a ``graphzero.passes.PassEntry``: a pass, its place in the list, level and condition
graphzero.settings     a ``graphzero.config.PluginSetting``: default and check of ``graph.config.NAME``
graphzero.inputs       a transform of a call's inputs, on where the setting of its name is not its default
graphzero.configs      ``reader(config, given)``, which ``GraphConfig.from_NAME(given)`` calls
graphzero.stages       a ``StageChooser``: pipeline stages of a captured step; ``config.set_stage("NAME")``
graphzero.splits       ``splits(module, placement)``: SBPs of parameters by name; ``to_global(module, sbp="NAME")``
graphzero.plans        a ``graphzero.plan.PlanExtension``: options of a step that does not fit, words in its plan
graphzero.checks       a ``RoomCheck`` of a plug-in's pass: a step that does not meet it is run again with more room
graphzero.executors    a ``RegionCompiler``: how compute between collectives runs; ``config.set_executor("NAME")``
=====================  ================================================================================

docs/plugins.md has an example of each.  Entry points are read when one is first asked for, once in a process, and a
plug-in is imported when it is used.  Those of graphzero itself come from ``entry_points.txt`` next to this file, which
is also what an installation has: so a source tree has the plug-ins of its own code, installed or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from graphzero import _compat
from graphzero.errors import ConfigError, GraphZeroError, where_raised

COMMANDS, PASSES, SETTINGS, INPUTS, CONFIGS, STAGES, SPLITS, PLANS, CHECKS, EXECUTORS = POINTS = (
    "graphzero.commands", "graphzero.passes", "graphzero.settings", "graphzero.inputs", "graphzero.configs",
    "graphzero.stages", "graphzero.splits", "graphzero.plans", "graphzero.checks", "graphzero.executors",
)  # fmt: skip
DISTRIBUTION = "graphzero-torch"  # which has this file
PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Extension:
    """One entry point. target: ``module`` or ``module:attribute``. distribution: the one that declares it."""

    point: str
    name: str
    target: str
    distribution: str

    @property
    def is_own(self) -> bool:
        """Whether it is graphzero's."""
        return self.distribution == DISTRIBUTION

    def load(self) -> Any:
        """Import the plug-in, once.  Raises ConfigError, with the distribution, where that fails."""
        return _load(self)

    @_compat.contextmanager
    def name_errors(self, unless: Callable[[Exception], bool] = lambda _: False) -> Iterator[None]:
        """Within, the plug-in of another distribution runs: what it raises names it, unless it is graphzero's error.

        unless: of other errors that stay as they are.
        """
        try:
            yield
        except GraphZeroError:
            raise
        except Exception as error:
            if self.is_own or unless(error):
                raise
            raise self.refusal(f"stopped: {type(error).__name__}: {error}{where_raised(error)}") from error

    def guard(self, members: Any) -> Any:
        """An object of the plug-in's, or one of another distribution whose methods run within ``name_errors``."""
        return members if self.is_own else _Guarded(self, members)

    def refusal(self, problem: str) -> ConfigError:
        """The error for a plug-in that cannot be used."""
        return ConfigError(
            f"plug-in {self.name!r} ({self.point}: {self.target}) of the distribution {self.distribution} {problem}\n"
            f"  Update it, or uninstall it: pip uninstall {self.distribution}"
        )


class _Guarded:
    def __init__(self, plugin: Extension, members: Any) -> None:
        self._plugin, self._members = plugin, members

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._members, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._plugin.name_errors():
                return member(*args, **kwargs)

        return call


@cache
def extensions(point: str) -> Mapping[str, Extension]:
    """Extensions of installed distributions at one extension point, by name; those of graphzero first.

    Raises ConfigError where two distributions declare one name.
    """
    by_name: dict[str, Extension] = {}
    for extension in _declared():
        if extension.point != point:
            continue
        other = by_name.setdefault(extension.name, extension)
        if other is not extension:
            raise extension.refusal(
                f"has the name of another one, {other.target} of {other.distribution}: one name, one plug-in"
            )
    return by_name


@cache
def _declared() -> tuple[Extension, ...]:
    """All entry points at the extension points. Metadata that occurs twice counts once."""
    installed = sorted({*_installed()}, key=lambda one: (one.distribution, one.name, one.target))
    return (*_own(), *installed)


def _own() -> Iterator[Extension]:
    file = ConfigParser(delimiters=("=",), interpolation=None)
    file.read_string(Path(__file__).with_name("entry_points.txt").read_text(encoding="utf-8"))
    for point in POINTS:
        for name, target in file.items(point) if file.has_section(point) else ():
            yield Extension(point, name, target, DISTRIBUTION)


def _installed() -> Iterator[Extension]:
    """Entry points of other distributions; one that points into this package is of a copy of graphzero."""
    for point in POINTS:
        for entry in metadata.entry_points(group=point):
            if re.split(r"[.:]", entry.value)[0] != PACKAGE:
                name = entry.dist.metadata["Name"] if entry.dist is not None else "(unknown)"
                yield Extension(point, entry.name, entry.value, name)


@cache
def _load(extension: Extension) -> Any:
    module, _, attribute = extension.target.partition(":")
    try:
        loaded = import_module(module.strip())
        return attrgetter(attribute.strip())(loaded) if attribute else loaded
    except Exception as error:
        raise extension.refusal(f"cannot be loaded: {type(error).__name__}: {error}") from error
