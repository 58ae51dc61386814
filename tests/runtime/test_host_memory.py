"""gz.keep_freed_memory: blocks that were freed are there, mapped, for who asks next."""

import os
import subprocess
import sys

import pytest

import graphzero as gz
from graphzero.runtime import host_memory

FAULTS = """
import resource, torch
import graphzero as gz
if {keep}:
    gz.keep_freed_memory()
def step():
    found = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
    return sum(x[0] for x in found)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


PAGES = 4 * 8 * 2**24 // os.sysconf("SC_PAGE_SIZE")  # that are touched between the two counts


def faults(keep: bool) -> int:
    """Pages mapped while blocks come and go, in a process that starts by giving back whatever is freed."""
    returns = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", FAULTS.format(keep=keep)]
    return int(subprocess.run(command, capture_output=True, check=True, env=os.environ | returns).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_blocks_are_not_mapped_anew() -> None:
    assert faults(keep=True) < PAGES // 8 < PAGES // 2 < faults(keep=False)


def test_a_c_library_that_cannot_is_an_error_that_says_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    host_memory.keep_freed_memory.cache_clear()
    with pytest.raises(gz.ConfigError, match="jemalloc"):
        gz.keep_freed_memory()
