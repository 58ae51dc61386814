"""``gz.check``: where, between plain PyTorch and the program that runs, a step begins to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from graphzero import _compat
from graphzero.errors import CapacityError, ConfigError, hides_frames
from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.passes.base import pass_name
from graphzero.plugins.check.compare import difference, held_difference, tolerance
from graphzero.plugins.check.eager import eager_step
from graphzero.plugins.check.first_difference import first_difference, first_nonfinite
from graphzero.plugins.check.float64_step import widen_program
from graphzero.plugins.check.initial_state import StepStart, start_of
from graphzero.plugins.check.report import Report, Stage, beyond_lines, with_second
from graphzero.plugins.check.stage_values import StageRun, run_stage
from graphzero.runtime.world.consensus import CHECK
from graphzero.step.program import StepProgram

_CAPTURED = (
    "Capture runs build once and writes down the tensor operations. What plain PyTorch does again in every call, and a "
    "program cannot: Python random numbers, counters and clocks, globals that change, operations on .data. Pass such "
    "a number as a float input, or draw it with torch. Code that asks whether it is being traced (is_compiling(), "
    "FakeTensor) and would look at values takes its branch for that, as under torch.export: no pass is at fault."
)
_UNSTEADY = "Plain PyTorch, run twice from the same start, differs from itself: build is not a function of its inputs."


@hides_frames
@_compat.cpu_by_default
def check(
    graph: Graph, *args: Any, dtype: torch.dtype | None = None, rtol: float | None = None, **kwargs: Any
) -> Report:
    """Run one step in plain PyTorch, as captured, and after every pass, and say where results begin to differ.

    ``args`` and ``kwargs`` are those of a call.  The step is not taken: everything runs on copies, and parameters,
    buffers, optimizer states, gradients and random numbers are left as they are.  The program is compiled as
    ``graph.compile`` does.  It holds every value of a step on every rank, so use a small model or batch; on real
    ranks all call it, and each runs all of them by itself.

    Args:
        graph: any Graph, called before or not.
        dtype: ``torch.float64`` runs all of it in double precision, so that a difference is not rounding.  Without it
            the program's own dtypes are used, and float64 only to tell mistakes from rounding where they differ, and
            where build read that it is being traced and may have taken another path than plain PyTorch.
        rtol: differences up to this count as rounding.  They are relative to the largest element of a value (0.001
            for smaller ones).  Default: the square root of the coarsest dtype's epsilon, 3.5e-4 for float32.

    Returns:
        A Report: print it, or ``assert gz.check(...)``.

    Raises:
        ConfigError: for another dtype, modules on the meta device, or a pass of the user's that runs on the parts of
            pipeline stages: programs are compared up to the one that is cut into parts.
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
        _check_passes(graph, program)
        prepared.call.state.check_real()
        with torch.no_grad():
            start = start_of(prepared, dtype is not None)
        names = {node.name: _result_name(node, program.captured.states) for node in program.graph.placeholders()}
        device = graph.placement.device_type
        report = _Check(start, names, program, device, rtol).compare_stages()
        if start.is_wide or (report.agrees and not program.captured.asks_whether_traced):
            return report
        with torch.no_grad():
            again = start_of(prepared, True)
        second = _Check(again, names, program, device, None).compare_stages()
        return second if report.agrees else with_second(report, second)


def _check_passes(graph: Graph, program: StepProgram) -> None:
    """Raise ConfigError for a pass of the user's that only ran on parts of pipeline stages."""
    compared = Counter(record.name for record in program.history)
    for pass_, after in graph.config.settings.user_passes if program.pipeline is not None else ():
        compared[pass_name(pass_)] -= 1
        if compared[pass_name(pass_)] < 0:
            raise ConfigError(
                f"gz.check of {graph.name}: pass {pass_name(pass_)}, after {after}, runs on the parts of each pipeline "
                "stage, and gz.check compares programs before they are cut into parts\n  Check it in a Graph without "
                'stages, or add it after an earlier pass: config.add_pass(pass_, after="localize")'
            )


def _result_name(node: Any, specs: list[Any]) -> str:
    role = value.role_of(node)
    spec = next((spec for spec in specs if spec.placeholder == node.name), None)
    return f"new {spec.param}/{spec.key}" if spec is not None else f"new {role.path if role else node.name}"


class _Check:
    def __init__(
        self, start: StepStart, names: Mapping[str, str], program: StepProgram, device: str, rtol: float | None
    ) -> None:
        self.start, self.names, self.history, self.device = start, names, program.history, device
        self.padded = program.captured.padded
        self.captured = self._run_stages(self.history[0].before)
        self.rtol = tolerance(self.captured.program, start.is_wide) if rtol is None else rtol
        self.kinds = {name: "states" for name in names.values() if "/" in name}
        self.notes: list[str] = []

    def compare_stages(self) -> Report:
        stages = [self._against_eager()]
        where = "" if stages[0].agrees else "captured"
        changed_by, text = "", str(self.history[0].before)
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
            stages.append(self._compared(record.name, self._run_stages(graph)))
            if not where and not stages[-1].agrees:
                where = record.name
                changed_by = self._note_pass(i, stages[-1])
        nonfinite = self._note_nonfinite()
        numbers = "float64" if self.start.is_wide else "its own dtypes"
        return Report(
            self.start.step.name, numbers, self.rtol, tuple(stages), where, changed_by, nonfinite, tuple(self.notes)
        )

    def _run_stages(self, graph: Any, watch: bool = False) -> StageRun:
        graph = widen_program(graph) if self.start.is_wide else graph
        default = torch.get_default_dtype()
        try:
            if self.start.is_wide:
                torch.set_default_dtype(torch.float64)
            return run_stage(graph, self.start.values, self.names, self.device, watch)
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
        before = {f"new {path}": x for path, x in {**self.start.params, **self.start.buffers}.items()}
        old = {**before, **eager, **before}  # what the program does not write stays as it was
        gaps = {name: difference(x, values[name] if name in values else before[name]) for name, x in eager.items()
                if name in values or name in before}  # fmt: skip
        return gaps | {name: difference(old[name], x) for name, x in values.items() if name in before.keys() - eager}

    def _compared(self, name: str, after: StageRun) -> Stage:
        wanted = self.captured.results
        shared = [result for result in after.results if result in wanted]
        return self._stage(name, after.ranks, {n: held_difference(wanted[n], after.results[n]) for n in shared})

    # ---- what the report says besides numbers

    def _note_capture(self, stage: Stage) -> None:
        lines = ["The captured step, run as it is on one rank, gives other results than plain PyTorch:"]
        again = self._gaps(eager_step(self.start), eager_step(self.start))
        steady = all(gap <= self.rtol for gap in again.values())
        self.notes.append("\n".join([*lines, *beyond_lines(stage.beyond), _CAPTURED if steady else _UNSTEADY]))

    def _note_pass(self, index: int, stage: Stage) -> str:
        record = self.history[index]
        before, after = self._run_stages(record.before, watch=True), self._run_stages(record.after, watch=True)
        name, text = first_difference(before, after, self.rtol)
        head = [f"After pass {record.name} these differ from the captured step:", *beyond_lines(stage.beyond)]
        self.notes.append("\n".join([*head, "", text]))
        return name

    def _note_nonfinite(self) -> str:
        name, text = first_nonfinite(self.captured)
        if text:
            self.notes.append(text)
        return name
