"""Passes, and the pipeline that runs them.

A pass is any callable ``StepGraph -> StepGraph``; it may change what it gets.  Cloning, verifying, timing and the
record of what changed are the pipeline's, never a pass's.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from graphzero.errors import ConfigError, VerifyError, shorten_repr
from graphzero.extensions import PACKAGE, PASSES, Extension, extensions
from graphzero.ir import value
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.packed_graph import PackedGraph, PackedHistory
from graphzero.ir.streams.launches import check_program_launches
from graphzero.ir.text.printer import print_graph, role_text
from graphzero.ir.value import Role
from graphzero.ir.verifier.node_facts import check_form
from graphzero.ir.verifier.stream_order import check_streams
from graphzero.ir.verifier.verify import facts_of, verify
from graphzero.logs import phase
from graphzero.passes.option_text import write_options
from graphzero.sbp.placement import MICRO_BATCHES, Placement

Pass = Callable[[StepGraph], StepGraph]


def pass_name(pass_: Pass) -> str:
    """A pass's ``name``, else its function or class name in snake case."""
    name = getattr(pass_, "name", None) or getattr(pass_, "__name__", None) or type(pass_).__name__
    return snake_case(str(name))


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def pass_text(pass_: Pass) -> str:
    """A pass as a list of passes in text has it: ``zero{stage=3}``.

    A pass of the user's that is a dataclass has its options there too, if each has a text form; else its name alone.
    """
    options = ""
    if is_dataclass(pass_):
        with suppress(TypeError, NameError):  # an option without a text form
            options = write_options(pass_)
    return pass_name(pass_) + options


class BuiltinPass:
    """Base of the passes that ship with graphzero: small frozen dataclasses with ``__call__``."""

    @property
    def name(self) -> str:
        """The class's name in snake case: what ``history`` and ``config.add_pass`` call it."""
        return snake_case(type(self).__name__)

    def __str__(self) -> str:
        return pass_text(self)

    def __call__(self, graph: StepGraph) -> StepGraph:
        raise NotImplementedError


class Group(BuiltinPass):
    """Passes that go by one name.  A ``Pipeline`` runs, verifies and records each of them by itself."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes in order."""
        raise NotImplementedError

    def __call__(self, graph: StepGraph) -> StepGraph:
        for pass_ in self.passes:
            graph = pass_(graph)
        return graph


def is_built_in(pass_: Pass) -> bool:
    """Return whether a pass is graphzero's own: what others' passes make is looked at more closely."""
    return isinstance(pass_, BuiltinPass) and type(pass_).__module__.partition(".")[0] == PACKAGE


def plugin_of(pass_: Pass) -> Extension | None:
    """The entry point of another distribution that a pass comes from."""
    plugin = None if is_built_in(pass_) else extensions(PASSES).get(snake_case(type(pass_).__name__))
    return plugin if plugin is not None and type(pass_) is getattr(plugin.load(), "kind", None) else None


def each(passes: Iterable[Pass]) -> Iterator[Pass]:
    """The passes, those of groups one by one."""
    for pass_ in passes:
        yield from each(pass_.passes) if isinstance(pass_, Group) else (pass_,)


@dataclass(frozen=True)
class Record:
    """Record of one pass of a run: its name, the graph before and after, and its seconds without verification.

    The graphs are kept packed (``ir.packed_graph``).
    """

    name: str
    pass_: Pass = field(repr=False)
    packed: tuple[PackedGraph, PackedGraph] = field(repr=False)
    seconds: float

    @property
    def before(self) -> StepGraph:
        """The graph that the pass was given, made again each time: the caller may change it."""
        return self.packed[0].graph()

    @property
    def after(self) -> StepGraph:
        """The graph that the pass returned, also made again each time."""
        return self.packed[1].graph()

    @property
    def is_unchanged(self) -> bool:
        """Whether the pass left the graph as it was."""
        return self.packed[0] is self.packed[1]

    @property
    def text(self) -> str:
        """The pass as ``graphzero opt --passes`` takes it, options included."""
        return pass_text(self.pass_)

    def diff(self) -> str:
        """A unified diff of the texts before and after the pass."""
        before, after = (print_graph(graph, align=False).splitlines() for graph in (self.before, self.after))
        return "\n".join(
            difflib.unified_diff(
                before, after, fromfile=f"before {self.name}", tofile=f"after {self.name}", lineterm="", n=1
            )
        )


class Pipeline:
    """Runs passes one after another: ``Pipeline(passes)(graph)``.

    They change one clone of the graph, in turn; after each it is verified, and packed for the record.  ``history``
    keeps one ``Record`` per pass of the last run.

    verifies: False for programs that are only priced, of which many are made: only passes of others are verified then.

    Raises:
        ConfigError: when it is made, of what is not a list of passes.
        VerifyError: a pass returned another type, dropped an update or an input, or broke a law of the IR.
    """

    def __init__(self, passes: Iterable[Pass], verifies: bool = True):
        try:
            self.passes, self.verifies = list(each(passes)), verifies
            wrong = not all(map(callable, self.passes))
        except TypeError:  # not iterable
            wrong = True
        if wrong:
            said = f"Pipeline({shorten_repr(passes)})"
            raise ConfigError(f"{said}: give a list of passes, callables that take a StepGraph")
        self.history: list[Record] = []

    def __call__(self, graph: StepGraph) -> StepGraph:
        if graph.stated:
            verify(graph)
        clone, packer = graph.clone(), PackedHistory()
        return self._run_passes(packer.add_copy(clone), clone, packer)

    def after(self, record: Record, given: StepGraph | None = None) -> StepGraph:
        """Go on from where another pipeline was after a pass, as ``record`` keeps it.

        given: the graph as it was then, which changes; by default it is made again.
        """
        return self._run_passes(record.packed[1], record.after if given is None else given, PackedHistory())

    def _run_passes(self, before: PackedGraph, graph: StepGraph, packer: PackedHistory) -> StepGraph:
        """before: the same as ``graph``, which changes."""
        self.history = []
        for pass_ in self.passes:
            with phase(pass_name(pass_)):
                graph, before = self._run_one(pass_, graph, before, packer)
        if self.verifies and self.history:
            where = f"after pass {self.history[-1].name}: "
            check_streams(graph, where)
            if graph.level == LEVELS[-1]:
                check_program_launches(graph, where)
        return graph

    def _run_one(
        self, pass_: Pass, graph: StepGraph, before: PackedGraph, packer: PackedHistory
    ) -> tuple[StepGraph, PackedGraph]:
        """Run a pass; a graph that it leaves as it was is neither verified nor packed again."""
        given, plugin = _Given.from_graph(graph), plugin_of(pass_)
        name = pass_name(pass_) + (f" of the distribution {plugin.distribution}" if plugin is not None else "")
        known = None if is_built_in(pass_) else facts_of(graph)
        started = time.perf_counter()
        with nullcontext() if plugin is None else plugin.name_errors():
            result = _result(pass_, graph, name)
        finished = time.perf_counter()
        graph = _checked(given, result, name)
        after = packer.add_copy(graph)
        if (self.verifies or known is not None) and not (self.history and after is before):
            verify(graph, after=repr(pass_) if known is None else name, is_final=False, known=known)
        graph.settle()
        self.history.append(Record(pass_name(pass_), pass_, (before, after), finished - started))
        return graph, after


def _result(pass_: Pass, graph: StepGraph, name: str) -> object:
    try:
        return pass_(graph)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"in pass {name} over graph {graph.name}; pipeline.history holds the passes before it")
        raise


def is_pattern(name: str) -> bool:
    """Return whether a name has wildcards."""
    return not set(name).isdisjoint("*?[")


@dataclass(frozen=True)
class _Given:
    """Parts of a graph that a pass must keep."""

    updates: tuple[str, ...]
    inputs: dict[str, tuple[Any, ...]]
    stages: dict[str, int]
    outputs: int
    level: str
    placement: Placement

    @classmethod
    def from_graph(cls, graph: StepGraph) -> _Given:
        outputs = len(graph.outputs)
        return cls(tuple(graph.updates), _inputs_of(graph), _stages_of(graph), outputs, graph.level, graph.placement)


def _inputs_of(graph: StepGraph) -> dict[str, tuple[Any, ...]]:
    """Type and role of each input: the runtime binds tensors by them."""
    return {node.name: (node.meta.get("type"), value.role_of(node)) for node in graph.placeholders()}


def _stages_of(graph: StepGraph) -> dict[str, int]:
    """Pipeline stage of each input that is on one."""
    return {node.name: node.meta["stage"] for node in graph.placeholders() if "stage" in node.meta}


def _checked(given: _Given, after: object, name: str) -> StepGraph:
    if not isinstance(after, StepGraph):
        raise VerifyError(
            f"pass {name} returned {type(after).__name__}, not a StepGraph\n"
            "  A pass changes the graph it is given and returns it"
        )
    check_form(after, name)
    for problem, hint in _changed_parts(given, after):
        raise VerifyError(f"pass {name} {problem}\n  {hint}")
    return after


def _changed_parts(given: _Given, after: StepGraph) -> Iterator[tuple[str, str]]:
    """Parts that a pass has not kept: the problem, and the next step."""
    if lost := [update for update in given.updates if update not in after.updates]:
        keep = "Keep every entry of graph.updates; give it a new value with graph.set_output(...)"
        yield f"dropped the update of {_first_of(lost)}: the step would leave it as it was", keep
    inputs = _inputs_of(after)
    if gone := [name for name in given.inputs if name not in inputs]:
        problem = f"dropped the input {_first_of(gone)}: inputs are the signature of the step"
        yield problem, "Leave unused placeholders where they are"
    if added := sorted(inputs.keys() - given.inputs):
        yield (
            f"added the input {_first_of(added)}: a call would have no value for it",
            (
                "Make values from the inputs that are there; a constant is a call, such as "
                "graph.call(torch.ops.aten.full.default, ...)"
            ),
        )
    for other in (name for name in inputs if inputs[name] != given.inputs[name]):
        was, now = (
            f"{role_text(role) if isinstance(role, Role) else role} : {type_}"
            for type_, role in (given.inputs[other], inputs[other])
        )
        problem = f"made the input '{other}' another one: {now}, which was {was}"
        yield problem, "Leave types and roles of placeholders as they are; cast or reshape what reads them"
    stages = _stages_of(after)
    for moved in (name for name, stage in given.stages.items() if stages.get(name) != stage):
        problem = f"took the input '{moved}' from pipeline stage {given.stages[moved]} to {stages.get(moved)}"
        yield problem, "Leave stages of placeholders as they are: config.set_stage(module, stage) chooses them"
    if after.placement != given.placement and MICRO_BATCHES not in given.placement.names:
        problem = f"took the graph from {given.placement} to {after.placement}"
        yield problem, "Leave graph.placement as it is: tensors are bound to the ranks of the Graph's"
    if len(after.outputs) != given.outputs:
        problem = f"returned a graph with {len(after.outputs)} outputs, build returns {given.outputs}"
        yield problem, "Keep the outputs in number and order; pass others to the caller by the output's aux dict"
    steps = LEVELS.index(after.level) - LEVELS.index(given.level) if after.level in LEVELS else -1
    if not 0 <= steps <= 1:
        yield (
            f"took the graph from level {given.level!r} {'back ' if steps < 0 else ''}to {after.level!r}",
            (
                f"A pass keeps the level or takes it one further; they are {', '.join(LEVELS)}. Return the graph that "
                "the pass was given, not another one"
            ),
        )


def _first_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
