"""GraphConfig: what it takes, what it refuses, and when two of them mean the same program."""

import pytest
import torch

import graphzero as gz
from graphzero.config import GraphConfig


@pytest.fixture
def config() -> GraphConfig:
    return GraphConfig(gz.placement("cpu", range(4), virtual=True))


def test_stage_is_0_until_zero_is_enabled_and_2_when_nothing_is_said(config):
    assert config.zero.stage == 0
    config.enable_zero()
    assert (config.zero.stage, config.zero.axes, config.zero.shard_min_size) == (2, ("dp",), 1)
    config.enable_zero(False)
    assert config.zero.stage == 0


@pytest.mark.parametrize("stage", [0, 4, "3", True, None])
def test_an_unknown_stage_is_refused_with_the_choices(config, stage):
    with pytest.raises(gz.ConfigError, match=r"1 \(optimizer states split\), 2 .* 3"):
        config.enable_zero(stage=stage)


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_shard_min_size_is_a_count(config, size):
    with pytest.raises(gz.ConfigError, match="shard_min_size"):
        config.enable_zero(shard_min_size=size)


def test_an_axis_is_one_of_the_placement(config):
    config.enable_zero(axis="dp")
    with pytest.raises(gz.ConfigError, match="'dp'"):
        config.enable_zero(axis="tp")
    with pytest.raises(gz.ConfigError, match="once"):
        config.enable_zero(axis=[])


def test_zero_without_a_data_axis_asks_for_one():
    config = GraphConfig(gz.placement("cpu", range(2), names=["tp"], virtual=True))
    with pytest.raises(gz.ConfigError, match="axis='tp'"):
        config.enable_zero()
    config.enable_zero(axis="tp")


def test_what_comes_later_says_what_to_do_instead(config):
    with pytest.raises(gz.ConfigError, match="number of micro-batches, 1 or more"):
        config.set_gradient_accumulation_steps(0)
    with pytest.raises(gz.ConfigError, match="'eager', 'inductor'"):
        config.set_executor("jit")
    config.enable_amp(False)
    config.set_gradient_accumulation_steps(1)
    config.set_executor("inductor")
    assert config.executor == "inductor" and "executor=inductor" in repr(config)
    config.set_cuda_graph()
    assert config.cuda_graph and "cuda_graph=True" in repr(config)


def test_set_input_takes_one_sbp_per_axis(config):
    config.set_input("weights", sbp=gz.sbp.B)
    assert config.inputs == {"weights": (gz.sbp.B,)}
    with pytest.raises(gz.ConfigError, match="1 axes"):
        config.set_input("weights", sbp=(gz.sbp.B, gz.sbp.B))
    with pytest.raises(gz.ConfigError, match="gz.sbp"):
        config.set_input("weights", sbp="B")


def test_check_inputs_and_bucket_bytes_are_checked(config):
    config.check_inputs = "first"
    config.bucket_bytes = 1024
    with pytest.raises(gz.ConfigError, match="'always', 'first'"):
        config.check_inputs = "never"
    with pytest.raises(gz.ConfigError, match="bytes"):
        config.bucket_bytes = 0


def test_a_pass_follows_one_that_exists(config):
    def mine(graph):
        return graph

    config.add_pass(mine)
    config.add_pass(mine, after="mine")
    with pytest.raises(gz.ConfigError, match="'insert_boxing'"):
        config.add_pass(mine, after="boxing")
    with pytest.raises(gz.ConfigError, match="callable"):
        config.add_pass("mine")


def test_fingerprints_are_equal_exactly_when_programs_are():
    place = gz.placement("cpu", range(4), virtual=True)
    one, two = GraphConfig(place), GraphConfig(place)
    assert one.fingerprint == two.fingerprint and hash(one.fingerprint) == hash(two.fingerprint)
    two.check_inputs = "first"
    assert one.fingerprint == two.fingerprint
    two.enable_zero(stage=3)
    assert one.fingerprint != two.fingerprint
    one.enable_zero(stage=3)
    assert one.fingerprint == two.fingerprint
    one.set_memory_budget(2**30)
    assert one.fingerprint != two.fingerprint
    one.set_memory_budget(None)
    assert one.fingerprint == two.fingerprint
    two.enable_zero(stage=3, keep_gathered=True)
    assert one.fingerprint != two.fingerprint
    one.enable_zero(stage=3, keep_gathered=True)
    assert one.fingerprint == two.fingerprint
    one.set_input("x", sbp=gz.sbp.B)
    assert one.fingerprint != two.fingerprint


def test_repr_shows_what_was_chosen(config):
    config.enable_zero(stage=3, shard_min_size=100, keep_gathered=True)
    config.set_memory_budget(4096)
    config.set_input("x", sbp=gz.sbp.S(1))
    config.add_pass(torch.relu, after="pin")
    assert repr(config) == (
        "GraphConfig(zero=stage 3 over dp, shard_min_size=100, keep_gathered=True, memory_budget=4096, "
        "inputs=(x: S(1)), user_passes=(relu after pin))"
    )
