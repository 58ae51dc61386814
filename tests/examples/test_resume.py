"""Runs that are killed go on from their last checkpoint by themselves, on one host and on two."""

import os
import subprocess
import sys
import time

import hosts
import pytest
from stress.killed_ranks import RESUME, SMALL, Run, check_kills, read_last_checkpoint, read_losses

import graphzero as gz

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run of two ranks."""
    run = Run(tmp_path_factory.mktemp("runs") / "whole", 2, stage=3)
    run.end()
    return run


def test_with_a_rank_killed_a_run_ends_as_an_undisturbed_one(whole, tmp_path):
    check_kills(tmp_path, whole, kills=1, seed=0, saved=8)


@pytest.mark.skipif(not hosts.allowed(), reason="this user may not make network namespaces")
def test_when_one_of_two_hosts_is_gone_the_other_goes_on_alone(whole, tmp_path):
    wanted = read_losses(whole.output.read_text())
    folder, outputs = tmp_path / "two", [tmp_path / name for name in ("first.txt", "second.txt")]
    with hosts.hosts() as names:
        first, second = (
            hosts.start(name, i, output, RESUME, str(folder), *SMALL)
            for i, (name, output) in enumerate(zip(names, outputs, strict=True))
        )
        try:
            while not saved_by_two(folder):
                assert first.poll() is None and second.poll() is None, outputs[0].read_text()
                time.sleep(0.02)
            second.kill()  # and with it all processes of that host
            assert first.wait(200) == 0, outputs[0].read_text()
        finally:
            for host in (first, second):
                host.kill()
                host.wait()
    said = outputs[0].read_text()
    assert "send through gloo" in said and "goes on from step" in said, said
    found = read_losses(said)
    assert max(found) == max(wanted) and found == pytest.approx({step: wanted[step] for step in found}, rel=1e-9)
    assert set(read_last_checkpoint(folder)) == {"rank-00000.safetensors"}


def test_slurm_starts_one_torchrun_on_each_host(tmp_path):
    fakes = {
        "scontrol": 'test "$*" = "show hostnames gpu[3-4]" && echo gpu3 && echo gpu4',
        "srun": 'shift; exec "$@"',
        "torchrun": 'echo "$@"',
    }
    for name, does in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "gpu[3-4]", "JOB_NUM_NODES": "2", "JOB_ID": "51234", "GPUS_ON_NODE": "8"}
    slurm["SUBMIT_DIR"] = str(RESUME.parents[1])
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    done = subprocess.run(
        ["bash", RESUME.with_name("hosts.sbatch"), "train.py", "a folder"], capture_output=True, text=True, check=True,
        env={**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    options = "--nnodes=2 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=gpu3:31234"
    assert done.stdout.strip() == f"{options} --rdzv-id=51234 train.py a folder"


def saved_by_two(folder):
    last = gz.latest(folder)
    return last is not None and len(list(last.glob("*.safetensors"))) == 2
