"""Every example in the documentation runs and prints what the page shows; ``pytest tests/docs --accept`` refreshes."""

import pathlib
import re

import pytest
from doc_blocks import PAGES, ROOT, Block, accepted, blocks_of, problems, run

WITH_COMMANDS = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "bench" / "results").glob("*.md"))]
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


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_a_page_exist_with_their_options(path: pathlib.Path) -> None:
    page = path.read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    own = re.findall(r"^# (\w+\.py)", page, re.MULTILINE)
    for command in _commands(path):
        words = command.split("#")[0].split()
        if "make" in words:
            goals = [word for word in words[words.index("make") + 1 :] if "=" not in word]
            assert all(goal in targets for goal in goals), f"{command}: the Makefile has {targets}"
        script = next((word for word in words if word.endswith(".py")), None)
        if script is not None and script not in own:
            assert (ROOT / script).exists(), f"{command}: no file {script}"
            options = {word.split("=")[0] for word in words[words.index(script) :] if word.startswith("--")}
            assert options <= _options(ROOT / script), f"{command}: {script} has {_options(ROOT / script)}"


def _commands(path: pathlib.Path) -> list[str]:
    """Commands in blocks of a page, and in its sentences, where they may break over lines."""
    blocks = blocks_of(path.read_text(encoding="utf-8"))
    lines = [line for block in blocks if block.language in ("bash", "sh") for line in block.text.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", _prose(path))]
    return lines + [span for span in spans if re.match(r"(?:\w+=\S+ )?(?:make|\S*python|torchrun|pytest) ", span)]


def _options(script: pathlib.Path) -> set[str]:
    """Options that a script takes, by its text and that of the files beside it that it imports."""
    text = script.read_text(encoding="utf-8")
    beside = [script.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)]
    texts = [text, *(file.read_text(encoding="utf-8") for file in beside if file.exists())]
    return {"--help", *(option for one in texts for option in re.findall(r'"(--[\w-]+)"', one))}


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
