"""Every example in the documentation runs and prints what the page shows; ``pytest tests/docs --accept`` refreshes."""

import pathlib
import re

import pytest
from doc_blocks import PAGES, ROOT, Block, accepted, blocks_of, problems, run

PAGE = pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
LONG = (  # pages whose blocks take seconds
    "debugging.md", "examples_of_passes.md", "experts.md", "loops.md", "optimizers.md", "precision.md",
    "sequences.md", "tensor_parallel.md", "tune.md", "zero.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in LONG else []) for path in PAGES],
)
def test_every_block_prints_what_the_page_shows(path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    page, printed = path.read_text(encoding="utf-8"), run(path)
    if request.config.getoption("--accept", default=False):
        page = accepted(page, printed)
        path.write_text(page, encoding="utf-8")
    found = problems(page, printed)
    assert not found, f"{path.relative_to(ROOT)}, refresh it by `pytest tests/docs --accept`:\n\n" + "\n".join(found)


@PAGE
def test_links_of_a_page_lead_to_files(path: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", _prose(path))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@PAGE
def test_commands_of_a_page_exist(path: pathlib.Path) -> None:
    page = path.read_text(encoding="utf-8")
    commands = [line for block in blocks_of(page) if block.language == "bash" for line in block.text.splitlines()]
    commands += re.findall(r"`((?:make|python|torchrun|pytest) [^`\n]+)`", _prose(path))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    own = re.findall(r"^# (\w+\.py)", page, re.MULTILINE)
    for command in commands:
        words = command.split("#")[0].split()
        if "make" in words:
            goals = [word for word in words[words.index("make") + 1 :] if "=" not in word]
            assert all(goal in targets for goal in goals), f"{command}: the Makefile has {targets}"
        for word in words:
            if word.endswith(".py"):
                assert word in own or (ROOT / word).exists(), f"{command}: no file {word}"


def _prose(path: pathlib.Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# ---- the checker itself

STALE = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
FRESH = STALE.replace("2", "1")


def test_a_stale_output_is_a_problem_and_accept_refreshes_it() -> None:
    assert problems(FRESH, ["1\n"]) == []
    assert problems(STALE, ["1\n"]) == ["line 6: shown\n2\nprinted\n1\n"]
    assert accepted(STALE, ["1\n"]) == FRESH


def test_output_that_a_page_hides_is_a_problem() -> None:
    assert problems("```python\nprint(1)\n```\n\nprose\n\n```text\n1\n```\n", ["1\n"]) != []


def test_dots_stand_for_lines_in_an_excerpt_only() -> None:
    page = "```python\nf()\n```\n```text excerpt\na\n...\nd\n```\n"
    assert problems(page, ["a\nb\nc\nd\n"]) == []
    assert problems(page, ["a\nb\nc\n"]) != []
    assert problems(page.replace(" excerpt", ""), ["a\nb\nc\nd\n"]) != []


def test_a_block_knows_its_lines() -> None:
    first, second = blocks_of(FRESH)
    assert first == Block("python", "print(1)\n", 2)
    assert (second.follows, second.line, second.end) == (0, 6, 7)
