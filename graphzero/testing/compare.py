"""Text in and text out, and the same step twice."""

from __future__ import annotations

import difflib
import textwrap
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import ScalarType
from graphzero.runtime.tensors.shards import piece
from graphzero.testing import accept
from graphzero.testing.simulate import RankValues, lower_program, run_program


def assert_graph(graph: StepGraph, expected: str) -> None:
    """Compare a graph's text with ``expected``; indentation and spaces at the ends do not matter.

    Under ``pytest --accept`` a string literal at the call, or a module constant named there, is rewritten.
    """
    printed = str(graph).strip()
    wanted = textwrap.dedent(expected).strip()
    if printed == wanted:
        return
    if accept.enabled():
        accept.rewrite(printed)
        return
    diff = "\n".join(
        difflib.unified_diff(wanted.splitlines(), printed.splitlines(), "expected", "found", lineterm="", n=2)
    )
    raise AssertionError(f"the graph is not the expected one (pytest --accept takes it as it is):\n{diff}")


@_compat.cpu_by_default
def assert_same_step(
    before: StepGraph,
    after: StepGraph,
    ranks: int | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Run two programs on virtual ranks from equal inputs and compare every output and every new state.

    before, after: graphs at any level over the same placeholders; what is not lowered yet is lowered first.
    ranks: number of virtual ranks; by default those of the graphs' placement.  A graph that is lowered already
        runs on its own placement only.

    Raises:
        AssertionError: which value differs, by how much.
    """
    names = [[node.name for node in graph.placeholders()] for graph in (before, after)]
    if sorted(names[0]) != sorted(names[1]):
        raise ConfigError(f"the two graphs have other inputs: {sorted(set(names[0]) ^ set(names[1]))}")
    inputs = random_inputs(before, seed)
    first, second = (_run(lower_program(graph, ranks), inputs) for graph in (before, after))
    if first.keys() != second.keys():
        raise AssertionError(f"one of the steps does not give {', '.join(sorted(first.keys() ^ second.keys()))}")
    for name, (old, old_sbp) in first.items():
        new, new_sbp = second[name]
        try:
            torch.testing.assert_close(new, old, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            where = f"{name}: {old_sbp} before, {new_sbp} after" if old_sbp != new_sbp else f"{name}: {old_sbp}"
            raise AssertionError(f"the steps differ in {where}\n{error}") from None
    empty = [name for name, (x, _) in first.items() if isinstance(x, Tensor) and x.numel() and bool(x.isnan().all())]
    if empty:
        raise AssertionError(
            f"{', '.join(empty)} is nan in both steps, so nothing was compared; inputs are small positive numbers"
        )


def random_inputs(graph: StepGraph, seed: int) -> dict[str, Any]:
    """Global values for all placeholders: small positive numbers, so that roots and logarithms are defined."""
    generator = torch.Generator().manual_seed(seed)
    return {node.name: _random(node, generator) for node in graph.placeholders()}


def _random(node: fx.Node, generator: torch.Generator) -> Any:
    type_ = value.type_of(node)
    if isinstance(type_, ScalarType):
        return {"float": 0.1, "int": 1, "bool": True}[type_.kind]
    if type_.dtype.is_floating_point:
        return torch.rand(type_.shape, generator=generator, dtype=torch.float64).add_(0.05).to(type_.dtype)
    return torch.randint(0, 2, type_.shape, generator=generator).to(type_.dtype)


def _run(graph: StepGraph, inputs: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Whole outputs, aux values and new states by name, with their SBP."""
    return {
        name: (_whole(name, value), ", ".join(map(str, value.nd))) for name, value in run_program(graph, inputs).items()
    }


def _whole(name: str, values: RankValues) -> Any:
    """The value that the ranks hold between them; what several ranks hold must be equal."""
    whole = values.whole()
    for position, own in enumerate(values.ranks if values.nd else ()):
        if not torch.allclose(piece(whole, values.nd, values.hierarchy, position), own, rtol=0, atol=0, equal_nan=True):
            raise AssertionError(f"{name}: rank {position} holds other values than the ranks that hold the same part")
    return whole
