"""The comparison of pipeline stages with other systems: all train alike."""

from argparse import Namespace

import pytest
import stage_peers
from _run import on_gloo

NAMES = [s.name for s in stage_peers.SYSTEMS if s.needs == "torch" and " + " not in s.name]


def options_for(*names: str) -> Namespace:
    return Namespace(model="toy", ranks=2, micro_batches=4, rounds=1, steps=3, systems=names)


@pytest.mark.slow
def test_every_system_trains_to_the_same_losses():
    times = on_gloo(2, stage_peers.time_systems, options_for(*NAMES))
    wanted = times["graphzero, 1f1b"].losses
    assert len(set(wanted)) > 1, "a model that does not train shows nothing"
    assert list(times) == NAMES
    for name, one in times.items():
        assert one.losses == pytest.approx(wanted, rel=1e-5), name


@pytest.mark.slow
def test_a_loss_is_the_mean_of_all_labels_where_micro_batches_have_other_numbers_of_them():
    losses = on_gloo(2, stage_peers.ragged_losses, options_for("graphzero, 1f1b", "torch, 1f1b"))
    wanted = losses["plain PyTorch, whole batch"]
    assert losses["graphzero, 1f1b"] == pytest.approx(wanted, rel=1e-6)
    assert losses["torch, 1f1b"] != pytest.approx(wanted, rel=1e-5)
