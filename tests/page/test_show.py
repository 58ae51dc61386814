"""``graphzero show``: the program of a step as text, what passes did to it, or one clear message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_toy import FACTORY

import graphzero as gz
from graphzero.cli import factory, main
from graphzero.testing import fake_world


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("show") / "train.py"
    file.write_text(FACTORY)
    return f"{file}:make"


@pytest.fixture(scope="module")
def graph(train: str) -> gz.Graph:
    with fake_world(2):
        made, example = factory.make(train, gz.placement("cuda", range(2)), 3)
        return made.compile(*example)


def shown(capsys: pytest.CaptureFixture[str], what: str, *options: str) -> str:
    assert main(["show", what, "--ranks", "2", "--stage", "3", *options]) == 0
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["show", *options]) == 2
    printed = capsys.readouterr()
    said = "".join(x for x in printed.err.splitlines(True) if not x.startswith("graphzero: compiling"))  # where slow
    assert not printed.out and said.startswith("graphzero: ConfigError: ") and "Traceback" not in said
    return said


def test_it_prints_the_program_and_what_a_pass_was_given_and_made(
    train: str, graph: gz.Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, train) == str(graph.program)
    zero = next(record for record in graph.history if record.name == "zero")
    assert shown(capsys, train, "--before", "zero") == str(zero.before)
    assert shown(capsys, train, "--after", "2") == str(zero.after) == shown(capsys, train, "--after", "zero")
    assert shown(capsys, train, "--after", "captured") == str(graph.history[0].before)


def test_diffs_are_those_of_the_history_with_colours_if_wished(
    train: str, graph: gz.Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    diffs = [text for record in graph.history if (text := record.diff())]
    assert shown(capsys, train, "--diff") == "\n".join(diffs) + "\n"
    plain = shown(capsys, train, "--diff", "zero")
    assert plain.rstrip("\n") in diffs
    coloured = shown(capsys, train, "--diff", "zero", "--color", "always")
    assert "\033[32m+  model_norm_bias" in coloured and "\033[31m-  model_norm_bias" in coloured
    assert re.sub(r"\033\[\d*m", "", coloured) == plain


def test_passes_are_listed_with_the_lines_that_they_changed(
    train: str, graph: gz.Graph, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split() for line in shown(capsys, train, "--list").splitlines()[1:]]
    assert [row[1] for row in rows] == [record.name for record in graph.history]
    for row, record in zip(rows, graph.history, strict=True):
        body = record.diff().splitlines()[2:]
        assert [int(row[3]), int(row[4])] == [sum(line[0] == sign for line in body) for sign in "-+"]


def test_values_are_chosen_by_phase_module_and_name(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    update = shown(capsys, train, "--phase", "update")
    assert "update:" in update and "forward:" not in update and "return" not in update and "adam" in update
    norm = shown(capsys, train, "--module", "model.norm")
    assert " native_layer_norm " in norm and " native_layer_norm_backward " in norm and " addmm " not in norm
    layers = shown(capsys, train, "--module", "model.layers.*", "--phase", "input")
    assert len(layers.splitlines()) == 1 + 3 * 2 * 3  # weight and bias, each with two states
    diff = shown(capsys, train, "--diff", "zero", "--module", "model.norm")
    assert "model_norm_bias" in diff and "layers" not in diff


def test_of_one_value_it_says_where_it_is_from_and_who_reads_it(train: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, train, "--value", "addmm_1")
    assert re.search(r"source +\S*train.py:\d+ in forward\n +module +model\.layers\.1\n +made by +the capture", text)
    assert "reads     relu = " in text and "read by   relu_1 = " in text
    assert "made by   launch" in shown(capsys, train, "--value", "launch")


def test_it_writes_a_page_of_two_plans(train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    said = shown(capsys, train, "--html", str(page), "--beside", "stage=1 ranks=4", "--device", "h100")
    assert re.fullmatch(rf"wrote {page}, 0\.\d MB; it opens from disk in any browser\n", said)
    text = page.read_text(encoding="utf-8")
    assert '"title":"stage 3, dp=2, h100"' in text and '"title":"stage 1, dp=4, h100"' in text


def test_what_is_wrong_is_said_with_what_there_is(
    train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean propagate" in fails(capsys, train, "--diff", "propagat")
    assert "They are, in order: 0 captured, 1 pin, 2 zero" in fails(capsys, train, "--after", "99")
    assert "`--after captured`" in fails(capsys, train, "--before", "captured")
    assert "there is model.layers.0" in fails(capsys, train, "--module", "model.layer.0")
    assert "there is addmm" in fails(capsys, train, "--value", "addm")
    assert "there is no file" in fails(capsys, "nowhere.py:make")
    assert "raised ValueError: no data here" in fails(capsys, train.replace(":make", ":raises"))
    assert "there is no device 'tpu'" in fails(capsys, train, "--device", "tpu")
    assert "give --html FILE too" in fails(capsys, train, "--beside", "stage=1")
    page = str(tmp_path / "none" / "report.html")
    assert "no folder" in fails(capsys, train, "--html", page)
    page = str(tmp_path / "report.html")
    assert "'stages' is not known here" in fails(capsys, train, "--html", page, "--beside", "stages=1")
    assert "unknown stage 7" in fails(capsys, train, "--html", page, "--beside", "stage=7")
    assert "cannot read it" in fails(capsys, train, "--html", page, "--measured", str(tmp_path / "none.json"))
    assert "are for the text" in fails(capsys, train, "--html", page, "--phase", "forward")


@pytest.mark.parametrize("options", [["--stage", "7"], ["--phase", "sideways"], ["--diff", "zero", "--list"]])
def test_a_wrong_command_ends_with_status_2(train: str, options: list[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(["show", train, *options])
    assert found.value.code == 2


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert "graphzero show train.py:make --ranks 8 --stage 3" in " ".join(capsys.readouterr().out.split())
