"""The code blocks of a Markdown page: found, run, and compared with the output that the page shows.

How a page is written:

* every ``python`` block runs, in order, in one namespace per page, in a process and an empty folder of its own; the
  processes are forked from one that has loaded torch and graphzero, and taken the steps of ``first_steps``;
* a block that prints is directly followed by a ``text`` block, which holds exactly what it prints;
* a first line ``# train.py`` names the file that the block is saved as; otherwise it is ``example.py``;
* in a block opened by ```` ```text excerpt ```` a line ``...`` stands for any number of lines;
* other blocks (``bash``, plain ``text`` after prose) do not run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _ranks import context, end_with_parent

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 280  # that a page may take
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is where its first line stands on the page, counted from 1."""

    info: str
    text: str
    line: int
    follows: int | None = None  # number of the python block directly above, counted from 0 on the page

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + self.text.count("\n")


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.splitlines()
    opened: tuple[str, int] | None = None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = line[3:].strip(), number + 1
        else:
            info, first = opened
            text = "".join(f"{inner}\n" for inner in lines[first - 1 : number - 1])
            found.append(Block(info, text, first, _follows(found, lines, first)))
            opened = None
    if opened is not None:
        raise ValueError(f"line {opened[1] - 1}: the block is never closed")
    return found


def _follows(found: list[Block], lines: list[str], first: int) -> int | None:
    if not found or found[-1].language != "python":
        return None
    between = lines[found[-1].end : first - 2]
    if any(line.strip() for line in between):
        return None
    return sum(block.language == "python" for block in found) - 1


def problems(page: str, printed: list[str]) -> list[str]:
    """What a page shows that its blocks do not print; ``printed`` holds the output of each python block."""
    blocks = blocks_of(page)
    shown = {block.follows: block for block in blocks if block.language == "text"}
    sources = [block for block in blocks if block.language == "python"]
    found = []
    for i, (source, output) in enumerate(zip(sources, printed, strict=True)):
        block = shown.get(i)
        if block is None and output:
            found.append(f"line {source.line}: the block prints, but no text block follows it:\n{output}")
        elif block is not None and not _matches(block, output):
            found.append(f"line {block.line}: shown\n{block.text}printed\n{output}")
    return found


def _matches(block: Block, output: str) -> bool:
    if block.info != "text excerpt":
        return block.text == output
    lines = (r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line) + r"\n" for line in block.text.splitlines())
    return re.fullmatch("".join(lines), output) is not None


def accepted(page: str, printed: list[str]) -> str:
    """The page with the present outputs in its text blocks; excerpts are left to their author."""
    lines = page.splitlines()
    for block in reversed(blocks_of(page)):
        if block.info == "text" and block.follows is not None:
            lines[block.line - 1 : block.end - 1] = printed[block.follows].splitlines()
    return "\n".join(lines) + "\n"


def run(path: pathlib.Path) -> list[str]:
    """Run the python blocks of a page in a fresh process; the output of each.  Raises AssertionError if one fails."""
    found: list[str] = json.loads(_outcome_of(_run_here, path, "printed.json", "a block of "))
    return found


def printed_by(script: pathlib.Path) -> str:
    """The output of a script that starts ranks, in a fresh process from which these are forked: none loads torch."""
    return _outcome_of(_run_script, script, "printed.txt")


def _outcome_of(
    target: Callable[[pathlib.Path, pathlib.Path], None], path: pathlib.Path, file: str, part: str = ""
) -> str:
    """What ``target(path, folder)`` leaves in a file of the folder, in a fresh process; it must end in time."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        process = context().Process(target=target, args=(path, folder))
        process.start()
        try:
            process.join(SECONDS)
        finally:
            process.kill()
            process.join()
        where, said = path.relative_to(ROOT), (folder / "errors.txt").read_text(encoding="utf-8")[-4000:]
        assert process.exitcode == 0, f"{part}{where} failed, or took more than {SECONDS} s\n{said}"
        return (folder / file).read_text(encoding="utf-8")


def _run_script(script: pathlib.Path, folder: pathlib.Path) -> None:
    end_with_parent()
    for stream, name in ((sys.__stdout__, "printed.txt"), (sys.__stderr__, "errors.txt")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream.fileno())  # type: ignore[union-attr]
    torch.set_num_threads(1)  # a process that has started threads of OpenMP cannot be forked
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    runpy.run_path(str(script), run_name="__main__")


def _run_here(path: pathlib.Path, folder: pathlib.Path) -> None:
    end_with_parent()
    os.dup2(os.open(folder / "errors.txt", os.O_WRONLY | os.O_CREAT), sys.__stderr__.fileno())  # type: ignore[union-attr]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT))
    work = folder / "work"
    work.mkdir()
    os.chdir(work)
    torch.manual_seed(0)
    printed: list[str] = []
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(path.read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        named = re.match(r"# (\w+\.py)\b", block.text)
        file = pathlib.Path(named[1] if named else "example.py")
        file.write_text(block.text, encoding="utf-8")  # tracebacks and messages show the user's lines
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(compile(block.text, str(file), "exec"), names)
        except BaseException:
            print(f"in the block at {path.name}:{block.line}", file=sys.stderr)
            raise
        text = "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())
        printed.append(text.rstrip("\n") + "\n" if text.strip() else "")
    (folder / "printed.json").write_text(json.dumps(printed), encoding="utf-8")
