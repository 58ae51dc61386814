"""A process is killed at random moments while it saves: the newest checkpoint is always whole, and none is lost."""

import os
import random
import signal
import struct
import sys
import time

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.checkpoint.files.blocks import BLOCK

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills what it has forked"),
]

KILLS = 50


class Counted(gz.Graph):
    """All of its values are the number of the save; more than a block of them."""

    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.ModuleDict({"wide": nn.Linear(1, BLOCK // 4, bias=False), "narrow": nn.Linear(4, 4)})

    def build(self, x):
        return self.model["narrow"](x)

    def count(self, number):
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(number)

    def counted(self):
        found = {float(x) for p in self.model.parameters() for x in (p.detach().min(), p.detach().max())}
        assert len(found) == 1, f"values of several saves: {found}"
        return found.pop()


def save_for_ever(graph, folder, number, told):
    """Until it is killed; tells each number whose checkpoint is complete."""
    while True:
        number += 1
        graph.count(number)
        gz.save(graph, folder, keep=2, extra=number, asynchronous=bool(number % 2)).wait()
        os.write(told, struct.pack("q", number))


def last_told(pipe, before):
    data = os.read(pipe, 1 << 16)
    return struct.unpack("q", data[-8:])[0] if data else before


def test_the_newest_checkpoint_is_whole_wherever_a_save_is_killed(tmp_path):
    graph, draw, number, partial = Counted(), random.Random(0), 1, 0
    graph.count(number)
    longest = 3 * gz.save(graph, tmp_path, extra=number).seconds
    for kill in range(KILLS):
        pipe, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                save_for_ever(graph, tmp_path, number, told)
            finally:
                os._exit(1)
        os.close(told)
        time.sleep(draw.random() * longest)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        complete = last_told(pipe, number)
        os.close(pipe)
        partial += any(child.name.endswith(".partial") for child in tmp_path.iterdir())
        number = gz.load(graph, tmp_path)
        assert graph.counted() == number >= complete, f"kill {kill}"
    assert partial > KILLS / 5, "most kills were not in the middle of a save"
    gz.save(graph, tmp_path, keep=2)
    assert len([*tmp_path.iterdir()]) == 2, "what was left is gone"
