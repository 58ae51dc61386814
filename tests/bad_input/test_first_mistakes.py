"""What people try first who come from elsewhere: each error says what is meant here."""

from __future__ import annotations

import copy

import pytest
import torch
from test_short_errors import ONE, ClassifierGraph
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphzero as gz

BATCH = torch.ones(8, 4), torch.zeros(8).long()


def test_a_model_that_torch_compiles_is_to_be_given_as_it_is():
    with pytest.raises(gz.ConfigError, match=r'compiled by torch.compile.*_orig_mod.*set_executor\("inductor"\)'):
        ClassifierGraph(torch.compile(nn.Linear(4, 3)))
    with pytest.raises(gz.ConfigError, match="TorchScript.*give the Python module that it was made from"):
        ClassifierGraph(torch.jit.trace(nn.Linear(4, 3), BATCH[0]))


def test_a_model_that_fsdp2_splits_is_to_be_given_before_that():
    with gz.testing.fake_world(2):
        model = fully_shard(nn.Linear(4, 3))
        with pytest.raises(gz.ConfigError, match="split by fully_shard.*on which fully_shard was not called.*stage=3"):
            ClassifierGraph(model)
        for graph in (gz.Graph(), gz.Graph(ONE)):
            graph.model = nn.Sequential(model)
            graph.build = graph.model
            for take in (
                lambda graph: graph(BATCH[0]),
                lambda graph: graph.state_dict(),
                lambda graph: graph.full_state_dict(),
                lambda graph: graph.load_state_dict({}),
            ):
                with pytest.raises(gz.CaptureError, match=r"model\.0 is split by fully_shard"):
                    take(graph)


def test_a_graph_within_torch_compile_says_that_it_compiles_itself():
    graph = ClassifierGraph()
    with pytest.raises(gz.ConfigError, match="called inside of torch.compile, but it compiles its own step"):
        torch.compile(lambda: graph(*BATCH), backend="eager")()
    graph(*BATCH)


@pytest.mark.parametrize("name", ["train", "eval", "parameters", "to", "zero_grad"])
def test_what_modules_have_is_asked_of_the_modules(name):
    with pytest.raises(AttributeError, match=rf"a Graph is not a module: ask its modules, as graph\.model\.{name}"):
        getattr(ClassifierGraph(), name)


def test_an_unknown_argument_of_add_optimizer_is_answered_with_those_that_there_are():
    with pytest.raises(gz.ConfigError, match=r"no argument 'lr_scheduler'.*lr_sch= \(its scheduler\)"):
        ClassifierGraph(lr_scheduler=None)


def test_a_configuration_may_be_made_before_its_graph():
    config = gz.GraphConfig(ONE)
    config.enable_zero(stage=3)
    assert gz.GraphConfig().settings.zero.stage == 0 and config.settings.zero.stage == 3


@pytest.mark.parametrize("name", ["optim", "randn", "float32"])
def test_names_of_torch_are_answered_with_torchs(name):
    with pytest.raises(AttributeError, match=f"torch's own modules, optimizers and tensors: torch.{name}"):
        getattr(gz, name)
    assert not hasattr(gz, "no_such_name")
    with pytest.raises(AttributeError, match=r"modules are torch's own: torch\.nn\.Module"):
        gz.nn.Module  # noqa: B018


def test_a_batch_that_micro_batches_do_not_divide_is_told_what_a_call_takes():
    graph = ClassifierGraph()
    graph.config.set_gradient_accumulation_steps(4)
    with pytest.raises(gz.ConfigError, match="a call takes all micro-batches of a rank .*batch_per_rank"):
        graph(torch.ones(6, 4), torch.zeros(6).long())


def test_processes_that_do_not_know_of_each_other_do_not_train_by_themselves_unseen(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="mpirun counts 2 processes .*each trains by itself.*torchrun"):
        gz.Graph()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for placement in (None, gz.placement("cpu", [0])):
        with pytest.raises(gz.PlacementError, match="WORLD_SIZE=2, but RANK, MASTER_ADDR, MASTER_PORT are not set"):
            gz.Graph(placement)
    gz.Graph(ONE)


def test_a_model_made_in_inference_mode_is_refused_before_anything_is_written():
    with torch.inference_mode():
        model = nn.Linear(4, 3)
    before, graph = model.weight.tolist(), ClassifierGraph(model)
    for _ in range(2):
        with pytest.raises(gz.ConfigError, match=r"model.weight was made within torch.inference_mode\(\).*deepcopy"):
            graph(*BATCH)
    assert model.weight.tolist() == before
    ClassifierGraph(copy.deepcopy(model))(*BATCH)
