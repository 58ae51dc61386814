"""The error of a broken invariant: the problem, the line among its neighbours with the source line, the next step."""

from __future__ import annotations

from torch import fx

from graphzero.errors import VerifyError
from graphzero.ir import value
from graphzero.ir.text.printer import print_line
from graphzero.sbp.types import Nd


def violation(node: fx.Node, where: str, problem: str, hint: str) -> VerifyError:
    """The error to raise where ``node`` breaks a law.

    where: after which pass, ``"after pass zero: "`` or nothing.  problem: what is wrong.  hint: the next step.
    """
    return VerifyError(f"{where}{problem}\n\n{_window(node)}\n\n  {hint}")


def nd_text(nd: Nd) -> str:
    """``S(0)`` on one axis, ``(S(0), B)`` on several."""
    return str(nd[0]) if len(nd) == 1 else str(nd)


def _window(node: fx.Node, around: int = 2) -> str:
    """The node's line between its neighbours, marked, with the user's source line."""
    before = after = node
    lines: list[str] = []
    for _ in range(around):
        before, after = before.prev, after.next
        if before.op not in ("root", "placeholder", "output"):
            lines.insert(0, f"    {_clipped(before)}")
        if len(lines) <= around:
            source = value.source_of(node)
            lines.append(f"  > {_clipped(node)}" + (f"    {source}" if source else ""))
        if after.op not in ("root", "output"):
            lines.append(f"    {_clipped(after)}")
    return "\n".join(dict.fromkeys(lines))


def _clipped(node: fx.Node, width: int = 150) -> str:
    text = print_line(node)
    return text if len(text) <= width else f"{text[: width - 4]} ..."
