"""The error of a broken invariant: the problem, the line among its neighbours with the source line, the next step."""

from __future__ import annotations

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import value
from graphzero.ir.text.printer import nd_text, op_name, print_line

_AROUND, _WIDTH = 2, 150  # lines that are shown on both sides, and characters of one


def check_unmoved(node: fx.Node, source: fx.Node, where: str, hint: str) -> None:
    """Raise where the result of ``node`` lies otherwise on the ranks than ``source``, which it does not move."""
    if value.sbp_of(source) != value.sbp_of(node):
        have, result = (", ".join(nd_text(nd) for _, nd in value.results_of(x) if nd) for x in (source, node))
        problem = f"'{node.name}' takes {have} to {result}, which {op_name(node.target)} does not"
        raise violation(node, where, problem, hint)


def violation(node: fx.Node, where: str, problem: str, hint: str) -> VerifyError:
    """The error to raise where ``node`` breaks a law.

    where: after which pass, ``"after pass zero: "`` or nothing.  problem: what is wrong.  hint: the next step.
    """
    return VerifyError(f"{where}{problem}\n\n{_window(node)}\n\n  {hint}")


def _window(node: fx.Node) -> str:
    """The node's line between its neighbours, marked, with the user's source line."""
    before = after = node
    lines: list[str] = []
    for _ in range(_AROUND):
        before, after = before.prev, after.next
        if before.op not in ("root", "placeholder", "output"):
            lines.insert(0, f"    {_clipped(before)}")
        if len(lines) <= _AROUND:
            source = value.source_of(node)
            lines.append(f"  > {_clipped(node)}" + (f"    {source}" if source else ""))
        if after.op not in ("root", "output"):
            lines.append(f"    {_clipped(after)}")
    return "\n".join(dict.fromkeys(lines))


def _clipped(node: fx.Node) -> str:
    text = print_line(node)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."
