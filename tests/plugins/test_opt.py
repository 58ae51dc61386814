"""``graphzero opt``: a program and a line of passes in, what they make of it out, or one clear message."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import step

import graphzero as gz
from graphzero.cli import main
from graphzero.ir.text.parser import parse
from graphzero.passes import Options, Pipeline, default_passes
from graphzero.passes.pass_list import pass_entries
from graphzero.testing import assert_same_step

STEP = step(optimizer="momentum")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "step.txt"
    path.write_text(STEP)
    return str(path)


WRONG_INPUT = ("graphzero: ConfigError", "graphzero: PlacementError")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says in one message."""
    status, printed = main(["opt", *arguments]), capsys.readouterr()
    assert status == (2 if printed.err.startswith(WRONG_INPUT) else 1)
    assert not printed.out and printed.err.startswith("graphzero: ") and "Traceback" not in printed.err
    return printed.err


def test_it_prints_the_program_that_the_passes_make(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", file, "--passes", "default{stage=2 bucket_bytes=400}"]) == 0
    wanted = Pipeline(default_passes(Options(stage=2, bucket_bytes=400)))(parse(STEP))
    assert capsys.readouterr().out == str(wanted)


def test_without_passes_it_prints_the_program_verified(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", file]) == 0
    assert capsys.readouterr().out == str(parse(STEP))


def test_it_reads_what_it_has_printed_from_standard_input(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["opt", file, "--passes", "default{stage=3}"])
    whole, text = capsys.readouterr().out, STEP
    for entry in pass_entries():
        if entry.when(Options(stage=3)):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert main(["opt", "-", "--passes", str(entry.create_pass(Options(stage=3)))]) == 0
            text = capsys.readouterr().out
    assert text == whole


def test_a_diff_shows_what_each_pass_changed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["opt", file, "--passes", "pin,pin,zero{stage=1}", "--diff"])
    pipeline = Pipeline(default_passes(Options(stage=1), until="stack_updates"))
    pipeline(parse(STEP))
    assert capsys.readouterr().out == "\n".join(record.diff() for record in pipeline.history) + "\n"


def test_verify_only_prints_nothing_and_says_by_its_status_whether_laws_hold(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["opt", file, "--verify-only", "--passes", "default"]) == 0
    assert capsys.readouterr() == ("", "")
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("graph g(dp=2)\n  x = batch() : f32[4, 2]\nforward:\n  y = t(x) : f32[4, 2]\n  return y\n")
    assert "'y'" in fails(capsys, str(wrong), "--verify-only")


def test_the_list_needs_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--list"]) == 0
    assert "    stage=2   a whole number\n" in capsys.readouterr().out


def test_a_device_says_for_whose_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A large value travels by itself on a CPU, and in a bucket on CUDA, which need not be there."""
    path = tmp_path / "sums.txt"
    path.write_text("""
        graph sums(dp=2) local
          x = batch()                     : f32[512, 256]  P!
          z = batch()                     : f32[512, 256]  P!
        forward:
          a = all_reduce(x, 'dp', 'sum')  : f32[512, 256]  B
          b = all_reduce(z, 'dp', 'sum')  : f32[512, 256]  B
          return a, b
    """)
    for device, count in (("cpu", 2), ("cuda", 1)):
        assert main(["opt", str(path), "--passes", "bucket{bucket_bytes=4194304}", "--device", device]) == 0
        assert capsys.readouterr().out.count("= bucket_all_reduce(") == count


@pytest.mark.parametrize(
    ("passes", "problem"),
    [
        ("zro", "ParseError: passes, character 1: no pass is called 'zro'; the passes are pin, zero"),
        ("zero{stage=9}", "ParseError: passes, character 6: Zero(stage=9): the stages are 1"),
        ("zero", "PassError: zero{stage=2 shard_min_size=1} stopped: TypeError"),
        ("bucket", "ParseError: passes, character 1: bucket takes a local graph"),
        ("pin,zero{axis=(tp)}", "no axis is called 'tp'"),
        ("pin,propagate{links=({latency=0 bandwidth=1}, {latency=0 bandwidth=1})}", "2 links for 1 placement axes"),
    ],
)
def test_a_wrong_line_of_passes_is_one_message(
    file: str, passes: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in fails(capsys, file, "--passes", passes)


def test_a_wrong_text_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.txt"
    for text, problem in (
        (STEP.replace("graph toy", "grph toy"), "line 1 of the graph: expected `graph name"),
        (STEP.replace("mm(", "__import__("), "no op is called __import__"),
        ("", "line 1 of the graph"),
    ):
        path.write_text(text)
        assert problem in fails(capsys, str(path))
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in fails(capsys, str(path))
    assert "cannot be read" in fails(capsys, str(tmp_path / "missing"))
    assert "cannot be read" in fails(capsys, str(tmp_path))
    assert "opt needs a FILE" in fails(capsys)


def test_a_pass_that_stops_is_named_with_its_line(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, graph: gz.StepGraph) -> gz.StepGraph:
        raise KeyError("what")

    monkeypatch.setattr("graphzero.passes.place.zero.Zero.__call__", broken)
    said = fails(capsys, file, "--passes", "pin,zero{stage=1}")
    assert "PassError: zero{stage=1 shard_min_size=1} stopped: KeyError: 'what'" in said and "test_opt.py" in said


def test_any_line_of_passes_gives_a_program_that_computes_the_same_or_a_message(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Passes in any order that their levels allow, more than once too."""
    rng, ended = random.Random(0), 0
    levels = list(dict.fromkeys(entry.level for entry in pass_entries()))
    for _ in range(60):
        names = ["pin"]
        for level in levels:
            here = [entry.name for entry in pass_entries() if entry.level == level]
            last = here.pop() if level != levels[-1] else ""
            names += [*(rng.choices(here, k=rng.randint(0, 5)) if here else []), *filter(None, [last])]
        status = main(["opt", file, "--passes", ",".join(names)])
        printed = capsys.readouterr()
        assert (status, bool(printed.err)) in ((0, False), (1, True), (2, True)) and "Traceback" not in printed.err
        if status == 0:
            assert_same_step(parse(STEP), parse(printed.out))
            ended += 1
    assert ended > 10


# ---- a mistake is reported by a text and a line


class ScaledGraph(gz.Graph):
    def __init__(self, stage: int) -> None:
        super().__init__(gz.placement("cpu", [[0, 1], [2, 3]], names=("dp_a", "dp_b"), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()), clip_grad_norm=1.0)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_input("scale", sbp=(gz.sbp.B, gz.sbp.B))

    def build(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) * scale).square().mean()
        loss.backward()
        return loss


SETTINGS = {
    "plain": lambda config: None,
    "links": lambda config: config.set_links({name: gz.Link(1e-5, 1e9) for name in ("dp_a", "dp_b")}),
    "early": lambda config: config.set_optimizer_in_backward(),
    "small": lambda config: config.set_memory_budget(10**6),
}


COMPARED: set[tuple[str, str, str]] = set()  # a program, passes and their result: what other settings have in common


@pytest.mark.parametrize(
    ("stage", "setting"),
    [
        pytest.param(stage, setting, marks=[] if stage == 3 or setting == "plain" else [pytest.mark.slow])
        for stage in range(4)
        for setting in SETTINGS
    ],
)
def test_a_graphs_first_program_and_the_line_of_its_passes_give_every_program_of_its_history(
    stage: int, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = ScaledGraph(stage)
    SETTINGS[setting](graph.config)
    graph.compile(torch.randn(8, 8), torch.ones(4))
    path = tmp_path / "step.txt"
    path.write_text(str(graph.history[0].before))
    assert main(["opt", str(path), "--passes", ",".join(record.text for record in graph.history)]) == 0
    assert capsys.readouterr().out == str(graph.program)
    for record in graph.history:
        before, after = str(record.before), str(record.after)
        if (before, record.text, after) not in COMPARED:
            path.write_text(before)
            assert main(["opt", str(path), "--passes", record.text]) == 0
            assert capsys.readouterr().out == after, record.name
            COMPARED.add((before, record.text, after))


OWN_PASSES = """
from dataclasses import dataclass

import graphzero as gz
from graphzero.ir import value


@dataclass(frozen=True)
class PinBatch:
    axis: str = "dp"
    most: int = 1

    def __call__(self, graph):
        for node in list(graph.placeholders("batch"))[: self.most]:
            graph.pin(node, self.axis, gz.sbp.S(0))
        return graph


def do_nothing(graph):
    return graph


def helper(a, b):
    return a
"""


def test_passes_of_a_file_run_by_their_names_with_their_options(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "my_passes.py"
    own.write_text(OWN_PASSES)
    assert main(["opt", file, "--load", str(own), "--passes", "do_nothing,pin_batch{most=1},pin,zero{stage=1}"]) == 0
    x = next(line for line in capsys.readouterr().out.splitlines() if "batch()" in line)
    assert "S(0)!" in x
    for passes, problem in (
        ("pin_batch{least=1}", "pin_batch has no option 'least'; it has axis, most"),
        ("helper", "no pass is called 'helper'"),
        ("do_nothing{x=1}", "expected ',' and a pass"),
    ):
        assert problem in fails(capsys, file, "--load", str(own), "--passes", passes)


def test_a_file_without_passes_or_with_the_name_of_a_built_in_one_is_refused(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "no_passes.py"
    for text, problem in (
        ("x = 1", "it defines no pass"),
        ("def zero(graph): return graph", "zero is the name of a built-in pass"),
        ("raise ValueError('no')", "ValueError: no"),
    ):
        own.write_text(text)
        assert problem in fails(capsys, file, "--load", str(own))
    assert "give a Python file" in fails(capsys, file, "--load", str(tmp_path))


def test_a_pass_of_the_users_is_written_with_its_options_and_read_back(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "my_passes"}
    exec(OWN_PASSES, names)
    own = {"pin_batch": names["PinBatch"], "do_nothing": names["do_nothing"]}
    pipeline = Pipeline([own["do_nothing"], own["pin_batch"]("dp", 2)])  # type: ignore[operator,list-item]
    pipeline(parse(STEP))
    text = ",".join(record.text for record in pipeline.history)
    assert text == "do_nothing,pin_batch{axis=dp most=2}"
    assert gz.passes.parse_passes(text, own=own) == pipeline.passes  # type: ignore[arg-type]
