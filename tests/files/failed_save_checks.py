"""What gloo processes check of saves that one of them cannot make: all hear why, soon, and nothing is left."""

import errno
import os
import shutil
import threading
import time

import pytest
import torch.distributed as dist
from file_checks import everyone, shared_folder
from file_toys import clipped_graph, losses

import graphzero as gz
from graphzero.checkpoint.files import blocks
from graphzero.checkpoint.files.async_save import Saved

SOON = 45.0  # seconds, on a busy machine


def fails_on_all(name, spoil, said, own, asynchronous):
    """spoil: what is done on the last rank.  said: what the others are told; own: what it raises itself."""
    folder, last = shared_folder(name), dist.get_rank() == dist.get_world_size() - 1
    graph = clipped_graph(everyone(), 2)
    losses(graph, 0)
    first = gz.save(graph, folder).path
    with pytest.MonkeyPatch.context() as patched:
        if last:
            spoil(patched)
        began = time.monotonic()
        with pytest.raises(BaseException) as raised:  # noqa: PT011 - looked at below
            gz.save(graph, folder, asynchronous=asynchronous).wait()
    assert time.monotonic() - began < SOON
    kind, match = own if last else (gz.GraphZeroError, said)
    assert isinstance(raised.value, kind) and match in str(raised.value), repr(raised.value)
    dist.barrier()
    try:
        second = gz.save(graph, folder).path
    except gz.RankError as error:  # what one rank raised alone the others hear in their next call at the latest
        assert not last and last_rank() + "stopped in" in str(error), error
        second = gz.save(graph, folder).path
    assert gz.latest(folder) == second != first and sorted(folder.iterdir()) == [first, second]


def cannot_open(patched):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    patched.setattr(blocks, "write_blocks", refuse)


def is_full(patched):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patched.setattr(blocks, "_write_all", refuse)


def removes_the_folder(patched):
    right = blocks.write_blocks

    def write(path, *args):
        shutil.rmtree(path.parents[1])
        return right(path, *args)

    patched.setattr(blocks, "write_blocks", write)


def is_interrupted_before_its_thread(patched):
    def interrupt(*_):
        raise KeyboardInterrupt

    patched.setattr(Saved, "start_thread", interrupt)


def has_no_thread(patched):
    def refuse(self):
        if self.name.startswith("saving"):
            raise RuntimeError("can't start new thread")
        return right(self)

    right = threading.Thread.start
    patched.setattr(threading.Thread, "start", refuse)


def last_rank():
    return f"rank {dist.get_world_size() - 1} "


def check_a_rank_that_may_not_write():
    for asynchronous in (True, False):
        said = last_rank() + ("could not write its part: " if asynchronous else "could not prepare its part")
        fails_on_all("denied", cannot_open, said, (gz.CheckpointError, "Permission denied"), asynchronous)


def check_a_disk_that_is_full_for_the_last_rank():
    for asynchronous in (True, False):
        said = "No space left on device"
        fails_on_all("full", is_full, said, (gz.CheckpointError, said), asynchronous)


def check_a_folder_that_is_removed_while_it_is_written():
    for asynchronous in (True, False):
        fails_on_all("removed", removes_the_folder, "", (gz.CheckpointError, "No such file"), asynchronous)


def check_a_rank_that_is_interrupted_before_its_thread_begins():
    said = last_rank() + "could not write its part: KeyboardInterrupt"
    fails_on_all("interrupted", is_interrupted_before_its_thread, said, (KeyboardInterrupt, ""), True)


def check_a_rank_that_can_start_no_thread():
    said = last_rank() + "could not write its part: "
    fails_on_all("threadless", has_no_thread, said, (gz.CheckpointError, "no thread can be started"), True)
