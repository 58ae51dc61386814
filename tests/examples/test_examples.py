"""The examples run as their docstrings say, and their helpers do what they promise.

They run on processes that are forked from one that has loaded torch, which in each of them would take seconds.  The
runs of ``test_resume`` are started by torchrun.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import start, start_as_torchrun
from language import TrainGraph, make, make_model, warm_cosine
from launch import options_of
from report import aligned
from tensor_parallel import Gpt, Train, plain_losses, traffic
from text import Text, share, standard_library

import graphzero as gz

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def forked(folder: Path, ranks: int, script: str, *options: str) -> str:
    """What a script prints on ranks with the environment that torchrun gives them, or, with 0 of them, by itself."""
    output = folder / f"{ranks} {script}.txt"
    begin = start_as_torchrun if ranks else start
    begin(_run, (output, script, options), max(ranks, 1))
    return output.read_text(encoding="utf-8")


def _run(rank: int, output: Path, script: str, options: tuple[str, ...]) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = [script, *options]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["mlp.py", "mlp_global.py"])
def test_the_mlp_learns_the_same_alone_and_on_two_ranks(script, tmp_path):
    alone, both = (forked(tmp_path, ranks, script) for ranks in (0, 2))
    assert losses(alone)[-1] < 0.3 * losses(alone)[0]
    assert losses(both) == pytest.approx(losses(alone), rel=1e-2)
    assert "plan of TrainGraph on dp=2" in both


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "mlp"])
def test_train_shows_text_and_a_table_whose_measurements_equal_its_plans(model, tmp_path):
    small = ["--layers=1", "--width=32", "--context=32", "--batch=4", "--compare-steps=3", "--steps=5"]
    options = ["--model", model, "--stage", "3", *small]
    output = forked(tmp_path, 2, "train.py", *options)
    assert "held-out loss" in output and "a sample of what it writes" in output
    pairs = re.findall(r"([\d,.]+) / ([\d,.]+)", output)
    assert len(pairs) >= 4 * 5
    assert all(planned == measured for planned, measured in pairs), output
    off = next(line for line in output.splitlines() if line.startswith("loss, off plain PyTorch"))
    assert all(float(found) < 2e-5 for found in re.findall(r"\d\.\de[+-]\d+", off)), off
    assert re.search(r"^stage 1 also splits optimizer states: peak [\d.]+ to [\d.]+ MB \(-\d+%\)", output, re.MULTILINE)
    assert re.search(r"^The losses of all stages are equal (to the bit|within \de-0[6-9]);", output, re.MULTILINE), (
        output
    )


@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.slow), "mlp"])
def test_each_stage_lowers_the_peak_of_the_main_job_and_the_last_one_halves_it(model):
    options = options_of(["--model", model])
    batch = torch.zeros(options.batch // options.ranks, options.context, dtype=torch.long)
    peaks = []
    for stage in range(4):
        with gz.testing.fake_world(options.ranks):
            made = make_model(model, options.layers, options.width, options.context)
            peaks.append(TrainGraph(made, options.steps, stage).compile(batch, batch).plan.memory.peak)
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    assert peaks[3] < 0.5 * peaks[0]
    if model == "gpt2":
        graph, example = make(gz.placement("cpu", range(options.ranks), virtual=True), 3)
        assert graph.compile(*example).plan.memory.peak == peaks[3]


@pytest.mark.parametrize(
    "options, said",
    [
        ("--model bert", "--model: invalid choice: 'bert' (choose from"),
        ("--stage 7", "--stage: invalid choice: 7 (choose from"),
        ("--ranks 0", "--ranks 0: at least 1 is needed"),
        ("--ranks 3 --batch 4", "--batch 4: 3 ranks cannot share 4 sequences equally; take a multiple of 3"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--steps 0", "--steps 0: at least 1 is needed"),
        ("--context 5000", "--context 5000: at most 1024 bytes"),
        ("--width 100", "--width 100: gpt2 has heads of 32; take a multiple of 32"),
        ("--compare-steps 1", "--compare-steps 1: 0 for no table, else at least 2"),
        ("--stages 2", "unrecognized arguments: --stages 2"),
    ],
)
def test_a_wrong_option_is_one_sentence(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        options_of(options.split())
    shown = capsys.readouterr()
    assert ended.value.code == 2 and not shown.out
    assert shown.err.startswith(f"train: {said}") and shown.err.count("\n") == 1


def test_of_many_ranks_with_a_wrong_option_one_speaks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (0, 1), (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit):
            options_of(["--ranks", "4"])
        shown = capsys.readouterr().err
        assert shown.count("\n") == lines
    assert options_of([]).ranks == 2


def test_make_train_starts_no_rank_with_a_wrong_option():
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    wrong = ["RANKS=3", "BATCH=4", f"VENV={sys.prefix}", f"--assume-old={Path(sys.prefix) / '.train'}"]
    done = subprocess.run(["make", "train", *wrong], capture_output=True, text=True, cwd=EXAMPLES.parent, env=outer)
    assert done.returncode == 2 and not done.stdout
    said, of_make = done.stderr.splitlines()
    assert said.startswith("train: --batch 4: 3 ranks cannot share") and of_make.startswith("make: ***")


@pytest.mark.slow
def test_the_script_of_deepspeed_learns(monkeypatch, capsys):
    import from_deepspeed

    monkeypatch.setattr(sys, "argv", ["from_deepspeed.py", "--context", "32", "--steps", "31"])
    from_deepspeed.main()
    found = losses(capsys.readouterr().out)
    assert len(found) == 4 and found[0] > 5.3 and found == sorted(found, reverse=True) and found[-1] < found[0] - 0.1


@pytest.mark.parametrize("along", [False, True], ids=["", "sequence"])
def test_tensor_parallelism_with_zero_trains_as_plain_pytorch(along):
    def make():
        torch.manual_seed(0)
        return Gpt(layers=1, width=16, heads=2, context=8, along=along)

    batches = [Text(megabytes=0.1).batch(step, size=4, context=8) for step in range(2)]
    graph = Train(make(), gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True), stage=3)
    losses = [graph(*batch).item() for batch in batches]
    assert losses == pytest.approx(plain_losses(make(), batches), rel=1e-5)
    said = traffic(graph)
    assert "dp forward all_gather parameters" in said and "tp forward all_gather parameters" not in said
    assert ("tp forward reduce_scatter other" in said) == along


@pytest.mark.slow
def test_three_dimensions_train_as_plain_pytorch(tmp_path):
    small = ("--steps", "2", "--schedule", "zb1p", "--stage", "3")
    output = forked(tmp_path, 0, "three_dimensions.py", *small)
    assert "pp=2 x dp=2 x tp=2 virtual ranks, ZeRO stage 3" in output and "pipeline zb1p, bubble" in output
    assert float(re.search(r"largest difference ([0-9.e+-]+)", output)[1]) < 1e-5


def test_tensor_parallelism_is_the_same_on_virtual_ranks_and_on_four_processes(tmp_path):
    small = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--steps", "3"]
    virtual, processes = (forked(tmp_path, ranks, "tensor_parallel.py", *small) for ranks in (0, 4))
    assert virtual.replace("virtual", "gloo") == processes
    off = re.findall(r"largest difference (\d\.\de[+-]\d+)", processes)
    assert len(off) == 1 and float(off[0]) < 2e-6


def test_the_corpus_is_the_same_each_time_and_its_parts_do_not_overlap():
    assert standard_library(10_000) == standard_library(10_000)
    text = Text(megabytes=0.1)
    assert sum(len(part) for part in text.parts.values()) == 100_000


def test_targets_are_the_bytes_that_follow_and_shares_make_up_the_batch():
    text = Text(megabytes=0.1)
    ids, targets = text.batch(3, size=4, context=16)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    shares = [share((ids, targets), rank, 2, torch.device("cpu")) for rank in range(2)]
    assert torch.equal(torch.cat([found[0] for found in shares]), ids)
    assert not torch.equal(text.batch(4, 4, 16)[0], ids)


@pytest.mark.parametrize("kind", ["gpt2", "mlp"])
def test_a_model_predicts_each_byte_from_earlier_ones_alone(kind):
    model = make_model(kind, layers=1, width=32, context=16)
    ids = torch.zeros(1, 16, dtype=torch.long)
    changed = ids.clone()
    changed[0, 9] = 7
    same = (model(ids) == model(changed)).all(-1)[0]
    assert same[:9].all() and not same[9:].all()


def test_the_rate_rises_then_falls_to_a_tenth():
    rate = warm_cosine(100)
    rates = [rate(step) for step in range(101)]
    assert max(rates) == rates[10] == 1.0 and rates[0] == 0.1
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_columns_of_the_table_are_aligned():
    assert aligned([["", "a"], ["one", "1"], ["two", "20"]]).splitlines() == [
        "      a",
        "-------",
        "one   1",
        "two  20",
    ]
