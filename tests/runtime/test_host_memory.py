"""freed_at_once: what is freed goes back to the kernel, except where the user has told the C library to keep it."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from graphzero.runtime.host_memory import freed_at_once
def step():
    blocks = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
    return sum(x[0] for x in blocks)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    step()
with freed_at_once():
    inside = faults()
step()
print(inside, faults())
"""

PAGES = 4 * 8 * 2**24 // os.sysconf("SC_PAGE_SIZE")  # that are touched in each of the counts
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def faults(environment: dict[str, str]) -> list[int]:
    """Pages mapped while blocks come and go: within freed_at_once, and after it."""
    command = [sys.executable, "-c", FAULTS]
    return [*map(int, subprocess.check_output(command, env=os.environ | environment).split())]


def test_blocks_are_mapped_anew_where_what_is_freed_goes_back_at_once() -> None:
    inside, _ = faults({})
    assert inside > PAGES // 2


def test_settings_of_the_user_stay() -> None:
    assert max(faults(KEPT)) < PAGES // 8
