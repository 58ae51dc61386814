"""One HTML file about a step: its data, scripts and styles are all inside, and nothing is fetched."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from graphzero.plugins.page.lines import Pool

PIPELINE = "pipeline"  # a script and a section of pages about pipeline stages
STYLES = ("uPlot.min.css", "page.css", "parts.css")
SCRIPTS = (  # in this order
    "uPlot.iife.min.js", "model.js", "text.js", "dom.js", "overview.js", "memory.js", "timeline.js", "program.js",
    "passes.js", "parameters.js", "compare.js", "main.js",
)  # fmt: skip
_PLACE = re.compile(r"<!-- (title|licences|styles|pipeline|scripts|data) -->")


def render(plans: Sequence[dict[str, Any]], pool: Pool) -> str:
    """The page, as text.

    plans: one or two of ``plan_data``, made with this pool.
    """
    name, has_stages = str(plans[0]["name"]), any(PIPELINE in plan for plan in plans)
    scripts = (*SCRIPTS, f"{PIPELINE}.js") if has_stages else SCRIPTS
    parts = {
        "title": html.escape(f"{name}, {plans[0]['title']}"),
        "licences": f"<!-- uPlot is inside this page, under this licence:\n\n{_read('uPlot.LICENSE.txt')}-->",
        "styles": "\n".join(f"<style>\n{_read(file)}</style>" for file in STYLES),
        PIPELINE: _read(f"{PIPELINE}.html") if has_stages else "",
        "scripts": "\n".join(f"<script>\n{_read(file)}</script>" for file in scripts),
        "data": embedded({"format": 1, "pool": pool.texts, "plans": list(plans)}),
    }
    return _PLACE.sub(lambda match: parts[match[1]], _read("page.html"))


def embedded(data: Any) -> str:
    """JSON that may be in a script element: nothing in it ends the element, or begins another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _read(name: str) -> str:
    return (resources.files("graphzero.plugins.page") / "static" / name).read_text(encoding="utf-8")
