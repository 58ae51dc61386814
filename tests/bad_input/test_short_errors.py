"""What a user reads where a call is wrong: one sentence with the line, the user's own frames, once for all ranks."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero import errors
from graphzero.passes import Pipeline

ONE = gz.placement("cpu", range(2), virtual=True)


class ClassifierGraph(gz.Graph):
    def __init__(self, model=None, **options):
        super().__init__(ONE)
        self.model, self.loss = nn.Linear(4, 3) if model is None else model, nn.CrossEntropyLoss()
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), **options)

    def build(self, x, y):
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss


def shown(function) -> tuple[BaseException, str]:
    with pytest.raises(gz.GraphZeroError) as caught:
        function()
    return caught.value, "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.ones(8, 5), torch.zeros(8).long(), "must have same reduction dim"),
        (torch.ones(8, 4), torch.zeros(8, 1).long(), "0D or 1D target tensor expected"),
    ],
)
def test_what_plain_pytorch_refuses_too_is_said_to_be_so_with_the_inputs(x, y, words):
    error, _ = shown(lambda: ClassifierGraph()(x, y))
    first = str(error).splitlines()[0]
    assert first.startswith("build of ClassifierGraph does not run in plain PyTorch either: ") and words in first
    assert f"y: int64{list(y.shape)}" in str(error)
    assert "in build" in str(error)


def test_a_traceback_has_the_users_frames_alone(monkeypatch):
    monkeypatch.setenv(errors.TRACEBACK, "0")
    _, text = shown(lambda: ClassifierGraph()(torch.ones(8, 5), torch.zeros(8).long()))
    files = [line for line in text.splitlines() if line.startswith("  File")]
    assert sum("graphzero/errors.py" in line for line in files) == 1  # where it is raised again
    assert not any("torch" + "/" in line or "capture" in line or "<string>" in line for line in files)
    assert any("test_short_errors.py" in line for line in files)
    assert "direct cause" not in text


def test_all_frames_are_shown_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv(errors.TRACEBACK, "1")
    _, text = shown(lambda: ClassifierGraph()(torch.ones(8, 5), torch.zeros(8).long()))
    assert "direct cause" in text and "trace.py" in text


def test_what_the_user_was_handling_meanwhile_stays_behind_the_error(monkeypatch):
    monkeypatch.setenv(errors.TRACEBACK, "0")

    def retries():
        try:
            raise KeyError("the user's own")
        except KeyError:
            ClassifierGraph()(torch.ones(8, 5), torch.zeros(8).long())

    _, text = shown(retries)
    assert 'KeyError: "the user\'s own"' in text and "RuntimeError" not in text.partition("another exception")[0]


def test_an_error_that_another_rank_prints_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(errors, "WAIT", 0.0)
    monkeypatch.setattr(errors, "_reported", {})
    monkeypatch.setattr(sys, "excepthook", lambda *error: print("whole"))
    monkeypatch.setenv(errors.TRACEBACK, "0")
    same, other = gz.CaptureError("build reads a value\n\n  at train.py:3 in build"), gz.CaptureError("another")
    errors.reported_by(same, 0)
    for error in (same, other):
        sys.excepthook(type(error), error, None)
    printed = capsys.readouterr()
    assert printed.err == "CaptureError, which rank 0 prints whole: build reads a value\n"
    assert printed.out == "whole\n"


SCRIPT = """
import torch, graphzero as gz
from torch import nn

class ClassifierGraph(gz.Graph):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 3)

    def build(self, x):
        return self.model(x)

ClassifierGraph()(torch.ones(8, 5))
"""


@pytest.mark.slow
def test_two_ranks_print_what_both_raise_once(tmp_path, monkeypatch):
    monkeypatch.delenv(errors.TRACEBACK)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200)
    of_ranks = done.stderr.partition("torch/distributed/elastic")[0]
    assert of_ranks.count("does not run in plain PyTorch either") == 2
    assert of_ranks.count("in build") == 1
    assert len(of_ranks.splitlines()) < 25


LONG = [[1] * 10_000, torch.ones(10_000), np.ones(500)]
WRONG_ARGUMENTS = {
    "Graph(name=)": lambda value, config: gz.Graph(ONE, name=value),
    "Pipeline": lambda value, config: Pipeline(value),
    "S": lambda value, config: gz.sbp.S(value),
    "placement": lambda value, config: gz.placement("cpu", value),
    "names": lambda value, config: gz.placement("cpu", range(2), names=value),
    "axis": lambda value, config: config.enable_zero(axis=value),
    "add_pass": lambda value, config: config.add_pass(value),
    "set_links": lambda value, config: config.set_links(value),
    "set_input": lambda value, config: config.set_input("x", sbp=value),
    "set_gradient_accumulation_steps": lambda value, config: config.set_gradient_accumulation_steps(value),
    "norm_type": lambda value, config: ClassifierGraph(norm_type=value, clip_grad_norm=1.0),
    "clip_grad_value": lambda value, config: ClassifierGraph(clip_grad_value=value),
}


@pytest.mark.parametrize("place", WRONG_ARGUMENTS)
def test_a_wrong_value_is_an_error_of_ours_that_does_not_print_all_of_it(place):
    for value in (*LONG, torch.tensor(1), np.array(2.5), object()):
        error, _ = shown(lambda value=value: WRONG_ARGUMENTS[place](value, gz.GraphConfig(ONE)))
        assert len(str(error)) < 600


def test_none_is_a_norm_of_no_kind():
    error, _ = shown(lambda: ClassifierGraph(norm_type=None, clip_grad_norm=1.0))
    assert "norm_type=None" in str(error)
