"""freed_at_once: what is freed goes back to the kernel, except where the user has told the C library to keep it."""

import os
import subprocess
import sys

import pytest

# The ninth block is allocated behind the others, so that a heap which served them could not shrink below it.
# Resident memory is counted, not page faults: their number depends on whether the kernel has huge pages to give.
RETURNED = """
import os, torch
from graphzero.plugins.pretrained.host_memory import freed_at_once
def resident():
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def returned():
    blocks = [torch.ones(2**22) for _ in range(9)]  # 16 MiB each
    before = resident()
    del blocks[:8]
    return before - resident()
returned()  # a block of this size has been freed: glibc serves the next ones from its heap
with freed_at_once():
    print(returned())
print(returned())
"""

BLOCKS = 8 * 2**24  # bytes that are freed
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")


def returned(**environment: str) -> list[int]:
    """Bytes that go back to the kernel as eight blocks are freed below one that is kept: within it, and after."""
    command = [sys.executable, "-c", RETURNED]
    return [int(line) for line in subprocess.check_output(command, env=os.environ | environment).split()]


def test_blocks_go_back_as_they_are_freed_within_it_only() -> None:
    within, after = returned()
    assert within > BLOCKS * 7 // 8 and after < BLOCKS // 2


def test_settings_of_the_user_stay() -> None:
    assert max(returned(**KEPT)) < BLOCKS // 8
