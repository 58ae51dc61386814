"""Writes docs/core.md from examples/core/core.py and what it prints: ``python docs/core_page.py``."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCE = ROOT / "examples" / "core" / "core.py"
PAGE = ROOT / "docs" / "core.md"
TITLE = re.compile(r"^# # (.*)$", re.MULTILINE)
PROSE = re.compile(r"(?:^#(?: .*)?\n)+", re.MULTILINE)
HEAD = """# The idea in 500 lines

`python docs/core_page.py` writes this page from [core.py](../examples/core/core.py), of {lines} lines, and from what
that prints.

"""


def printed() -> str:
    """The output of the program."""
    return subprocess.run([sys.executable, SOURCE], capture_output=True, check=True, text=True, timeout=250).stdout


def page(output: str) -> str:
    """The page: comments at the margin are its text, each part followed by what is printed under its title."""
    source = SOURCE.read_text(encoding="utf-8")
    _, summary, source = source.split('"""', 2)
    outputs = dict(part.split("\n", 1) for part in re.split(r"(?:^|\n)# ", output)[1:])
    imports, *parts = re.split(r"(?=^# # )", source.partition("\nif __name__")[0], flags=re.MULTILINE)
    sections = [HEAD.format(lines=len(SOURCE.read_text(encoding="utf-8").splitlines())), _text(summary), _code(imports)]
    for part in parts:
        title = TITLE.match(part)
        assert title is not None
        prose = PROSE.match(part, title.end() + 1)
        sections.append(f"## {title[1]}\n\n{_text(_uncommented(prose[0])) if prose else ''}")
        sections.append(_code(part[prose.end() if prose else title.end() :]))
        if title[1] in outputs:
            sections.append(f"It prints:\n\n```text\n{outputs.pop(title[1]).rstrip()}\n```\n\n")
    assert not outputs, f"no part is called {', '.join(outputs)}"
    return "".join(sections).rstrip() + "\n"


def _uncommented(prose: str) -> str:
    return "\n".join(line[2:] for line in prose.splitlines()).strip() + "\n"


def _text(text: str) -> str:
    """Text in which names of files are links."""
    text = re.sub(r"``([^`]*)``", r"`\1`", text.strip())
    text = re.sub(r"(?m)^    (build, .*)$", r"```text\n\1\n```", text)
    text = re.sub(r"`docs/([\w/]+\.md)`", r"[\1](\1)", text)
    missing = [name for name in re.findall(r"`(graphzero/[\w/.]*)`", text) if not (ROOT / name).exists()]
    assert not missing, f"{', '.join(missing)}: no such file"
    return re.sub(r"`(graphzero/[\w/]*\.py)`", r"[\1](../\1)", text) + "\n\n"


def _code(code: str) -> str:
    return f"```python\n{code.strip()}\n```\n\n" if code.strip() else ""


if __name__ == "__main__":
    PAGE.write_text(page(printed()), encoding="utf-8")
