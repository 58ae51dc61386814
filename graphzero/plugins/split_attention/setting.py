"""The setting of the way of attention over a split sequence, ``config.set_split_attention``."""

from __future__ import annotations

from typing import Any

from graphzero.config import Check, GraphConfig, PluginSetting
from graphzero.config.setting import choices
from graphzero.errors import ConfigError
from graphzero.passes import Options
from graphzero.plugins.split_attention.attention_choice import AUTO_WAY, CHOICES, ways_by_axis, ways_text

NAME = "split_attention"


def ways_of(options: Options) -> str:
    """The text of the ways that options have."""
    ways: str = options.plugins.get(NAME, AUTO_WAY)
    return ways


def set_split_attention(config: GraphConfig, way: str, *, axis: str | None = None) -> str:
    """Say how attention over a split sequence gives each query all keys; "auto", the default, or one of these.

    ========== =====================================================================================================
    "exchange" ranks exchange pieces of the sequence for heads, and back after attention (DeepSpeed Ulysses)
    "gather"   queries stay split, and each rank gathers keys and values
    "ring"     queries stay split, and blocks of keys and values go from rank to rank (Ring Attention)
    "auto"     exchange where pieces of queries have unequal work; else what sends fewer bytes, with those of a mask
               that a rank makes; another way if a memory budget demands it
    ========== =====================================================================================================

    axis: the name of a placement axis, for a sequence that several split; by default all, which forgets what was
    said of one.  Of two, exchange along the inner one, and gather, or let keys go round, along the outer one;
    "ring" for all does so.

    An exchange needs as many heads as there are ranks; where there are fewer, keys are gathered whatever it says.
    Contiguous pieces of queries have unequal work under a causal mask; tokens dealt out in turn, by an input of
    ``S(1, length / ranks)``, have equal work.
    The step is the same either way, but for rounding.  ``gz.explain`` of an attention shows what each way costs.
    """
    said = f"set_split_attention({way!r}" + (f", axis={axis!r})" if axis is not None else ")")
    if not (isinstance(way, str) and way in CHOICES):
        raise ConfigError(f"{said}: {choices(CHOICES)}")
    if axis is None:
        return way
    names = config.placement.names
    if not (isinstance(axis, str) and axis in names):
        raise ConfigError(f"{said}: {choices(names)}, the axes of {config.placement!r}")
    named = {**ways_by_axis(config.settings.plugin_value(NAME)), axis: way}
    return ways_text({"": named[""], **{name: named[name] for name in names if name in named}})


def _names_ways(x: Any) -> bool:
    try:
        return isinstance(x, str) and bool(ways_by_axis(x))
    except ValueError:
        return False


SETTING = PluginSetting(AUTO_WAY, Check(_names_ways, choices(CHOICES)), method=set_split_attention)
