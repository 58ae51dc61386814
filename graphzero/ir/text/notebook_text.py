"""Notebooks: how they show results that are printed elsewhere."""

from __future__ import annotations

from typing import Any


def show_as_printed(shown: object, printer: Any, cycle: bool) -> None:
    """A ``_repr_pretty_`` of IPython's, by which a result shows as ``print`` shows it, not by the ``repr`` of its
    fields."""
    printer.text(str(shown))
