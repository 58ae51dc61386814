"""The comparison of split sequences with other systems: all train alike."""

from argparse import Namespace

import peers
import pytest
from _run import on_gloo

SIZES = {"length": 16, "batch": 2, "width": 32, "layers": 1, "heads": 4}


@pytest.mark.slow
def test_every_system_trains_to_the_same_losses():
    names = [name for name in peers.SEQUENCES if " + " not in name]
    times = on_gloo(
        2, peers.time_systems, Namespace(subject="sequences", ranks=2, rounds=1, steps=3, systems=names, **SIZES)
    )
    wanted = times[names[0]].losses
    assert len(set(wanted)) > 1, "a model that does not train shows nothing"
    assert list(times) == names
    for name, one in times.items():
        assert one.losses == pytest.approx(wanted, rel=1e-5), name
