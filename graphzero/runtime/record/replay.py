"""An executor that records its step and replays it: one call on the host instead of one for each op.

A ``StepRecorder`` records a step, on a GPU that of ``cuda_graph``.  A recording is the same ops on the same memory with
the same numbers, whatever the host does.  Here is what follows from that:

* inputs are copied to where the recording reads them, outputs are copied from where it writes them;
* it is thrown away when a bound tensor has moved;
* a host number is a constant of the recording until it changes.  Then the step is recorded again so that it reads that
  number from memory (``feeding``), once for all further changes;
* what changes again and again and cannot be read from memory makes recording a waste: then the step runs op by op.

The first calls run op by op, and so does each call before a recording, just as it is to be recorded.  Runs with a meter
or a trace always do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime.execute import checks
from graphzero.runtime.execute.executor import Executor, Results
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.record.feeding import Cells, Fed, Feeding, constants
from graphzero.runtime.world.world import World

T = TypeVar("T")
aten = torch.ops.aten

WARM_UP = 2  # calls: the first one allocates and compiles
WORTH = 10  # replays that a recording must give
PATIENCE = 3  # recordings in a row that may give fewer
# Ops that read a tensor on the host, which nothing can record.  What others do is seen when they are recorded.
WAITING = (
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default,
    aten._unique2.default, aten.repeat_interleave.Tensor,
)  # fmt: skip


class StepRecorder(Protocol):
    """Recorder of a step."""

    def warm_up(self, step: Callable[[], T]) -> T:
        """Run ``step``, as it must have run before it is recorded."""

    def record(self, step: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record the operations of ``step`` without running them.

        Returns what does it, as often as it is called, and what ``step`` has returned: tensors that get their values
        then.  Raises whatever ``step`` or the recorder raises; nothing has been done then.
        """


@dataclass
class Recording:
    """replay: does the step.  results: the tensors that it writes.  numbers: the constants in it, by place.

    buffers: where it reads inputs, by name.  addresses: where it reads and writes state.
    """

    replay: Callable[[], None]
    results: Results
    numbers: Mapping[int, Any]
    buffers: Mapping[str, list[Tensor]]
    addresses: Mapping[str, Any]
    replays: int = 0


class Replayed(Executor):
    """An Executor whose ``run_step`` replays a recording of the step, when there is one that fits.

    Attributes:
        refusal: why the step is not recorded (any more); "" while it is.
        recorded: how often it has been.
        fed: names of the numbers that are read from memory.
    """

    def __init__(self, graph: StepGraph, world: World, *arguments: Any, recorder: StepRecorder, **settings: Any):
        super().__init__(graph, world, *arguments, **settings)
        self.recorder, self.refusal, self.recorded = recorder, "", 0
        self._constants = constants(self.graph)
        places = self.program.places.of
        self._names = {places[node]: node.name for node in self.graph.nodes if node.name in self._constants}
        self._cells = Cells(world.device)
        self._fed: frozenset[int] = frozenset()
        self._warm: frozenset[int] | None = None  # what was fed in the last run, if it was one before a recording
        self._calls = self._poor = 0
        self._numbers: Mapping[int, Any] | None = None  # of the last run
        self._recording: Recording | None = None
        waiting = next(filter(_waits, self.graph.nodes), None)
        if waiting is not None:
            self._refuse(f"{_shown(waiting)} reads a tensor on the host, which no recording can")

    @property
    def fed(self) -> list[str]:
        return sorted(self._names[place] for place in self._fed)

    @property
    def about(self) -> str:
        """Say in one line how the step runs now."""
        if self.refusal:
            return f"CUDA graph: none, it runs op by op: {self.refusal}"
        if self._recording is None:
            return "CUDA graph: not recorded yet"
        read = f", reads {', '.join(self.fed)} from memory" if self._fed else ""
        return f"CUDA graph: recorded {_times(self.recorded)}, replayed {_times(self._recording.replays)} since{read}"

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        super().bind(values)
        if self._recording is not None and self._recording.addresses != self._addresses():
            self._discard("tensors of its state have moved")

    def run_step(
        self, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None, numbers: Mapping[int, Any] | None = None
    ) -> Results:
        watched = meter is not None or self.meter is not None or self.world.trace is not None
        if self.refusal or watched or numbers is not None:
            return super().run_step(inputs, meter, numbers)
        self._calls += 1
        numbers = self.numbers(inputs)
        self._compare(numbers)
        if self._recording is None and not self.refusal:
            if self._calls <= WARM_UP or self._warm != self._fed:
                return self._warm_up(inputs, numbers)
            self._recording = self._record(inputs, numbers)
        if self._recording is None:
            return super().run_step(inputs)
        return self._replay(self._recording, inputs, numbers)

    # ---- numbers

    def _compare(self, numbers: Mapping[int, Any]) -> None:
        """Feed from now on what has changed and can be fed; throw a recording away that holds another number."""
        before, self._numbers = self._numbers, numbers
        changed = [place for place in self._names if before is not None and before[place] != numbers[place]]
        self._fed |= {place for place in changed if self._constants[self._names[place]] is None}
        recorded = self._recording.numbers if self._recording is not None else {}
        stale = [place for place, number in recorded.items() if numbers[place] != number]
        if stale:
            self._discard("; ".join(map(self._why_constant, stale[:3])))

    def _why_constant(self, place: int) -> str:
        name = self._names[place]
        reader = self._constants[name]
        return f"{name} has changed" + (f", which {_shown(reader)} takes as a constant" if reader is not None else "")

    def _run_ops(self, inputs: Mapping[str, Sequence[Any]], numbers: Mapping[int, Any]) -> Results:
        """Op by op, what is fed read from memory."""
        given = {p: Fed.at_place(x, p, self._cells) if p in self._fed else x for p, x in numbers.items()}
        feeding = Feeding() if self._fed else None
        with feeding or nullcontext():
            results = super().run_step(inputs, numbers=given)
        if feeding is not None and feeding.seen != self._fed:
            self._refuse(f"of {', '.join(self.fed)} only {len(feeding.seen)} were seen to be read")
        return results

    # ---- recordings

    def _warm_up(self, inputs: Mapping[str, Sequence[Any]], numbers: Mapping[int, Any]) -> Results:
        """Op by op, just what would be recorded, down to the strides of inputs."""
        self._warm = self._fed
        self._cells.fill(numbers)
        static = {
            name: _buffers(values) if isinstance(values[0], Tensor) else values for name, values in inputs.items()
        }
        return self.recorder.warm_up(lambda: self._run_ops(static, numbers))

    def _record(self, inputs: Mapping[str, Sequence[Any]], numbers: Mapping[int, Any]) -> Recording | None:
        buffers = {name: _buffers(recorded) for name, recorded in inputs.items() if isinstance(recorded[0], Tensor)}
        static = {name: buffers.get(name, recorded) for name, recorded in inputs.items()}
        self._cells.is_frozen = True
        try:
            with checks.later():
                replay, results = self.recorder.record(lambda: self._run_ops(static, numbers))
        except Exception as error:  # noqa: BLE001 - whatever an op does that cannot be recorded
            self._refuse(f"recording it failed: {_reason(error)}")
        finally:
            self._cells.is_frozen = False
        if self.refusal:
            return None
        self.recorded += 1
        recorded = {place: numbers[place] for place in self._names if place not in self._fed}
        return Recording(replay, results, recorded, buffers, self._addresses())

    def _replay(self, recording: Recording, inputs: Mapping[str, Sequence[Any]], numbers: Mapping[int, Any]) -> Results:
        pairs = {}
        for name, buffers in recording.buffers.items():
            pairs.update({id(own): (own, x) for own, x in zip(buffers, inputs[name], strict=True)})
        if pairs:
            torch._foreach_copy_([own for own, _ in pairs.values()], [x for _, x in pairs.values()])
        self._cells.fill(numbers)
        self.stopped = len(self.program.steps)  # where it fails, nobody knows how far it came
        recording.replay()
        recording.replays += 1
        if self.checking:
            checks.raise_of_replay(self.graph, recording.results.aux)
        return self._handed_out(recording.results, numbers)

    def _handed_out(self, results: Results, numbers: Mapping[int, Any]) -> Results:
        """Copies: what the caller holds does not change with the next replay."""
        copies: dict[int, Tensor] = {}

        def copy(x: Any) -> Any:
            if isinstance(x, Tensor) and id(x) not in copies:
                copies[id(x)] = x.clone()
            return copies.get(id(x), x)

        outputs = []
        for place, tensors in zip(self.program.outputs, results.outputs, strict=True):
            if isinstance(place, int) and place in numbers:
                outputs.append([numbers[place]] * len(tensors))
            else:
                outputs.append([*map(copy, tensors)] if isinstance(place, int) else tensors)
        return Results(outputs, {name: [*map(copy, tensors)] for name, tensors in results.aux.items()})

    def _addresses(self) -> dict[str, Any]:
        return {
            name: [(x.data_ptr(), tuple(x.shape), x.stride()) for x in tensors] for name, tensors in self.bound.items()
        }

    def _discard(self, why: str) -> None:
        """Drop a recording that does not fit any more; after several short-lived ones no other is made."""
        assert self._recording is not None
        self._poor = self._poor + 1 if self._recording.replays < WORTH else 0
        self._recording = self._warm = None
        if self._poor >= PATIENCE:
            self._refuse(f"it was recorded {_times(self.recorded)} and seldom replayed: {why}")

    def _refuse(self, why: str) -> None:
        self.refusal, self._recording = why, None
        warnings.warn(f"{self.graph.name} runs without a CUDA graph, op by op: {why}", stacklevel=2)


def _buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of an input, one for all ranks if they are given one tensor."""
    if all(x is tensors[0] for x in tensors):
        return [tensors[0].clone(memory_format=torch.contiguous_format)] * len(tensors)
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _waits(node: fx.Node) -> bool:
    if node.target is aten.index_put.default:  # where a mask is true is looked up on the host
        indices = value.flat_nodes(node.args[1])
        return any(value.tensor_type(index).dtype is torch.bool for index in indices)
    return node.target in WAITING


def _shown(node: fx.Node) -> str:
    source = value.source_of(node)
    return f"'{node.name}' ({node.target}{f', {source}' if source else ''})"


def _reason(error: BaseException) -> str:
    """The error, and the op that raised it as the executor has noted it; ending a recording may raise another one."""
    chain: list[BaseException] = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    cause = next((one for one in chain if hasattr(one, "__notes__")), chain[-1])
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return "\n".join([f"{type(cause).__name__}: {first}", *getattr(cause, "__notes__", ())])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
