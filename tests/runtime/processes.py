"""Runs checks, functions whose names begin with ``check_``, in real gloo processes: all of them in one set."""

import importlib
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOADED = ["torch._dynamo", "torch.distributed.tensor", "graphzero.graph"]


def start(work, args, ranks, join=True):
    """``mp.spawn``, of processes that are forked from one that has loaded what all of them need, and done nothing."""
    mp.get_context("forkserver").set_forkserver_preload(LOADED)
    return mp.start_processes(work, args, ranks, join, start_method="forkserver")


def checks_in(*modules):
    """Name -> function."""
    found = {}
    for module in map(importlib.import_module, modules):
        found |= {name.removeprefix("check_"): fn for name, fn in vars(module).items() if name.startswith("check_")}
    return found


def run(modules, ranks, folder):
    """What each check came to: "name/rank" -> the traceback, or nothing."""
    with mp.Manager() as manager:
        found = manager.dict()
        context = start(_work, (ranks, str(folder / "store"), modules, found), ranks, join=False)
        try:
            while not context.join(timeout=120):
                pass
        except Exception as error:  # a worker died; what it has told stands in ``found``
            found["died"] = str(error)
        return dict(found)


def assert_passed(results, name, ranks):
    for rank in range(ranks):
        error = results.get(f"{name}/{rank}", f"did not run: {results.get('died', 'a check before it failed')}")
        assert not error, f"rank {rank}: {error}"


def _work(rank, ranks, path, modules, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    for name, check in checks_in(*modules).items():
        try:
            check()
            results[f"{name}/{rank}"] = ""
        except BaseException:
            results[f"{name}/{rank}"] = traceback.format_exc()
            break  # the other ranks may wait for this one
    dist.destroy_process_group()
