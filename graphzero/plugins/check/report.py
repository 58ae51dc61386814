"""Result of a check, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphzero.ir.text.printer import show_as_printed

KINDS = ("outputs", "gradients", "parameters", "states")


@dataclass(frozen=True)
class Stage:
    """One run that was compared.

    name: "captured", the pass it follows, or "cut into parts".  ranks: it ran on.  same: the pass changed nothing, so
    nothing ran.  differences: the largest relative difference by kind: "outputs" (norms too), "gradients", "parameters"
    (buffers too) and "states"; a kind that was not compared is absent.  beyond: what differs beyond rounding -> by how
    much.
    """

    name: str
    ranks: int = 1
    same: bool = False
    differences: dict[str, float] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs beyond rounding."""
        return not self.beyond


@dataclass(frozen=True)
class Report:
    """Result of ``gz.check``; ``str`` gives the text, and it is true if all values agree.

    Attributes:
        name: of the Graph.  numbers: the dtype it was checked in, as text.  rtol: what counted as rounding.
        stages: the captured step, against plain PyTorch; then the program after each pass, against the captured step.
        where: "" if all agree; "captured" if the captured step differs from plain PyTorch; else the first pass after
            which results differ, or "cut into parts", of pipeline stages.
        is_rounding: what differs is gone in float64.
        value: name of the first value, in program order, that differs there; "" if none does or none is known, as in
            parts of pipeline stages.
        nonfinite: name of the first value that is inf or nan although the operands of its op are not, if that reaches
            a result; else "".
        notes: the paragraphs after the table.
    """

    name: str
    numbers: str
    rtol: float
    stages: tuple[Stage, ...]
    where: str = ""
    value: str = ""
    nonfinite: str = ""
    notes: tuple[str, ...] = ()
    is_rounding: bool = False

    @property
    def agrees(self) -> bool:
        """Whether nothing differs except by rounding."""
        return not self.where or self.is_rounding

    def __bool__(self) -> bool:
        return self.agrees

    @property
    def verdict(self) -> str:
        """The outcome in a few words, as in the text's first line."""
        if self.is_rounding:
            return "agrees but for rounding"
        if not self.where:
            return "agrees, but results are not finite" if self.nonfinite else "agrees"
        return "differs as captured" if self.where == "captured" else f"differs from pass {self.where} on"

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        wide = max(22, *(len(_where(stage)) for stage in self.stages))
        lines = [
            f"check of {self.name} in {self.numbers}: {self.verdict}",
            "  largest differences, relative to a value's largest element, or change; up to "
            f"{self.rtol:.1e} is rounding",
            "",
            f"  {'against plain PyTorch':<{wide + 2}}" + "".join(f"{kind:>12}" for kind in KINDS),
        ]
        for i, stage in enumerate(self.stages):
            lines += ["  against the captured step"] if i == 1 else []
            lines.append(_row(stage, wide))
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def with_second(report: Report, second: Report) -> Report:
    """A report in a program's own dtypes, and what the same check finds in float64."""
    if report.agrees and not second.agrees:
        note = f"In its own dtypes all agree, but these hide differences up to {report.rtol:.1e}."
        return replace(second, notes=(*second.notes, note))
    worst = max(gap for stage in second.stages for gap in (0.0, *stage.differences.values()))
    if report.agrees:
        return replace(report, notes=(*report.notes, f"In float64 all agree too, up to {worst:.1e}."))
    if second.agrees:
        note = (
            f"In float64 all agree, up to {worst:.1e}: this is rounding. It is amplified where a result depends on the "
            "sign of something very small, such as a gradient that is exactly zero, under Adam."
        )
        return replace(report, is_rounding=True, value="", notes=(note,))
    if second.where != report.where:  # where rounding is amplified, it hides where the step becomes another one
        note = f"In its own dtypes it {report.verdict}: what float64 does not show is rounding."
        return replace(second, notes=(*second.notes, note))
    return replace(report, notes=(*report.notes, f"In float64 it {second.verdict} too: this is not rounding."))


def without_second(report: Report, error: Exception) -> Report:
    """The report where the same check raises ``error`` in float64."""
    said = (str(error).splitlines() or [""])[0]
    note = (
        f"In float64 the step cannot be computed ({type(error).__name__}: {said}), so differences up to "
        f"{report.rtol:.1e} are not seen, and larger ones may be rounding."
    )
    return replace(report, notes=(*report.notes, note))


def _where(stage: Stage) -> str:
    return stage.name + ("" if stage.ranks == 1 else f", {stage.ranks} ranks")


def _row(stage: Stage, wide: int) -> str:
    cells = ["" if kind not in stage.differences else f"{stage.differences[kind]:.1e}" for kind in KINDS]
    cells = [("0" if cell == "0.0e+00" else cell) for cell in cells]
    rest = "  as before" if stage.same else "".join(f"{cell:>12}" for cell in cells)
    return f"    {_where(stage):<{wide}}{rest}{'  <' if stage.beyond else ''}".rstrip()


_SHOWN = 6  # values that differ


def beyond_lines(beyond: dict[str, float]) -> Sequence[str]:
    """Lines for values that differ, worst first."""
    ordered = sorted(beyond.items(), key=lambda item: -item[1])
    more = [f"  ... and {len(ordered) - _SHOWN} more"] if len(ordered) > _SHOWN else []
    return [*(f"  {name}: {gap:.1e}" for name, gap in ordered[:_SHOWN]), *more]
