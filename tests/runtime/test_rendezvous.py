"""Ranks of one start find each other, whatever an earlier start has left in the store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import graphzero as gz
from graphzero.runtime.world import launch
from graphzero.runtime.world.rendezvous import agree_on_prefix

RANKS = 3


def all_meet(store, ranks=range(RANKS), seconds=60.0):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agree_on_prefix(store, rank, RANKS, seconds), ranks))


def test_each_start_has_one_name_of_its_own():
    store = dist.HashStore()
    names = [all_meet(store) for _ in range(5)]
    assert all(len(set(found)) == 1 for found in names) and len({found[0] for found in names}) == 5


def test_a_rank_that_comes_first_does_not_take_an_earlier_name():
    store = dist.HashStore()
    earlier = all_meet(store)[0]
    with ThreadPoolExecutor(RANKS) as pool:
        first = [pool.submit(agree_on_prefix, store, rank, RANKS, 60.0) for rank in (2, 1)]
        assert not any(one.done() for one in first)
        name = pool.submit(agree_on_prefix, store, 0, RANKS, 60.0).result()
        assert {one.result() for one in first} == {name} and name != earlier


@pytest.mark.parametrize("there, missing", [([0, 1], r"ranks \[2\] of 3"), ([1, 2], "rank 0")])
def test_ranks_that_do_not_come_are_named(there, missing):
    store = dist.HashStore()
    all_meet(store)
    with pytest.raises(gz.PlacementError, match=f"{missing} did not start within 0.3 s"):
        all_meet(store, there, 0.3)


def test_a_long_wait_for_a_rank_that_does_not_come_is_logged(monkeypatch, caplog):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setattr(launch, "LONG_WAIT", 0.05)
    monkeypatch.setattr(launch, "_failures", [])

    def wait_in_vain(*_):
        time.sleep(0.5)
        raise dist.DistStoreError("wait timeout after 500ms")

    monkeypatch.setattr(dist, "init_process_group", wait_in_vain)
    with pytest.raises(gz.PlacementError, match=r"with the others: wait timeout after 500ms\n.*IFNAME .* is eth9"):
        launch.ensure_world("cpu")
    assert "rank 0 has waited 0 s for 2 ranks" in caplog.text and "it is eth9, and this host has lo" in caplog.text
    with pytest.raises(gz.PlacementError, match="first try .* failed: wait timeout"):
        launch.ensure_world("cpu")
