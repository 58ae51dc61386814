"""Runs checks, functions whose names begin with ``check_``, in real processes: all of them in one set.

Ranks are on CPUs, with gloo, or several on one GPU: with NCCL where it lets them share it, else with gloo.
"""

import importlib
import json
import os
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import start
from other_kernels import other_kernels

from graphzero import _compat
from graphzero.runtime.world import shared_gpus
from graphzero.testing import strict_transfers

STRICT = "GRAPHZERO_TESTS_STRICT"  # set by pytest's --strict-transfers, for processes that tests start
OTHER_KERNELS = "GRAPHZERO_TESTS_OTHER_KERNELS"  # set by its --other-kernels
START = {"cpu": "forkserver", "cuda": "spawn"}  # a process that has asked for GPUs cannot be forked
device_type = "cpu"  # of this rank


def slow(check):
    """Marks a check for the second stage."""
    check.slow = True
    return check


def checks_in(*modules):
    """Name -> function."""
    found = {}
    for module in map(importlib.import_module, modules):
        found |= {name.removeprefix("check_"): fn for name, fn in vars(module).items() if name.startswith("check_")}
    return found


class Checks:
    """The checks of some modules, in one set of so many processes, which run when the first is asked for; slow ones in
    another set.
    """

    def __init__(self, modules, ranks, device_type="cpu"):
        self.modules, self.ranks, self.device_type, self.results = modules, ranks, device_type, {}
        self.slow = {name: hasattr(check, "slow") for name, check in checks_in(*modules).items()}
        self.names = [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in self.slow.items()]

    def assert_passed(self, name, tmp_path_factory):
        kind = self.slow[name]
        if kind not in self.results:
            names = [other for other, slow in self.slow.items() if slow == kind]
            folder = tmp_path_factory.mktemp("world")
            self.results[kind] = run(self.modules, self.ranks, folder, names, self.device_type)
        assert_passed(self.results[kind], name, self.ranks)


def run(modules, ranks, folder, names=None, device_type="cpu"):
    """What each check came to, or each of those names: "name/rank" -> the traceback, or nothing.

    A set of processes ends with the first check that fails, since other ranks may wait for the one that left it; the
    checks after it run in another set.
    """
    results, left = {}, list(checks_in(*modules) if names is None else names)
    while left:
        world, died = Path(tempfile.mkdtemp(dir=folder)), ""
        try:
            start(_work, (ranks, str(world), modules, left, device_type), ranks, START[device_type])
        except Exception as error:  # a worker died; what it has told stands in its file
            died = f"did not end it: {error}"
        files = [world / f"{rank}.json" for rank in range(ranks)]
        told = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        while left:
            name, *left = left
            results |= {f"{name}/{rank}": one.get(name, died or "did not run it") for rank, one in enumerate(told)}
            if not all(one.get(name) == "" for one in told):
                break
    return results


def assert_passed(results, name, ranks):
    """Shows what every rank says: that of one is often a consequence of another's."""
    told = {rank: results[f"{name}/{rank}"] for rank in range(ranks)}
    failed = "".join(f"\nrank {rank}: {error}" for rank, error in told.items() if error)
    assert not failed, failed


def computed_once(jobs):
    """Results of functions of which every rank has the same: each is called by one rank, and all are given all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = [None] * ranks
    dist.all_gather_object(results, [job() for job in jobs[rank::ranks]])
    return [results[i % ranks][i // ranks] for i in range(len(jobs))]


def uses_nccl(ranks, device_type):
    """Whether so many ranks on this machine can send by NCCL."""
    return device_type == "cuda" and (torch.cuda.device_count() >= ranks or _compat.nccl_version() >= (2, 30))


def prepare_rank(rank, ranks, kind):
    """Make a process a rank on a kind of device; the backends that it talks by."""
    global device_type
    device_type = kind
    torch.set_num_threads(1)
    if kind == "cpu":
        return "gloo"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    os.environ.update(shared_gpus.SETTINGS, LOCAL_RANK=str(rank))  # which says which GPU it takes
    return "cpu:gloo,cuda:nccl" if uses_nccl(ranks, kind) else "gloo"


def _work(rank, ranks, folder, modules, names, kind):
    backends = prepare_rank(rank, ranks, kind)
    dist.init_process_group(backends, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tempfile.tempdir = folder  # which pytest clears away
    told = {}
    checks = checks_in(*modules)
    modes = {STRICT: strict_transfers, OTHER_KERNELS: other_kernels}
    modes = [mode for name, mode in modes.items() if name in os.environ and kind == "cpu"]
    for name in names:
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                checks[name]()
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
            break  # the other ranks may wait for this one
        finally:
            Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
