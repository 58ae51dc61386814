"""Facts about one op that its rule must account for: padded dims of operands, and numbers that depend on sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphzero.errors import CaptureError
from graphzero.ir import value
from graphzero.ir.ragged import Along
from graphzero.ir.text.printer import print_line
from graphzero.plugins.ragged.masks import Masks
from graphzero.plugins.ragged.shapes import Ragged
from graphzero.plugins.ragged.sizes import Place, Sizes

Dims = tuple[Along, ...]  # in order: a set has another one in each process, and ranks must write one program


@dataclass
class PaddedOp:
    """One op of a padded program.

    operands: its tensors, in the order of its arguments.  given: the padded dims of each operand; left: those that no
    rule has explained yet.  result_dims: the padded dims of each result.  fills: operand number -> values that the
    operand has where it is padded.  numbers: arguments that depend on sizes, and that no rule has explained yet.
    cut: (operand, dim, ragged dim) explained by a rule of splits.  least: ragged dim -> the fewest places that the op
    reads.
    """

    node: fx.Node
    sizes: Sizes
    masks: Masks
    operands: list[fx.Node]
    given: list[Dims]
    counts: Mapping[fx.Node, str]
    least: dict[str, int]
    left: set[tuple[int, Along]] = field(init=False)
    result_dims: list[set[Along]] = field(init=False)
    fills: dict[int, dict[Along, float]] = field(init=False, default_factory=dict)
    numbers: dict[Place, list[Any]] = field(init=False)
    cut: set[tuple[int, int, str]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.left = {(i, dim) for i, dims in enumerate(self.given) for dim in dims}
        self.result_dims = [set() for _ in value.shapes(self.node)]
        self.numbers = self.sizes.numbers(self.node)

    @property
    def ragged(self) -> Mapping[str, Ragged]:
        """The ragged dims by name."""
        return self.masks.ragged

    @property
    def args(self) -> tuple[Any, ...]:
        """The op's positional arguments."""
        return self.node.args

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument, by its place or name."""
        node = self.node
        return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)

    def number_of(self, place: int) -> int:
        """The number among ``operands`` of the argument at a place."""
        return len([x for x in value.flat_nodes(self.node.args[:place]) if value.is_tensor(x)])

    def at(self, operand: int, dim: int) -> list[Along]:
        """Along what one dim of an operand is padded, of what is left."""
        return sorted((a for i, a in self.left if i == operand and a.dim == dim), key=lambda a: (a.name, a.sections))

    def plain(self, operand: int, dim: int) -> Along | None:
        """The one thing along which a dim of an operand is padded at its end, None for nothing.

        Refuses what is padded in several places, or along several ragged dims.
        """
        alongs = self.at(operand, dim)
        if not alongs:
            return None
        along, size = alongs[0], value.tensor_type(self.operands[operand]).shape[dim]
        dims = self.ragged[along.name]
        if len(alongs) > 1 or along.sections > 1 or size != dims.size + along.more or not dims.is_prefix:
            raise self.refusal(alongs[0].name, "reads places by their number, and the given ones are not contiguous")
        return along

    def take(self, operand: int, along: Along) -> None:
        """Mark an operand's dim as explained."""
        self.left.discard((operand, along))

    def fill(self, operand: int, along: Along, number: float) -> None:
        """Let the op read ``number`` where an operand is padded."""
        self.fills.setdefault(operand, {})[along] = number

    def mark_result(self, result: int, along: Along) -> None:
        """Say along what a result is padded."""
        if not self.sizes.fits(self.node, result, along) or along in self.result_dims[result]:
            raise self.refusal(
                along.name, f"makes dim {along.dim} of {_shape(self.node, result)} of it in a way that is not known"
            )
        self.result_dims[result].add(along)

    def refusal(self, name: str, what: str, hint: str = "") -> CaptureError:
        """The error that names the op and the user's line."""
        source = value.source_of(self.node)
        hint = hint or (
            "Leave that dim out of set_shapes and pad it in the data yourself, or write the line so that padding has "
            "no part in it: with a mask and a sum, or a loss with ignore_index"
        )
        return CaptureError(
            f"set_shapes pads the dim {name!r}, and padding cannot be tracked here: {_name(self.node)} "
            f"{what}\n\n  > {print_line(self.node)}" + (f"\n\n  at {source}" if source else "") + f"\n\n  {hint}"
        )


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _shape(node: fx.Node, result: int) -> str:
    return str(list(value.shapes(node)[result]))


Rule = Callable[[PaddedOp], None]


def fill_all(work: PaddedOp, operand: int, number: float, dims: Iterable[int] | None = None) -> list[Along]:
    """Fill an operand wherever it is padded along ``dims``, and speak for that; what it was."""
    alongs = [a for i, a in sorted(work.left, key=lambda x: (x[0], x[1].dim, x[1].sections, x[1].name)) if i == operand
             and (dims is None or a.dim in dims)]  # fmt: skip
    for along in alongs:
        work.fill(operand, along, number)
        work.take(operand, along)
    return alongs
