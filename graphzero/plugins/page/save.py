"""The page of a Graph that is at hand, written from Python."""

from __future__ import annotations

import os
from pathlib import Path

from graphzero.cli.output import check_output, write_output
from graphzero.graph import Graph
from graphzero.plan.device import Device
from graphzero.plugins.page.data import plan_data
from graphzero.plugins.page.lines import Pool
from graphzero.plugins.page.render import render


def save_page(graph: Graph, path: str | os.PathLike[str], *, device: str | None = None) -> None:
    """Write what ``graphzero show --html`` writes: the program that ``graph`` has compiled last, as one HTML file.

    path: of the file, which opens from disk.  device: a name such as "h100" or a file of ``graphzero calibrate``, by
    whose numbers the timeline is planned; without it the page has no times.
    Raises ConfigError for a Graph that has no program yet, an unknown device, and a path that cannot be written.
    """
    where, program = os.fspath(path), graph.compiled_program("page")
    check_output("save_page", where)
    machine = Device.named(device) if device is not None else None
    words = [f"stage {program.plan.stage}", program.plan.placement, *([Path(device).stem] if device else [])]
    pool = Pool()
    write_output("save_page", where, render([plan_data(program, ", ".join(words), pool, machine)], pool))
