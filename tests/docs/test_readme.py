"""The commands of the front page can be pasted: they run on the file that it shows."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT

from graphzero.cli import main

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^graphzero (\w+ train\.py:make.*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[] if one.startswith("show") else pytest.mark.slow) for one in COMMANDS]
)
def test_each_command_runs_on_the_file_of_the_page(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT[1])
    assert main(command.split()) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_page_has_a_command_that_plans_and_one_that_shows():
    assert sorted(one.split()[0] for one in COMMANDS) == ["plan", "show"]
