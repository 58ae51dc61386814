"""Graphs on 2 x 2 real gloo processes: see ``nd_process_checks``, whose checks run in one set of processes."""

import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
from nd_process_checks import CHECKS, work  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with mp.Manager() as manager:
        found = manager.dict()
        context = mp.spawn(work, (str(tmp_path_factory.mktemp("world") / "store"), found), nprocs=4, join=False)
        try:
            while not context.join(timeout=120):
                pass
        except Exception as error:  # a worker died; what it has told stands in ``found``
            found["died"] = str(error)
        yield dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_four_processes(results, name):
    for rank in range(4):
        error = results.get(f"{name}/{rank}", f"did not run: {results.get('died', 'a check before it failed')}")
        assert not error, f"rank {rank}: {error}"
