"""The comparison of split sequences with other systems: all train alike."""

from argparse import Namespace
from importlib.util import find_spec

import pytest
import sequence_peers
from _run import on_gloo

NAMES = [name for name in sequence_peers.SYSTEMS if " + " not in name]


@pytest.mark.slow
def test_every_system_trains_to_the_same_losses():
    names = [name for name in NAMES if name != sequence_peers.PEER or find_spec("deepspeed")]
    sizes = {"length": 16, "batch": 2, "width": 32, "layers": 1, "heads": 4}
    times = on_gloo(2, sequence_peers.time_systems, Namespace(ranks=2, rounds=1, steps=3, systems=names, **sizes))
    wanted = times["graphzero, exchange"].losses
    assert len(set(wanted)) > 1, "a model that does not train shows nothing"
    assert list(times) == names
    for name, one in times.items():
        assert one.losses == pytest.approx(wanted, rel=1e-5), name
