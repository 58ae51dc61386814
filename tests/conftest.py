"""What all tests share.  Its being here also puts ``tests/`` on the path, for ``toys``; ``bench/`` starts ranks, and
``docs/`` reads docstrings."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# As in `make test`: more threads add in another order, and two ranks of each test share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# On a busy machine a compile takes longer than the seconds after which it says so on stderr, which tests read.
os.environ["GRAPHZERO_PROGRESS"] = "off"
os.environ["GRAPHZERO_TRACEBACK"] = "1"  # where a test fails, all frames are wanted
gc.set_threshold(20_000, 20, 20)  # Python's own numbers cost 2 % of the tests' time
sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("bench", "docs")]
import _ranks  # noqa: E402

if not torch.backends.cuda.is_built():  # such a build cannot be forked after a backward, with a GPU or without
    _ranks.LOADED.append("tests.first_steps")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--other-kernels", action="store_true", help="round as an unlike CPU would; see other_kernels.py")
    parser.addoption("--strict-transfers", action="store_true", help="transfers between ranks end at the wait")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-transfers"):
        os.environ["GRAPHZERO_TESTS_STRICT"] = "1"  # for processes that tests start; see runtime/processes.py
    if config.getoption("--other-kernels"):
        os.environ["GRAPHZERO_TESTS_OTHER_KERNELS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from order_of_files import LONGEST

    if items and items[0].config.getoption("--other-kernels"):
        for item in items:
            if "same_kernels" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="compares bits that other kernels would make otherwise"))
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects five times when it ends: seconds


@pytest.fixture(autouse=True, scope="module")
def _looked_at_once() -> None:
    """What stands in memory when a file begins, mostly modules, the collector looks at no more: it is most of its work,
    and in each test that asks for a collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test draws the same random numbers, alone or among others."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # where other devices are not there, that notes a stack trace for each: milliseconds
        torch.default_generator.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if request.config.getoption("--other-kernels"):
            from other_kernels import other_kernels

            stack.enter_context(other_kernels())
        marked = request.node.get_closest_marker
        if marked("strict") or request.config.getoption("--strict-transfers") and not marked("at_once"):
            from graphzero.testing import strict_transfers

            stack.enter_context(strict_transfers())
        yield
