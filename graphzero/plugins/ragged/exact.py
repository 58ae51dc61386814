"""``exact``: a step that was captured for padded sizes computes what it would of what was given, without padding.

One law holds for every value of the rewritten program: cut back to the true sizes, it is the value that the same op
has in the step without padding.  What lies in padded places may be anything, NaN too.  It follows op by op:

* The rules of splits say that an op treats the pieces of a dim apart: with operands ``S(d)`` its result is ``S(e)``.
  What was given is a piece, and padding is one.  So the op stays as it is, and its result is padded along ``e``.
* Where the rules say that pieces give a partial sum, padding must add nothing.  A sum of parts in which an operand is
  linear is zero where that operand is: so operands are put to zero where they are padded.  A maximum is given -inf.
* So far ``by_rule``.  Of some ops the rules say too little, as they read places by number or a whole dim: ``indices``,
  ``parts`` and ``whole_dims`` speak of them first, each of a kind of such ops.  Each function of theirs, listed in
  ``TABLE``, speaks for the dims that it knows of and leaves the others to ``by_rule``.
* Numbers that were sizes, the counts that means divide by, become the counts of what was given.  Which numbers these
  are, and which dims are ragged, comes of capturing the step at several sizes: see ``sizes``.

All else is refused, with the op and its line.  Forward, backward and update are ops alike here: nothing is asked of
autograd, and batch statistics are those of the rows that were given.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.errors import CaptureError
from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import AliasKind, alias_kind, is_name
from graphzero.ir.graph import StepGraph
from graphzero.ir.ragged import Along
from graphzero.ops import AS_GLOBAL, AS_LOCAL
from graphzero.plugins.ragged import indices, parts, whole_dims  # noqa: F401 - which fill TABLE
from graphzero.plugins.ragged.by_rule import create, speak_for_one
from graphzero.plugins.ragged.masks import Masks
from graphzero.plugins.ragged.numbers import write_numbers
from graphzero.plugins.ragged.shapes import Ragged
from graphzero.plugins.ragged.sizes import Sizes
from graphzero.plugins.ragged.table import TABLE
from graphzero.plugins.ragged.work import Dims, PaddedOp

aten = torch.ops.aten
_ALIKE = (aten.full.default, aten.zeros.default, aten.ones.default, aten.new_zeros.default, aten.new_ones.default,
          aten.new_full.default)  # fmt: skip
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_SHOW = (AliasKind.RESHAPE, AliasKind.UNIT, AliasKind.TURN, AliasKind.NAME, AliasKind.COPY)


@dataclass(frozen=True)
class Exact:
    """outputs: along what each thing that build returns is padded.  least: the fewest places of a ragged dim that the
    step reads, by its name, where that is more than one.
    """

    graph: StepGraph
    outputs: tuple[Dims, ...]
    least: Mapping[str, int]


def exact(graph: StepGraph, sizes: Sizes, ragged: Sequence[Ragged], inputs: Mapping[str, Mapping[int, str]]) -> Exact:
    """Rewrite ``graph``, which changes.

    sizes: what in it depends on which ragged dim.  inputs: name -> dim -> the ragged dim whose size it has.
    Raises CaptureError for what padding cannot be kept out of, with the op and the line.
    """
    return _ExactRewrite(graph, sizes, {dim.name: dim for dim in ragged}, inputs).rewrite()


class _ExactRewrite:
    def __init__(
        self, graph: StepGraph, sizes: Sizes, ragged: Mapping[str, Ragged], inputs: Mapping[str, Mapping[int, str]]
    ) -> None:
        self.graph, self.sizes, self.inputs = graph, sizes, inputs
        self.nodes = list(graph.nodes)
        self.masks = Masks(graph, ragged)
        self.found: dict[fx.Node, tuple[Dims, ...]] = {}
        self.counts: dict[fx.Node, str] = {}  # values that number the places of a ragged dim, 0 1 2 ...
        self.flat: set[fx.Node] = set()  # values of one number everywhere, whose ragged dims may be any
        self.least: dict[str, int] = {}

    def rewrite(self) -> Exact:
        for node in self.nodes:
            if node.op == "placeholder":
                self.found[node] = self._given(node)
            elif node.op == "call_function":
                self.found[node] = self._result_dims(node)
        self._check_ends()
        outputs = tuple(self._dims_of(x) if isinstance(x, fx.Node) else () for x in self.graph.outputs)
        return Exact(self.graph, outputs, {name: least for name, least in self.least.items() if least > 1})

    def _dims_of(self, node: fx.Node) -> Dims:
        alongs = self.found[node]
        return alongs[0] if alongs else ()

    def _given(self, node: fx.Node) -> tuple[Dims, ...]:
        role = value.role_of(node)
        named = self.inputs.get(role.of, {}) if role is not None and role.kind == "batch" else {}
        ragged = {dim: name for dim, name in named.items() if name in self.masks.ragged}
        return (tuple(sorted(Along(name, dim) for dim, name in ragged.items())),)

    # ---- one op

    def _result_dims(self, node: fx.Node) -> tuple[Dims, ...]:
        target: Any = node.target
        if target is operator.getitem:
            return (self.found[value.operand(node)][node.args[1]],)  # type: ignore[index]
        operands = value.own_operands(node)
        given = [self._dims_of(x) for x in operands]
        flat = any(x in self.flat for x in operands)
        if not any(given) and not flat and not self.sizes.is_ragged(node) and not self.sizes.numbers(node):
            return tuple(() for _ in value.shapes(node))
        work = PaddedOp(node, self.sizes, self.masks, operands, given, self.counts, self.least)
        self._check_counts(work)
        if is_name(target) or target is ops.use:
            return tuple(given[:1])
        if target in (AS_LOCAL, AS_GLOBAL) or not calls.is_op(node):
            raise work.refusal(self._name(work), "is code that each rank runs on its own values")
        if self._is_flat(work):
            self.flat.add(node)
            write_numbers(work)
            return tuple(() for _ in value.shapes(node))
        if target in TABLE:
            TABLE[target](work)
        while work.left:
            speak_for_one(work, self.flat)
        self._check_flat(work)
        create(work)
        self._check_shapes(work)
        self._write_fills(work)
        write_numbers(work)
        self._count(node)
        return tuple(tuple(sorted(alongs)) for alongs in work.result_dims)

    def _is_flat(self, work: PaddedOp) -> bool:
        """Return whether the op makes one number everywhere, in dims that depend on ragged sizes."""
        node = work.node
        if any(work.given) or not self.sizes.is_ragged(node) or not value.is_tensor(node):
            return False
        if node.target in _ALIKE:
            return any(self._is_odd(node, dim) for dim in range(len(value.tensor_type(node).shape)))
        one = all(
            x in self.flat or value.tensor_type(x).numel == 1 and not self.sizes.is_ragged(x) for x in work.operands
        )
        if not work.operands or not one:
            return False
        if any(x in self.flat for x in work.operands):
            return _hands_on(node) or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        return node.target is aten.expand.default and any(
            self._is_odd(node, dim) for dim in range(len(value.tensor_type(node).shape))
        )

    def _is_odd(self, node: fx.Node, dim: int) -> bool:
        """Return whether the size of a dim depends on ragged dims otherwise than as one of them plus or minus some
        places."""
        names = self.sizes.dims(node, 0, dim)
        return bool(names) and (len(names) > 1 or self.sizes.straight(node, 0, dim, names[0]) is None)

    def _name(self, work: PaddedOp) -> str:
        names = [along.name for dims in work.given for along in dims]
        return sorted(names)[0] if names else next(iter(self.masks.ragged))

    # ---- what must hold

    def _check_shapes(self, work: PaddedOp) -> None:
        for result, shape in enumerate(value.shapes(work.node)):
            for dim in range(len(shape)):
                wanted = set(self.sizes.dims(work.node, result, dim))
                have = {along.name for along in work.result_dims[result] if along.dim == dim}
                if wanted != have:
                    name = sorted(wanted ^ have)[0]
                    what = f"makes {list(shape)}, whose dim {dim} depends on its size in a way that is not known"
                    raise work.refusal(name, what)

    def _check_flat(self, work: PaddedOp) -> None:
        """Check that a value which is one number everywhere is read only where another operand says which places are
        padded."""
        for j, x in enumerate(work.operands):
            for dim in range(len(value.tensor_type(x).shape)) if x in self.flat else ():
                for name in self.sizes.dims(x, 0, dim):
                    if (j, dim, name) not in work.cut:
                        raise work.refusal(name, "reads places that may be padded")

    def _check_counts(self, work: PaddedOp) -> None:
        """Row numbers are others without padding where each rank's share ends in padding."""
        for x in work.operands:
            name = self.counts.get(x, "")
            if name and not self.masks.ragged[name].is_prefix and not _hands_on(work.node) and work.node.target not in (
                aten.index.Tensor, aten._unsafe_index.Tensor
            ):  # fmt: skip
                raise work.refusal(name, "reads numbers of rows, which depend on how many rows the other ranks have")

    def _count(self, node: fx.Node) -> None:
        """Note what numbers the places of a ragged dim."""
        along = next(iter(self.found_of(node)), None)
        source = node.args[0] if node.args else None
        if node.target in _COUNTS and along is not None and along.more == 0:
            start, step = (0, 1) if len(node.args) < 2 else (node.args[0], (*node.args, 1)[2])
            if (start, step) == (0, 1):
                self.counts[node] = along.name
        elif isinstance(source, fx.Node) and source in self.counts and _hands_on(node):
            self.counts[node] = self.counts[source]

    def found_of(self, node: fx.Node) -> list[Along]:
        """Along what the op's first result is padded, of its size alone: while it is being made."""
        shape = value.shapes(node)[0] if value.shapes(node) else ()
        names = [(name, dim) for dim in range(len(shape)) for name in self.sizes.dims(node, 0, dim)]
        return [along for name, dim in names if name in self.masks.ragged
                and (along := self.sizes.straight(node, 0, dim, name)) is not None]  # fmt: skip

    def _check_ends(self) -> None:
        """States are of one size, outputs are cut, and numbers that build returns are those of what was given."""
        for name, node in self.graph.updates.items():
            if self.sizes.is_ragged(node):
                raise CaptureError(
                    f"set_shapes pads inputs, and the new value of {name} depends on their size: what a step keeps "
                    "cannot be of another size in each call"
                )
        for i, x in enumerate(self.graph.outputs):
            if not self.masks.ragged.get(self.counts.get(x, ""), Ragged("", 0)).is_prefix:
                raise CaptureError(
                    f"build returns, as its output {i}, numbers of rows, which depend on how many rows other ranks "
                    "have; count them outside of build"
                )
            if x in self.flat:
                raise CaptureError(
                    f"build returns, as its output {i}, a tensor whose size depends on those of its inputs, and "
                    "which part of it is padding is not known; make it outside of build"
                )
            if not isinstance(x, fx.Node) and self.sizes.numbers(self.graph.output):
                self._check_literal(i)

    def _check_literal(self, i: int) -> None:
        ends: list[Any] = [node.args[0] for node in self.sizes.same(self.graph.output)]
        literals = [outputs[i] for outputs, *_ in ends]
        if any(x != literals[0] for x in literals[1:]):
            raise CaptureError(
                f"build returns {literals[0]!r} as its output {i}, a number that depends on the sizes of its inputs; "
                "set_shapes pads them, so it would be that of padding. Take it from the inputs outside of build"
            )

    # ---- writing

    def _write_fills(self, work: PaddedOp) -> None:
        if work.fills:
            new = [
                self.masks.filled(x, work.fills[i].items(), work.node) if i in work.fills else x
                for i, x in enumerate(work.operands)
            ]
            _replace_operands(work.node, new)


def _hands_on(node: fx.Node) -> bool:
    """Return whether an op shows the same numbers in other dims or another dtype."""
    plus_nothing = node.target is aten.add.Tensor and tuple(node.args[1:]) == (0,)
    return (
        alias_kind(node.target) in _SHOW or plus_nothing or node.target in (aten.expand.default, aten._to_copy.default)
    )


def _replace_operands(node: fx.Node, new: Sequence[fx.Node]) -> None:
    """Give each of the op's tensor operands, in their order, another value."""
    left = iter(new)

    def put(x: fx.Node) -> fx.Node:
        return next(left) if value.is_tensor(x) else x

    node.args = fx.map_arg(node.args, put)
    node.kwargs = fx.map_arg(node.kwargs, put)
