"""Settings of Sphinx, with which ``make docs`` turns the pages into a site.

They stay plain Markdown, as a code host shows it: they have no directives.  The contents of the site are the lists
of links in docs/index.md, a part for each of its headings.  Sources are the whole repository's, because pages link to
results of bench/ and to files of examples/.
"""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

project = "graphzero"
version = release = version_of("graphzero-torch")  # as it is installed
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/*.md", "bench/results/*.md"]
exclude_patterns = [".*", "build", "dist", "docs/site"]  # not even looked into
root_doc = "docs/index"
html_theme = "furo"
html_title = f"{project} {version}"
myst_heading_anchors = 4  # a link to a section is written as on a code host
TO_ROOT = '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">graphzero</a>\n'


def contents(page: str) -> str:
    """The hidden tables of contents of a page's lists of links."""
    tables = []
    for part in page.split("\n## ")[1:]:
        links = re.findall(r"\]\(([\w./]+)\.md\)", part)
        tables += ["", "```{toctree}", ":hidden:", f":caption: {part.splitlines()[0]}", "", *links, "```", ""]
    return "\n".join(tables)


def setup(app: Any) -> None:
    def read(app: Any, name: str, source: list[str]) -> None:
        if name == root_doc:
            source[0] += contents(source[0])
        elif name.startswith("bench/") or ("/" not in name and name != "README"):
            source[0] = f"---\norphan: true\n---\n{source[0]}"

    app.connect("source-read", read)

    def finish(app: Any, error: Any) -> None:
        Path(app.outdir, "index.html").write_text(TO_ROOT)
        for picture in Path(app.confdir).glob("*.png"):  # of HTML on a page, whose files are not looked for
            shutil.copy(picture, Path(app.outdir, "docs", picture.name))

    app.connect("build-finished", finish)
