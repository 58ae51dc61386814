"""Steps of the executor: generated functions, cut where ranks synchronize.

Between two collectives every rank works alone: that stretch is one generated function over the rank's
environment ``e``, a list with one place per value::

    def segment(e):
        e[7] = f0(e[3], e[5])
        e[3] = None
        e[9] = f1(e[7], 0.9)

so that an op costs a few list accesses on top of its own call.  Collectives, and writes into tensors that several
ranks share, are ``Barrier``s between segments and see all environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, Protocol

from torch import Tensor, fx

from graphzero.ir.memory_space import HOST, makes_on_host
from graphzero.ir.pipeline_parts import PartCall
from graphzero.ir.transfer import is_transfer

Env = list[Any]
GENERATED = "<graphzero program>"


class Meter(Protocol):
    """Observer of a run: ``MemoryMeter`` counts the bytes of the first local rank, ``Timer`` its seconds,
    ``EventRecorder`` records when each op of every rank began and ended."""

    def __enter__(self) -> Any:
        return None

    def __exit__(self, *error: Any) -> Any:
        return None

    def register(self, category: str, tensors: Iterable[Tensor], most: int | None = None) -> None:
        """These are there before the run; of each at most so many bytes are for it."""
        return

    def begin_part(self, call: PartCall) -> None:
        """The runs that follow are those of a call of a part of a pipeline."""
        return

    def watches(self, local: int) -> bool:
        """The lines that follow are those of a local rank; whether it is watched."""

    def enter(self, node: str, kind: str) -> None:
        """The lines that follow belong to ``node`` ("" at the end); what they do not hand out is of ``kind``."""

    def add_result(self, x: Any, names: Sequence[Any]) -> None:
        """``x`` is a result of the node."""
        return

    def meet(self, node: fx.Node) -> None:
        """Called when all local ranks synchronize at ``node``."""


@dataclass(frozen=True)
class Line:
    """One generated line. ``makes``: the places that it fills, each with the names by which a meter knows its value."""

    text: str
    node: fx.Node
    makes: tuple[tuple[int, tuple[Any, ...]], ...] = ()


class Segment:
    """The work of one rank between two barriers.

    local: the local rank that runs, or has run last.
    """

    def __init__(self, lines: Sequence[Line], names: dict[str, Any]):
        self.lines, self.names = list(lines), names
        self.local: int | None = None
        self._nodes: dict[CodeType, list[fx.Node]] = {}  # generated function -> node of each of its lines
        self.plain = self._compile([(line.text, line.node) for line in lines], "e")
        self._metered: Callable[..., None] | None = None

    def __call__(self, envs: list[Env]) -> None:
        for self.local, e in enumerate(envs):
            self.plain(e)

    def metered(self, envs: list[Env], meter: Meter) -> None:
        """Run the same lines, and report each one to ``meter``."""
        if self._metered is None:
            self._metered = self._compile([pair for line in self.lines for pair in _metered(line)], "e, m")
        for self.local, e in enumerate(envs):
            if meter.watches(self.local):
                with meter:
                    self._metered(e, meter)
            else:
                self.plain(e)

    def node_of(self, traceback: TracebackType | None) -> fx.Node | None:
        """The node whose line the traceback of an error leads to."""
        while traceback is not None:
            nodes = self._nodes.get(traceback.tb_frame.f_code)
            if nodes is not None:
                return nodes[max(traceback.tb_lineno - 2, 0)]  # line 1 is the head
            traceback = traceback.tb_next
        return None

    def _compile(self, lines: list[tuple[str, fx.Node]], arguments: str) -> Callable[..., None]:
        source = "\n".join([f"def segment({arguments}):", *(f"    {text}" for text, _ in lines)])
        namespace: dict[str, Any] = {}
        exec(compile(source, GENERATED, "exec"), self.names, namespace)
        function: Callable[..., None] = namespace["segment"]
        self._nodes[function.__code__] = [node for _, node in lines]
        return function


def _metered(line: Line) -> list[tuple[str, fx.Node]]:
    kind = HOST if makes_on_host(line.node.target) else "communication" if is_transfer(line.node) else "temporaries"
    texts = [f"m.enter({line.node.name!r}, {kind!r})", line.text]
    texts += [f"m.add_result(e[{place}], {names!r})" for place, names in line.makes]
    return [(text, line.node) for text in texts]


@dataclass(frozen=True)
class WholeStep:
    """An action on the environments of all local ranks, for which they do not wait for each other."""

    node: fx.Node
    action: Callable[[list[Env]], None]
    local = None  # all of them

    def node_of(self, traceback: TracebackType | None) -> fx.Node | None:
        return self.node

    def __call__(self, envs: list[Env]) -> None:
        self.action(envs)

    def metered(self, envs: list[Env], meter: Meter) -> None:
        self.action(envs)


class Barrier(WholeStep):
    """An action of all local ranks together."""

    def metered(self, envs: list[Env], meter: Meter) -> None:
        meter.meet(self.node)
        self.action(envs)


Step = Segment | WholeStep
