"""``gz.check``: where, between plain PyTorch and the program that runs, a step begins to differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphzero import _compat
from graphzero.errors import CapacityError, ConfigError, hides_frames
from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.passes import Record
from graphzero.plugins.check.compare import Scales, difference, held_difference, tolerance
from graphzero.plugins.check.eager import eager_step
from graphzero.plugins.check.first_difference import (
    CALLERS,
    PassRuns,
    first_difference,
    first_nonfinite,
    micro_batch_lines,
)
from graphzero.plugins.check.float64_step import widen_program
from graphzero.plugins.check.initial_state import StepStart, start_of
from graphzero.plugins.check.report import Report, Stage, beyond_lines, with_second, without_second
from graphzero.plugins.check.stage_values import StageRun, run_parts, run_stage
from graphzero.runtime.world.consensus import CHECK
from graphzero.step.program import StepProgram

_CAPTURED = (
    "Capture runs build once and writes down the tensor operations. What plain PyTorch does again in every call, and a "
    "program cannot: Python random numbers, counters and clocks, globals that change, operations on .data. Pass such "
    "a number as a float input, or draw it with torch. Code that asks whether it is being traced (is_compiling(), "
    "FakeTensor) and would look at values takes its branch for that, as under torch.export: no pass is at fault."
)
CUT = "cut into parts"
IN_PARTS = "micro_batches"  # the pass after which a step may be meant to be another one
_COARSE = 1e-3  # a tolerance above it, as of 16-bit numbers, hides mistakes of a few percent
_SHOWN = 24  # lines of a pass's changes
_UNSTEADY = "Plain PyTorch, run twice from the same start, differs from itself: build is not a function of its inputs."


@hides_frames
@_compat.cpu_by_default
def check(
    graph: Graph, *args: Any, dtype: torch.dtype | None = None, rtol: float | None = None, **kwargs: Any
) -> Report:
    """Run one step in plain PyTorch, as captured, and after every pass, and say where results begin to differ.

    ``args`` and ``kwargs`` are those of a call.  The step is not taken: everything runs on copies, and parameters,
    buffers, optimizer states, gradients and random numbers are left as they are.  The program is compiled as
    ``graph.compile`` does.  On pipeline stages it is compared after each pass before it is cut into parts, then the
    parts, in the order of their schedule, after each pass that they run through.  Where micro-batches change the
    results, as they do with a batch norm, later passes are compared with the step in micro-batches.  It holds every
    value of a step on every rank, so use a small model or batch; on real ranks all call it, and each runs all of them
    by itself.

    Args:
        graph: any Graph, called before or not.
        dtype: ``torch.float64`` runs all of it in double precision, so that a difference is not rounding.  Without it
            the program's own dtypes are used, and after them float64: to tell mistakes from rounding where results
            differ, where ``rtol`` is above 0.001, as by default with 16-bit numbers, and where build read that it is
            being traced and may have taken another path than plain PyTorch.
        rtol: differences up to this count as rounding.  They are relative to the largest element of a value, and of
            new parameters, buffers and states to the largest change in the step.  Default: the square root of the
            coarsest dtype's epsilon, 3.5e-4 for float32.

    Returns:
        A Report: print it, or ``assert gz.check(...)``.

    Raises:
        ConfigError: for another dtype, modules on the meta device, or a program that is not what its last pass has
            returned: an extension of plans has put it there.
        CaptureError: for a step that cannot be captured.
        Exception: whatever an op raises on the way, with a note that shows its line.
    """
    if dtype not in (None, torch.float64):
        raise ConfigError(f"check(dtype={dtype}): float64 leaves no rounding; without dtype the program's own are used")
    times = 0
    while True:
        try:
            return _compare(graph, args, kwargs, dtype, rtol)
        except CapacityError as error:  # as a call would
            times += 1
            graph.give_more_room(error, times)


def _compare(
    graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None, rtol: float | None
) -> Report:
    with graph.prepared_call(f"gz.check of {graph.name}", args, kwargs) as prepared:
        prepared.source.ranks.agree(CHECK)
        program = prepared.program
        prepared.call.state.check_real()
        with torch.no_grad():
            start = start_of(prepared, dtype is not None)
        names = {node.name: _result_name(node, program.captured.states) for node in program.graph.placeholders()}
        device = graph.placement.device_type
        report = _Check(start, names, program, device, rtol).compare_stages()
        hides_nothing = report.rtol <= _COARSE and not program.captured.asks_whether_traced
        if start.is_wide or (report.agrees and hides_nothing):
            return report
        with torch.no_grad():
            again = start_of(prepared, True)
        try:
            return with_second(report, _Check(again, names, program, device, None).compare_stages())
        except CapacityError:
            raise
        except Exception as error:  # an op without a kernel for float64
            return without_second(report, error)


def _result_name(node: Any, specs: list[Any]) -> str:
    role = value.role_of(node)
    spec = next((spec for spec in specs if spec.placeholder == node.name), None)
    return f"new {spec.param}/{spec.key}" if spec is not None else f"new {role.path if role else node.name}"


def _differ_after(what: str) -> str:
    return f"After {what} these differ from the captured step:"


class _Check:
    def __init__(
        self, start: StepStart, names: Mapping[str, str], program: StepProgram, device: str, rtol: float | None
    ) -> None:
        self.start, self.names, self.program, self.device = start, names, program, device
        self.history = program.history
        pipeline = program.pipeline
        self.final_parts = [str(part.graph) for part in pipeline.parts.parts] if pipeline is not None else []
        self.padded = program.captured.padded
        self.captured = self._run_stages(self.history[0].before)
        self.rtol = tolerance(self.captured.program, start.is_wide) if rtol is None else rtol
        self.untouched = {f"new {path}": x for path, x in {**start.params, **start.buffers}.items()}
        states = {names[name]: start.values[name] for name in self.history[0].before.updates}
        self.before = states | self.untouched
        self._expect(self.captured)
        self.kinds = {name: "states" for name in names.values() if "/" in name}
        self.notes: list[str] = []

    def _expect(self, run: StageRun) -> None:
        """Compare the stages from here on with ``run``."""
        wanted = {name: x.whole() for name, x in run.results.items()}
        self.expected, self.scales = run.results, Scales.of_results(wanted, self.before, self.rtol)

    def compare_stages(self) -> Report:
        stages = [self._against_eager()]
        where = "" if stages[0].agrees else "captured"
        changed_by, text, final = "", str(self.history[0].before), str(self.program.graph)
        if where:
            self._note_capture(stages[0])
        for i, record in enumerate(self.history):
            before = text
            if not record.is_unchanged:
                graph = record.after
                text = str(graph)
            if text == before:
                stages.append(Stage(record.name, same=True))
                continue
            is_final = text == final and self.program.pipeline is None
            run = self._run_stages(graph, is_final=is_final)
            stages.append(self._compared(record.name, run))
            if where in ("", IN_PARTS) and not stages[-1].agrees:
                where = record.name
                changed_by = self._note_pass(i, stages[-1])
                if where == IN_PARTS:
                    self._expect(run)
        self._check_final([text], [final])
        if self.program.pipeline is not None:
            where = self._compare_parts(stages, where)
        nonfinite = self._note_nonfinite()
        numbers = "float64" if self.start.is_wide else "its own dtypes"
        return Report(
            self.start.step.name, numbers, self.rtol, tuple(stages), where, changed_by, nonfinite, tuple(self.notes)
        )

    def _compare_parts(self, stages: list[Stage], where: str) -> str:
        """Add a stage for the program cut into parts, and one for each pass that ran on these; returns ``where``."""
        assert self.program.pipeline is not None
        parts = self.program.pipeline.parts.parts
        graphs = [part.history[0].before for part in parts]
        stages.append(self._compared(CUT, self._run_parts(graphs)))
        if where in ("", IN_PARTS) and not stages[-1].agrees:
            where = CUT
            self.notes.append("\n".join([_differ_after("the cut into parts"), *beyond_lines(stages[-1].beyond)]))
        for records in zip(*(part.history for part in parts), strict=True):
            before, name = graphs, records[0].name
            graphs = [record.after for record in records]
            changed = [n for n, pair in enumerate(zip(before, graphs, strict=True)) if str(pair[0]) != str(pair[1])]
            if not changed:
                stages.append(Stage(name, same=True))
                continue
            stages.append(self._compared(name, self._run_parts(graphs)))
            if where in ("", IN_PARTS) and not stages[-1].agrees:
                where = name
                self._note_parts(records, before, graphs, changed, stages[-1])
        self._check_final(list(map(str, graphs)), self.final_parts)
        return where

    def _check_final(self, compared: list[str], final: list[str]) -> None:
        """Raise ConfigError where what has been compared last is not what runs."""
        if compared != final:
            raise ConfigError(
                f"gz.check of {self.start.step.name}: the program that runs is not what its last pass has returned, so "
                "it has not been compared\n  An extension of plans has put it there: let it return what best(options) "
                "gives"
            )

    def _run_stages(self, graph: StepGraph, watch: bool = False, is_final: bool = False) -> StageRun:
        with self._numbers():
            return run_stage(self._widened(graph), self.start.values, self.names, self.device, watch, is_final)

    def _run_parts(self, graphs: Sequence[StepGraph]) -> StageRun:
        program, pipeline = self.program.graph, self.program.pipeline
        assert pipeline is not None
        if self.start.is_wide:  # whose values have other sizes than those that wait on the host
            pipeline = replace(pipeline, round_trips=())
        with self._numbers():
            final = {i for i, graph in enumerate(graphs) if str(graph) == self.final_parts[i]}
            parts, values = [self._widened(graph) for graph in graphs], self.start.values
            return run_parts(self._widened(program), pipeline, parts, values, self.names, self.device, final)

    def _widened(self, graph: StepGraph) -> StepGraph:
        return widen_program(graph) if self.start.is_wide else graph

    @_compat.contextmanager
    def _numbers(self) -> Iterator[None]:
        """Python's numbers become tensors of float64 where that is what is compared."""
        default = torch.get_default_dtype()
        try:
            if self.start.is_wide:
                torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(default)

    # ---- comparing

    def _kind(self, name: str) -> str:
        if name.startswith("new "):
            return self.kinds.get(name, "states" if "/" in name else "parameters")
        return "gradients" if name.startswith("gradient ") else "outputs"

    def _stage(self, name: str, ranks: int, gaps: Mapping[str, float]) -> Stage:
        by_kind: dict[str, float] = {}
        for result, gap in gaps.items():
            by_kind[self._kind(result)] = max(gap, by_kind.get(self._kind(result), 0.0))
        return Stage(name, ranks, False, by_kind, {n: gap for n, gap in gaps.items() if not gap <= self.rtol})

    def _against_eager(self) -> Stage:
        results = {name: self._given(name, value.whole()) for name, value in self.captured.results.items()}
        return self._stage("captured", self.captured.ranks, self._gaps(eager_step(self.start), results))

    def _given(self, name: str, whole: Any) -> Any:
        """A result without what is padding."""
        kind, _, number = name.partition(" ")
        transformed = self.start.transformed
        if transformed is None or kind != "output" or not self.padded:
            return whole
        dims = self.padded[int(number)]
        return transformed.restore_output(whole, dims, whole.shape, False) if dims else whole

    def _gaps(self, eager: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, float]:
        wanted = {**self.untouched, **eager}  # what the program does not write stays as it was
        actual = {**self.untouched, **values}
        scales = Scales.of_results(wanted, self.before, self.rtol).by_name
        shared = [name for name in wanted if name in actual and (name in eager or name in values)]
        return {name: difference(wanted[name], actual[name], scales[name]) for name in shared}

    def _compared(self, name: str, after: StageRun) -> Stage:
        wanted, scales = self.expected, self.scales.by_name
        gaps = {n: held_difference(wanted[n], x, scales[n]) for n, x in after.results.items() if n in wanted}
        lost = (n for n in wanted if n.startswith(CALLERS) and n not in after.results)
        return self._stage(name, after.ranks, gaps | dict.fromkeys(lost, math.inf))

    # ---- what the report says besides numbers

    def _note_capture(self, stage: Stage) -> None:
        lines = ["The captured step, run as it is on one rank, gives other results than plain PyTorch:"]
        again = self._gaps(eager_step(self.start), eager_step(self.start))
        steady = all(gap <= self.rtol for gap in again.values())
        self.notes.append("\n".join([*lines, *beyond_lines(stage.beyond), _CAPTURED if steady else _UNSTEADY]))

    def _note_pass(self, index: int, stage: Stage) -> str:
        record = self.history[index]
        head = [_differ_after(f"pass {record.name}"), *beyond_lines(stage.beyond)]
        if record.name == IN_PARTS:
            self.notes.append("\n".join([*head, *micro_batch_lines(record.before)]))
            return ""
        before, after = self._run_stages(record.before, watch=True), self._run_stages(record.after, watch=True)
        new = {node.name: self.scales.by_name[self.names[old]] for old, node in after.program.updates.items()}
        smallest = min(self.scales.smallest[result] for result in stage.beyond)
        name, text = first_difference(PassRuns(before, after, self.rtol, new, smallest))
        self.notes.append("\n".join([*head, "", text]))
        return name

    def _note_parts(
        self, records: Sequence[Record], before: list[StepGraph], after: list[StepGraph], changed: list[int],
        stage: Stage,
    ) -> None:  # fmt: skip
        """Note in which parts of ``changed`` a pass is at fault: of those that alone make results differ."""
        assert self.program.pipeline is not None
        keys = [str(part.key) for part in self.program.pipeline.parts.parts]
        alone = [[*before[:n], after[n], *before[n + 1 :]] for n in changed]
        wrong = [n for n, graphs in zip(changed, alone, strict=True) if not self._agrees(graphs)] or changed
        diff = records[wrong[0]].diff().splitlines()
        more = [f"    ... and {len(diff) - _SHOWN} more lines"] if len(diff) > _SHOWN else []
        lines = [_differ_after(f"pass {stage.name} on parts"), *beyond_lines(stage.beyond), ""]
        lines += [f"What it did to {', '.join(keys[n] for n in wrong)} is wrong. In {keys[wrong[0]]}:", ""]
        self.notes.append("\n".join([*lines, *(f"    {line}" for line in diff[:_SHOWN]), *more]))

    def _agrees(self, graphs: Sequence[StepGraph]) -> bool:
        return self._compared("", self._run_parts(graphs)).agrees

    def _note_nonfinite(self) -> str:
        name, text = first_nonfinite(self.captured)
        if text:
            self.notes.append(text)
        return name
