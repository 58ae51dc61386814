"""The first value of a program that differs, or that is not finite, and its description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name
from graphzero.ir.calls import is_op
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import op_name, print_line
from graphzero.passes.micro.loop_partition import LoopPartition, restore_broadcast_sums
from graphzero.plugins.check.compare import held_difference, is_finite, node_scale
from graphzero.plugins.check.stage_values import StageRun, moved_from
from graphzero.sbp.placement import MICRO_BATCHES

CALLERS = ("output ", "new ", "grad_norm.", "skipped")  # results for the caller, which no pass may leave out
_SHOWN = 6


@dataclass(frozen=True)
class PassRuns:
    """Watched runs of a program before and after a pass.

    new: the sizes that differences of new parameters and states are relative to, by node.  smallest: what those of any
    other value are relative to at least.
    """

    before: StageRun
    after: StageRun
    rtol: float
    new: Mapping[str, float]
    smallest: float

    def gap(self, node: fx.Node) -> float | None:
        """Difference of ``node`` from its value before the pass, or from that of the value which it moves."""
        seen = self.before.values
        wanted, actual = seen.get(node.name) or seen.get(moved_from(node).name), self.after.values.get(node.name)
        if wanted is None or actual is None:
            return None
        return held_difference(wanted, actual, self.new.get(node.name) or node_scale(wanted, self.smallest))


def first_difference(runs: PassRuns) -> tuple[str, str]:
    """Name of the first value after the pass that is not what it was before, and a paragraph about it."""
    for node in runs.after.program.nodes:
        gap = runs.gap(node)
        if gap is not None and not gap <= runs.rtol:
            advice = _advice(node, runs.before, runs.after)
            return node.name, "\n".join([*_value_lines(node, gap, runs), advice])
    return _result_of_another(runs.before, runs.after)


def _value_lines(node: fx.Node, gap: float, runs: PassRuns) -> list[str]:
    source = value.source_of(node)
    where = f" (made at {source})" if source else ""
    lines = [f"The first value that differs is '{node.name}'{where}, by {gap:.1e}:", "", f"  > {print_line(node)}"]
    todo, shown = _sources(node), 0
    while todo and shown < _SHOWN:
        operand, shown = todo.pop(0), shown + 1
        gap_of = runs.gap(operand)
        if operand.op == "placeholder":
            state = "given"
        elif gap_of is None:
            state = "new in this pass"
            todo += [arg for arg in operand.all_input_nodes if value.is_tensor(arg) and arg not in todo]
        else:
            state = "agrees" if gap_of <= runs.rtol else "differs"
        lines.append(f"    {print_line(operand)}    {state}")
    was = _was(node, runs.before)
    both_captured = runs.before.program.level == runs.after.program.level == "captured"
    if was is not None and (_fixed(was) != _fixed(node) or (both_captured and print_line(was) != print_line(node))):
        lines.append(f"  it was {print_line(was)}")
    return [*lines, ""]


def _sources(node: fx.Node) -> list[fx.Node]:
    """Tensors that ``node`` is computed from: its operands, or the one value that a transfer moves to it."""
    moved = moved_from(node)
    return [moved] if moved is not node else [arg for arg in node.all_input_nodes if value.is_tensor(arg)]


def _names(ran: StageRun) -> set[str]:
    return {node.name for node in ran.program.nodes}


def _was(node: fx.Node, before: StageRun) -> fx.Node | None:
    return next((old for old in before.program.nodes if old.name == node.name), None)


def _fixed(node: fx.Node) -> tuple[Any, ...]:
    """An op with its arguments, names of values left out: boxes come between those."""
    return node.target, *(repr(arg) for arg in (*node.args, *node.kwargs.items()) if not list(value.flat_nodes(arg)))


def _advice(node: fx.Node, before: StageRun, after: StageRun) -> str:
    target: Any = node.target
    known, was = _names(before), _was(node, before)
    fresh = [arg.name for arg in _sources(node) if arg.name not in known and moved_from(arg) is arg]
    if fresh:
        return f"The pass put {', '.join(fresh)} before it."
    if was is not None and was.op == node.op == "call_function" and _fixed(was) != _fixed(node):
        return "The pass changed the op or its arguments."
    if target in (*ops.MOVES, *ops.BUCKETS, ops.launch) or moved_from(node) is not node:
        return "It only moves data between ranks, so the collective, or what writes over its operand, is wrong."
    if before.program.level != "captured" and was is not None:
        return "Its operands were right when they were made: something is written over one of them before it is read."
    if after.program.level != "captured" and is_op(node):
        operands = ", ".join(str(_nd(arg)) for arg in value.tensor_operands(node))
        return (
            f"Its operands agree, so {op_name(target)} does not do on ranks what its rule says: {operands} -> "
            f"{_nd(node)}.\nTry the rule by itself: gz.testing.check_rule({_path(target)}, sample, ...)"
        )
    return "Its operands agree, so the pass reads another value than it did."


def _nd(node: fx.Node) -> str:
    nd = value.nd_of(node)
    return str(nd[0]) if len(nd) == 1 else f"({', '.join(map(str, nd))})"


def _path(target: Any) -> str:
    return f"torch.ops.{target}" if isinstance(target, torch._ops.OpOverload) else op_name(target)


def _result_of_another(before: StageRun, after: StageRun) -> tuple[str, str]:
    """The message where every value is as before: a result is made of another value, or a write came too early or too
    late."""
    old, new = _results(before), _results(after)
    lost = [name for name in old if name.startswith(CALLERS) and name not in new]
    if lost:
        return "", f"Every value that both programs have is the same, but the step does not return {lost[0]} any more."
    for name in new:
        if name in old and _origin(old[name]) != _origin(new[name]):
            return new[name].name, (
                f"Every value that both programs have is the same, but {name} is another one:\n\n"
                f"  > {print_line(new[name])}\n  it was {print_line(old[name])}"
            )
    return "", "Every value that both programs have is the same: a state is written at the wrong time, or not at all."


def _results(ran: StageRun) -> dict[str, fx.Node]:
    program = ran.program
    results = {f"output {i}": x for i, x in enumerate(program.outputs) if isinstance(x, fx.Node)}
    return results | program.aux | {f"new {name}": x for name, x in program.updates.items()}


def _origin(node: fx.Node) -> str:
    """The name of the value that a result is, or that is written there, moves left out."""
    written: Any = node.args[1] if node.target in (*ops.ASSIGNING, ops.to_host_wait) else node
    return moved_from(written).name


def micro_batch_lines(boxed: StepGraph) -> list[str]:
    """Reasons why a step in micro-batches is another one than that of the whole batch.

    boxed: the program before the pass.
    """
    axis = boxed.placement.axis(MICRO_BATCHES)
    restore_broadcast_sums(boxed, axis)
    lines = LoopPartition(boxed, axis).estimated_lines()
    shown = [f"  {line}" for line in lines[:_SHOWN]] + (["  ..."] if len(lines) > _SHOWN else [])
    of_values = ["These are statistics of a micro-batch, not of the batch, and the model computes with them:", *shown]
    return [
        "",
        *(of_values if lines else []),
        "A buffer that forward writes is written by each micro-batch.",
        "The passes from here on are compared with this one.",
    ]


def first_nonfinite(captured: StageRun) -> tuple[str, str]:
    """Name of the first value that is inf or nan out of finite operands, and a paragraph; "" where results are fine."""
    bad = [name for name, actual in captured.results.items() if not is_finite(actual.whole())]
    if not bad:
        return "", ""
    values = captured.values
    lines = [f"These results are not finite: {', '.join(bad[:6])}{' ...' if len(bad) > 6 else ''}."]
    wanted = _nan if any(_nan(captured.results[name].whole()) for name in bad) else _inf
    for node in captured.program.nodes:
        actual = values.get(node.name)
        if actual is None or is_name(node.target) or not wanted(actual.whole()):
            continue
        source = value.source_of(node)
        kind = "input" if node.op == "placeholder" else "value"
        what = "nan" if wanted is _nan else "inf"
        lines += [
            f"The first {kind} with {what} is '{node.name}'" + (f" (made at {source})" if source else "") + ":",
            "",
        ]
        lines.append(f"  > {print_line(node)}")
        lines += [f"    {print_line(arg)}    {_range(values[arg.name].whole())}" for arg in
                  dict.fromkeys(node.all_input_nodes) if arg.name in values]  # fmt: skip
        return node.name, "\n".join(lines)
    return "", "\n".join(lines)


def _nan(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(x.isnan().any())


def _inf(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(x.isinf().any())


def _range(x: Any) -> str:
    if not isinstance(x, Tensor) or not x.numel() or x.dtype == torch.bool:
        return ""
    finite = x[x.isfinite()]
    text = f"from {finite.min().item():.3g} to {finite.max().item():.3g}" if finite.numel() else "no finite element"
    odd = x.numel() - finite.numel()
    return f"{text}, {odd} of {x.numel()} not finite" if odd else text
