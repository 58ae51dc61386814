"""Each built-in pass says what it requires and ensures, and shows it on a program; ``--accept`` refreshes that."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract import Contract, Example, contract_of
from toys import random_step

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.ir.text.printer import print_graph
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.ir.verifier.verify import verify
from graphzero.ops import PIN
from graphzero.passes import BuiltinPass, Options, Pipeline, default_passes, parse_passes
from graphzero.passes.pass_list import pass_entries
from graphzero.passes.schedule.bucket import JOINED
from graphzero.testing import assert_same_step

EVERY = 1000  # lines around a difference
KINDS = {entry.name: entry.kind for entry in pass_entries()}


class Negate(BuiltinPass):
    """Turns signs.

    factor: of what.
    Requires: nothing, or
        little.
    Ensures: that
        it ends.

    Example::

        negate{factor=2}

        -graph a(dp=1)
        -forward:
        +graph b(dp=1)
    """


class Silent(BuiltinPass):
    """Says nothing.

    Raises ValueError for what is wrong.
    """


def run(example: Example) -> Example:
    """The example as it is by now."""
    before = parse(example.before)
    verify(before)
    (pass_,) = parse_passes(example.passes, before.level)
    after = Pipeline([pass_])(before)
    return Example(example.passes, difference(before, after))


def difference(before: StepGraph, after: StepGraph) -> str:
    """Both programs in one, without the spaces that line their columns up."""
    old, new = (print_graph(graph, align=False).splitlines() for graph in (before, after))
    return "\n".join([*difflib.unified_diff(old, new, lineterm="", n=EVERY)][3:])


def accept(kind: type[BuiltinPass], old: Example, new: Example) -> None:
    """Write an example into the docstring of its pass."""
    file, source = Path(inspect.getsourcefile(kind) or ""), inspect.getsource(kind)
    file.write_text(file.read_text(encoding="utf-8").replace(source, accepted(source, old, new)), encoding="utf-8")


def accepted(source: str, old: Example, new: Example) -> str:
    """The source of a pass with another example."""
    shown, instead = (textwrap.indent(str(one), " " * 8) for one in (old, new))
    assert shown in source
    return source.replace(shown, instead)


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_has_a_contract(name: str) -> None:
    contract = contract_of(KINDS[name])
    for text in (contract.summary, contract.requires, contract.ensures):
        assert text.endswith("."), f"{name}: the docstring says Requires: and Ensures:, in sentences"


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_makes_of_its_example_what_it_shows(name: str, request: pytest.FixtureRequest) -> None:
    example = contract_of(KINDS[name]).example
    assert example is not None, f"{name}: the docstring ends in an Example::, see docs/contract.py"
    found = run(example)
    if request.config.getoption("--accept", default=False):
        accept(KINDS[name], example, found)
        example = found
    assert str(found) == str(example)
    assert example.passes.partition("{")[0] == name
    assert found.before != found.after
    again = parse(found.after)
    verify(again)
    assert print_graph(again, align=False).rstrip("\n") == found.after


@pytest.mark.parametrize("name", KINDS)
def test_both_programs_of_an_example_are_the_same_step(name: str) -> None:
    example = contract_of(KINDS[name]).example
    assert example is not None
    assert_same_step(parse(example.before), parse(example.after))


# ---- what can be seen of a promise in any program


def no_op_is_added(before: StepGraph, after: StepGraph) -> bool:
    return len([*before.nodes]) == len([*after.nodes])


def has_none(*targets: Any) -> Callable[[StepGraph, StepGraph], bool]:
    return lambda before, after: not any(node.target in targets for node in after.nodes)


def is_pinned(before: StepGraph, after: StepGraph) -> bool:
    uses = after.graph.find_nodes(op="call_function", target=ops.use)
    tensors = [node for node in (*after.placeholders(), *uses) if value.is_tensor(node)]
    return all(all(value.pins_of(node) or (False,)) for node in (*tensors, *after.gradients().values()))


ENSURED: dict[str, Callable[[StepGraph, StepGraph], bool]] = {
    "pin": is_pinned,
    "zero": no_op_is_added,
    "expand": is_pinned,
    "propagate": lambda before, after: all(value.sbp_of(x) for x in after.nodes if value.is_tensor(x)),
    "lower_boxing": has_none(ops.box, ops.use, PIN),
    "localize": lambda before, after: all(value.type_of(x) == value.type_of(before.node(x.name)) for x in after.nodes
                                          if x.op == "call_function"),
    "bucket": has_none(*JOINED),
    "launch": has_none(*ops.BUCKETS),
    "overlap": no_op_is_added,
    "optimizer_in_backward": no_op_is_added,
    "overlap_update": no_op_is_added,
    "assign": lambda before, after: all(new.target is ops.assign for new in after.updates.values()),
    "slots": lambda before, after: all(x.slot != NO_SLOT_YET for x in liveness(after).transfers.values()),
    "dead_code": lambda before, after: all(x.users for x in after.nodes if x.op == "call_function"),
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_pass_gives_what_it_promises(stage: int, seed: int) -> None:
    told = Options(stage=stage, optimizer_in_backward=True, delay_gradients=True, keep_gathered=(), bucket_bytes=64)
    pipeline = Pipeline(default_passes(told))
    pipeline(parse(random_step(seed)))
    found = {record.name: record for record in pipeline.history}
    assert ENSURED.keys() <= found.keys()
    for name, holds in ENSURED.items():
        assert holds(found[name].before, found[name].after), name


# ---- how it is read and written


def test_a_contract_is_read_from_a_docstring() -> None:
    example = Example("negate{factor=2}", "-graph a(dp=1)\n-forward:\n+graph b(dp=1)")
    assert contract_of(Negate) == Contract("Turns signs.", "nothing, or little.", "that it ends.", example)
    assert contract_of(Silent) == Contract("Says nothing.", "", "", None)


def test_an_accepted_example_stands_in_the_docstring_as_it_is_printed() -> None:
    old = contract_of(Negate).example
    assert old is not None
    names: dict[str, type] = {"BuiltinPass": BuiltinPass}
    exec(accepted(inspect.getsource(Negate), old, replace(old, difference="-graph c(dp=2)\n   x")), names)
    assert contract_of(names["Negate"]).example == replace(old, difference="-graph c(dp=2)\n   x")
