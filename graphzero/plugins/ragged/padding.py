"""The padding of a call: how long the ragged dims of its inputs are, to what they are padded, how outputs are cut.

Sizes are those of what this rank passes.  Ranks tell each other theirs, because all run one program: each pads its
share to what the longest needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.capture import Captured, Input, Inputs
from graphzero.config import Settings
from graphzero.errors import ConfigError
from graphzero.ir.ragged import Along
from graphzero.passes.base import is_pattern
from graphzero.plugins.ragged.shapes import Ragged, Shapes, fits
from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import global_shape, wrap
from graphzero.runtime.world.consensus import SIZES, Ranks, digest, tensor_text
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S
from graphzero.step.build_inputs import BuildInputReader, check_kind


@dataclass(frozen=True)
class Length:
    """One ragged dim in one call.

    own: its true size in what this rank passes; most: the largest of all ranks'.  local: the padded one of this rank.
    nd: how it lies on the ranks: S(0) on the axes that split it.
    """

    ragged: Ragged
    own: int
    most: int
    local: int
    nd: Nd

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of it."""
        return any(sbp.is_split for sbp in self.nd)

    @property
    def true(self) -> int:
        """Number of given places among the padded ones on this rank: of a dim that all ranks hold, that of the
        longest."""
        return self.own if self.is_split else self.most

    @property
    def mask(self) -> Input:
        """The input that says which places are padded."""
        return Input(self.ragged.padding, torch.arange(self.local) >= self.true, (self.ragged.size,), self.nd)


@dataclass(frozen=True)
class Padded:
    """Padding of a call's inputs.

    dims: by input, the names of its ragged dims.  lengths: of those that padding makes longer than one place.
    """

    placement: Placement
    dims: Mapping[str, Mapping[int, str]]
    lengths: Mapping[str, Length]

    @property
    def ragged(self) -> list[Ragged]:
        """The ragged dims of its program."""
        return [length.ragged for length in self.lengths.values()]

    @property
    def added_inputs(self) -> list[Input]:
        """The masks that say which places are padded."""
        return [length.mask for length in self.lengths.values()]

    def check_capture(self, captured: Captured) -> None:
        """Raise ConfigError where the step reads more places than there are."""
        for name, places in captured.least.items():
            if name in self.lengths and self.lengths[name].most < places:
                raise ConfigError(
                    f"build reads place {places - 1} along {name!r}, counted from 0, and this batch has "
                    f"{self.lengths[name].most}; without padding the step would fail, or do something else. Pad the "
                    "batch yourself"
                )

    def restore_input(self, leaf: Input, x: Tensor) -> Tensor:
        """The whole of an input, without what was padded.  x: the global tensor.  Every rank calls it."""
        return self.restore_output(
            x, [Along(name, dim) for dim, name in self.dims.get(leaf.name, {}).items()], x.shape, False
        )

    def restore_output(self, x: Tensor, padded: Iterable[Along], shape: Sequence[int], is_local: bool) -> Tensor:
        """The given part of ``x``. shape: the global one. is_local: whether ``x`` is this rank's part of it.

        Of a dim that all ranks hold, a rank's own part is as long as what it has passed.
        """
        known = [along for along in padded if along.name in self.lengths]
        for along in sorted(known, key=lambda a: (a.dim, -a.sections)):
            length = self.lengths[along.name]
            keep = self._given_places(length, along.more, is_local)
            if length.is_split:  # what lies within it may have been cut already, as sections of other dims
                sections, inner = along.sections, x.shape[along.dim] // (along.sections * len(keep))
            else:
                inner = shape[along.dim] // (along.sections * (length.ragged.size + along.more))
                sections = x.shape[along.dim] // (len(keep) * inner)
            parts = x.reshape(*x.shape[: along.dim], sections, len(keep), inner, *x.shape[along.dim + 1 :])
            parts = parts.index_select(along.dim + 1, keep.nonzero().view(-1).to(x.device))
            left = sections * parts.shape[along.dim + 1] * inner
            x = parts.reshape(*x.shape[: along.dim], left, *x.shape[along.dim + 1 :])
        return x

    def _given_places(self, length: Length, more: int, is_local: bool) -> Tensor:
        """Given places of a dim."""
        padded = length.mask.raw
        if is_local or not length.is_split or self.placement.virtual:
            true = length.own if is_local else length.true
            return torch.arange(length.local + more) < true + more
        whole = wrap(padded.to(self.placement.device_type), self.placement.mesh(), length.nd, (length.ragged.size,))
        return ~resplit.whole(whole, self.placement).cpu()


@dataclass(frozen=True)
class _RaggedDim:
    """A ragged dim of one input: its name, the input's, which dim it is, its true size, and how it lies.

    places: its size, or 0 where the input has no elements: a rank without rows makes no other rank's rows longer.
    """

    name: str
    of: str
    at: str
    size: int
    places: int
    nd: Nd


class Padding:
    """Pads the calls of a Graph, as ``set_shapes`` says."""

    def __init__(self, reader: BuildInputReader, ranks: Ranks, settings: Settings) -> None:
        self.reader, self.ranks, self.settings = reader, ranks, settings
        self.shapes: Shapes = settings.plugin_value("shapes")
        self.placement = reader.placement

    def read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool) -> tuple[Inputs, Padded]:
        """The inputs as they are padded.  Every rank calls it.

        Raises ConfigError for sizes that have no room for what comes, inputs and dims that are not there, and fills
        that an input cannot hold; and what ``BuildInputReader.read`` raises.
        """
        wanted = dict(self.settings.inputs)
        flat: list[Any] = []
        sizes_by_name: dict[str, list[_RaggedDim]] = {}
        failure: Exception | None = None
        try:
            flat, spec, names = self.reader.flatten(args, kwargs)
            self._check_keys(names)
            dims = {name: self._dims(name, x) for name, x in zip(names, flat, strict=True) if isinstance(x, Tensor)}
            for name, x in zip(names, flat, strict=True):
                if dims.get(name):
                    check_kind(name, x)
                    self._look(name, x, dims[name], self.reader.nd(name, x, wanted.get(name)), sizes_by_name)
            for some in sizes_by_name.values():
                self._check_alike(some)
        except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
            failure = error
        own = {name: some[0].places for name, some in sizes_by_name.items()}
        self.ranks.agree(SIZES, digest(str(self.shapes)), lambda: {"set_shapes": str(self.shapes)}, failure)
        everyone = self.ranks.collect(own)
        lengths = {
            name: self._length(some, [each.get(name, 0) for each in everyone]) for name, some in sizes_by_name.items()
        }
        self._check_fills(sizes_by_name, everyone, lengths)
        flat = [self._padded(name, x, dims.get(name, {}), lengths) if isinstance(x, Tensor) else x
                for name, x in zip(names, flat, strict=True)]  # fmt: skip
        inputs = self.reader.placed(flat, spec, names, wanted, running)
        known = {name: length for name, length in lengths.items() if length.ragged.size > 1}
        return inputs, Padded(self.placement, dims, known)

    # ---- reading

    def _check_keys(self, names: Sequence[str]) -> None:
        for key in self.shapes.keys:
            if not any(fits(key, name) for name in names) and (is_pattern(key) or not self.reader.may_be(key)):
                raise ConfigError(
                    f"set_shapes({{{key!r}: ...}}): build has no such input; its inputs in this call are "
                    f"{', '.join(names) or 'none'}"
                )

    def _dims(self, name: str, x: Tensor) -> dict[int, str]:
        dims = self.shapes.dims(name, x.dim())
        if dims and isinstance(x, DTensor):
            raise ConfigError(
                f"set_shapes pads plain tensors, and input {name} is a DTensor; pass each rank's own part"
            )
        return dims

    def _look(
        self, name: str, x: Tensor, dims: Mapping[int, str], nd: Nd, ragged_dims: dict[str, list[_RaggedDim]]
    ) -> None:
        _check_fill(name, x, self.shapes)
        for dim, ragged in dims.items():
            split = tuple(S(0) if sbp.is_split and sbp.dim == dim else B for sbp in nd)
            ragged_dims.setdefault(ragged, []).append(
                _RaggedDim(ragged, name, f"dim {dim} of {name}", x.shape[dim], x.shape[dim] if x.numel() else 0, split)
            )

    def _check_alike(self, some: Sequence[_RaggedDim]) -> None:
        first = some[0]
        for one in some[1:]:
            if one.size != first.size:
                raise ConfigError(
                    f"set_shapes calls {first.at} and {one.at} {first.name!r}, but they have {first.size} and "
                    f"{one.size} places: give dims of different sizes different names"
                )
            if one.nd != first.nd and not self.placement.virtual:
                raise ConfigError(
                    f"set_shapes calls {first.at} and {one.at} {first.name!r}, but ranks hold parts of one and all of "
                    "the other: give them different names"
                )

    def _check_fills(
        self, ragged_dims: Mapping[str, Sequence[_RaggedDim]], everyone: Sequence[Mapping[str, int]],
        lengths: Mapping[str, Length],
    ) -> None:  # fmt: skip
        """Check fills: where one rank's batch is longer than another's, the other's filling is data."""
        for name, some in ragged_dims.items():
            if lengths[name].is_split or len({each.get(name) for each in everyone} - {0}) == 1:
                continue
            for one in some:
                if not self.shapes.has_fill(one.of):
                    raise ConfigError(
                        f"ranks have {', '.join(str(each.get(name)) for each in everyone)} places along {name!r}, so "
                        f"the global batch fills up {one.at}; say with what: set_shapes(..., fill={{{one.of!r}: ...}})"
                        ", such as -100 for targets that a loss ignores, 0 for a mask"
                    )

    def _length(self, some: Sequence[_RaggedDim], sizes: Sequence[int]) -> Length:
        first, most, bucket = some[0], max(sizes), self.shapes.bucket(some[0].name)
        nd = next((one.nd for one in some if any(sbp.is_split for sbp in one.nd)), first.nd)
        room = bucket.padded_size(most)
        if most == 0:
            raise ConfigError(f"{first.at} has no places on any rank: there is nothing to compute")
        if room is None:
            raise ConfigError(
                f"{first.at} has {most} places, and set_shapes has room for {bucket.given[-1]} at most: the sizes of "  # type: ignore[index]
                f"{first.name!r} are {list(bucket.given)}. Add a size, or cut the batch"  # type: ignore[arg-type]
            )
        ranks = prod(n for sbp, n in zip(nd, self.placement.hierarchy, strict=True) if sbp.is_split)
        parts = ranks if self.placement.virtual else 1
        parts *= self.settings.gradient_accumulation_steps if self.shapes.is_first(first.name) else 1
        local = -(-room // parts) * parts
        size = local if self.placement.virtual else global_shape((local,), nd, self.placement.hierarchy)[0]
        is_prefix = self.placement.virtual or ranks == 1
        least = bucket.least(room) if is_prefix else 1  # of all rows, other ranks may have any number
        return Length(Ragged(first.name, size, least, is_prefix), first.size, most, local, nd)

    def _padded(self, name: str, x: Tensor, dims: Mapping[int, str], lengths: Mapping[str, Length]) -> Tensor:
        wanted = [lengths[dims[i]].local if i in dims else size for i, size in enumerate(x.shape)]
        if list(x.shape) == wanted:
            return x
        filled = x.new_full(wanted, self.shapes.filled(name))
        if x.numel():
            filled[tuple(map(slice, x.shape))] = x.detach()
        return filled


def _check_fill(name: str, x: Tensor, shapes: Shapes) -> None:
    """Raise ConfigError for a number that an input cannot hold."""
    number, dtype = shapes.filled(name), x.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if number != int(number) or not low <= number <= high:
        raise ConfigError(
            f"set_shapes(..., fill={{{name!r}: {number!r}}}): {name} is {tensor_text(x)}, which cannot hold it"
        )
