"""Ragged dims as users give them: which dims of which inputs go by which name, to what sizes they are padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from graphzero.config import Check, GraphConfig, PluginSetting
from graphzero.errors import ConfigError
from graphzero.ir.ragged import PADDING
from graphzero.passes.base import is_pattern

POWERS = "powers"


@dataclass(frozen=True)
class SizeBuckets:
    """Sizes of one ragged dim.  given: a number, of which multiples are meant; "powers", of two; or the sizes."""

    name: str
    given: int | str | tuple[int, ...]

    def padded_size(self, size: int) -> int | None:
        """The least of them that has room; None if none has."""
        if self.given == POWERS:
            return 1 << max(size - 1, 0).bit_length()
        if isinstance(self.given, int):
            return max(-(-size // self.given), 1) * self.given
        return next((room for room in self.given if isinstance(room, int) and room >= size), None)

    def least(self, room: int) -> int:
        """The smallest size for which ``room`` is the least of them."""
        if self.given == POWERS:
            return room // 2 + 1
        if isinstance(self.given, int):
            return room - self.given + 1
        return max((size + 1 for size in self.given if isinstance(size, int) and size < room), default=1)

    def __str__(self) -> str:
        return f"{self.name}: {list(self.given) if isinstance(self.given, tuple) else self.given}"


@dataclass(frozen=True)
class Ragged:
    """A ragged dim of a program.

    size: the padded one, of all ranks together.  least: the smallest true size that is padded to it.
    is_prefix: whether what is padded is after all that was given; else every rank's share has its own end.
    """

    name: str
    size: int
    least: int = 1
    is_prefix: bool = True

    @property
    def padding(self) -> str:
        """The name of the input that says which places are padded."""
        return PADDING + self.name


@dataclass(frozen=True)
class Shapes:
    """inputs: (name or pattern, ((dim, name of the ragged dim), ...)); of several that fit an input the first, names
    before patterns.  sizes: of each ragged dim.  fill: (name or pattern, number).
    """

    inputs: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    sizes: tuple[SizeBuckets, ...]
    fill: tuple[tuple[str, float], ...] = ()

    def dims(self, name: str, ndim: int) -> dict[int, str]:
        """The ragged dims of an input of so many dims.  Raises ConfigError for a dim that it does not have."""
        key, named_dims = _first(self.inputs, name, ())
        if key == name:
            for dim, ragged in named_dims:
                if dim >= ndim:
                    raise ConfigError(
                        f"set_shapes({{{name!r}: {{{dim}: {ragged!r}}}}}): {name} has {ndim} dims, none is {dim}"
                    )
        return {dim: ragged for dim, ragged in named_dims if dim < ndim}

    def filled(self, name: str) -> float:
        """Value of an input in padded places."""
        number: float = _first(self.fill, name, 0)[1]
        return number

    def has_fill(self, name: str) -> bool:
        """Return whether ``fill`` speaks of an input."""
        return any(fits(key, name) for key, _ in self.fill)

    def bucket(self, name: str) -> SizeBuckets:
        """The sizes of a ragged dim."""
        return next(one for one in self.sizes if one.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the ragged dims."""
        return tuple(one.name for one in self.sizes)

    def is_first(self, name: str) -> bool:
        """Return whether a ragged dim is dim 0 of some input: the rows of a batch."""
        return any((0, name) in dims for _, dims in self.inputs)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names and patterns of inputs that it speaks of."""
        return (*(key for key, _ in self.inputs), *(key for key, _ in self.fill))

    def __str__(self) -> str:
        inputs = ", ".join(f"{key}: {dict(dims)}" for key, dims in self.inputs)
        sizes = ", ".join(map(str, self.sizes))
        return f"{{{inputs}}}, {{{sizes}}}, fill={dict(self.fill)}"


def fits(key: str, name: str) -> bool:
    """Return whether a key of ``set_shapes`` speaks of an input."""
    return key == name or (is_pattern(key) and fnmatchcase(name, key))


def _first(pairs: Sequence[tuple[str, Any]], name: str, default: Any) -> tuple[str, Any]:
    ordered = sorted(pairs, key=lambda pair: pair[0] != name)
    return next((pair for pair in ordered if fits(pair[0], name)), ("", default))


def shapes_of(inputs: Any, sizes: Any, fill: Any) -> Shapes:
    """Shapes for the arguments of ``set_shapes``. Raises ConfigError for what is not a name, dim, size or number."""
    if not isinstance(inputs, Mapping) or not inputs:
        raise ConfigError(
            f"set_shapes({inputs!r}, ...): say which dims of which inputs are ragged, by your own names: "
            '{"input_ids": {0: "rows", 1: "tokens"}}'
        )
    if not isinstance(sizes, Mapping):
        raise ConfigError(f'set_shapes(..., {sizes!r}): say the sizes of each ragged dim: {{"tokens": [128, 256]}}')
    dims = tuple((_name(key), _dims(key, given)) for key, given in inputs.items())
    named = dict.fromkeys(name for _, given in dims for _, name in given)
    for name in named:
        if name not in sizes:
            raise ConfigError(
                f"set_shapes(...): no sizes for the ragged dim {name!r}; there are some for {_listed(sizes)}"
            )
    for name in sizes:
        if name not in named:
            raise ConfigError(
                f"set_shapes(...): sizes for {name!r}, but no dim has that name; they are {_listed(named)}"
            )
    buckets = tuple(SizeBuckets(name, _sizes(name, given)) for name, given in sizes.items())
    return Shapes(dims, buckets, tuple(_filling(fill)))


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"set_shapes({{{key!r}: ...}}): give the input's name in build, a text")
    return key


def _dims(key: str, given: Any) -> tuple[tuple[int, str], ...]:
    if isinstance(given, (list, tuple)):
        given = {i: name for i, name in enumerate(given) if name is not None}
    is_right = (
        isinstance(given, Mapping)
        and given
        and all(type(dim) is int and dim >= 0 and isinstance(name, str) for dim, name in given.items())
    )
    if not is_right:
        raise ConfigError(
            f"set_shapes({{{key!r}: {given!r}}}): give a name for each ragged dim, counted from 0: "
            '{0: "rows", 1: "tokens"}, or ("rows", "tokens")'
        )
    return tuple(sorted(given.items()))


def _sizes(name: str, given: Any) -> int | str | tuple[int, ...]:
    what = f"set_shapes(..., {{{name!r}: {given!r}}})"
    if given == POWERS and isinstance(given, str):
        return POWERS
    if type(given) is int and given >= 1:
        return given
    if not isinstance(given, (list, tuple)) or not given or not all(type(x) is int and x >= 1 for x in given):
        raise ConfigError(
            f'{what}: give a number, of which multiples are meant, "powers", or a list of sizes, 1 or more'
        )
    if list(given) != sorted(set(given)):
        raise ConfigError(f"{what}: sizes go up, each once: {sorted(set(given))}")
    return tuple(given)


def _filling(fill: Any) -> list[tuple[str, float]]:
    if fill is None:
        return []
    if not isinstance(fill, Mapping):
        raise ConfigError(f'set_shapes(..., fill={fill!r}): give numbers by the names of inputs: {{"labels": -100}}')
    for key, number in fill.items():
        if not isinstance(number, (int, float)):
            raise ConfigError(f"set_shapes(..., fill={{{key!r}: {number!r}}}): give a number")
    return [(_name(key), number) for key, number in fill.items()]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"


def set_shapes(
    config: GraphConfig,
    inputs: Mapping[str, Mapping[int, str] | Sequence[str | None]] | None,
    sizes: Mapping[str, int | Sequence[int] | str] | None = None, *, fill: Mapping[str, float] | None = None,
) -> Shapes | None:  # fmt: skip
    """Pad inputs of many shapes to a few, so that a few programs serve all of them; results are as without padding.

    inputs: which dims of which inputs are ragged, with names that you choose: ``{"input_ids": {0: "rows", 1:
        "tokens"}}`` or, in the order of dims, ``{"*": ("rows", "tokens")}``.  Keys are the names of inputs as in the
        program, ``x`` or ``batch.labels``, or patterns, which apply to the dims that an input has.  Dims of one name
        have one size in each call.  None pads nothing.
    sizes: the sizes to which each name is padded: a number, for its least multiple that is enough; "powers", for the
        least power of two; or a list of sizes, for the least one.  They are sizes of the tensors that a rank passes:
        of its share, or of the whole batch on a virtual placement.  They are rounded up to a multiple of ranks and
        micro-batches.
    fill: values of padding by input, 0 by default: ``{"labels": -100}``.  It matters only if a rank's batch is
        shorter than that of another rank: the global batch is as long as the longest, and its other rows are filled.

    Padding has no part in losses, counts, statistics and gradients, for any fill: sums leave it out, means divide by
    the numbers of given elements, and a softmax does not see it.  An op for which this is not known raises
    CaptureError when the step is compiled, with the line.  Outputs are cut back to the given sizes.  Random draws are
    those of the padded shapes.
    """
    return shapes_of(inputs, sizes, fill) if inputs is not None else None


SHAPES = PluginSetting(
    default=None,
    check=Check(lambda x: x is None or isinstance(x, Shapes), "say which dims are ragged, and their sizes"),
    doc="Which dims of inputs are padded to which sizes, as ``set_shapes`` left it; None without it.",
    method=set_shapes,
)
