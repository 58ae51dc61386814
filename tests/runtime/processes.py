"""Runs checks, functions whose names begin with ``check_``, in real gloo processes: all of them in one set."""

import importlib
import json
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import start


def checks_in(*modules):
    """Name -> function."""
    found = {}
    for module in map(importlib.import_module, modules):
        found |= {name.removeprefix("check_"): fn for name, fn in vars(module).items() if name.startswith("check_")}
    return found


def run(modules, ranks, folder):
    """What each check came to: "name/rank" -> the traceback, or nothing."""
    found = {}
    try:
        start(_work, (ranks, str(folder), modules), ranks)
    except Exception as error:  # a worker died; what it has told stands in its file
        found["died"] = str(error)
    for rank in range(ranks):
        file = folder / f"{rank}.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        found |= {f"{name}/{rank}": error for name, error in told.items()}
    return found


def assert_passed(results, name, ranks):
    for rank in range(ranks):
        error = results.get(f"{name}/{rank}", f"did not run: {results.get('died', 'a check before it failed')}")
        assert not error, f"rank {rank}: {error}"


def _work(rank, ranks, folder, modules):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    told = {}
    for name, check in checks_in(*modules).items():
        try:
            check()
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
            break  # the other ranks may wait for this one
        finally:
            Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
