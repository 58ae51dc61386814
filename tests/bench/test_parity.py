"""A Graph on n ranks trains as plain PyTorch does in one process: a chosen part of bench/grid.py parity."""

import pytest
import torch
from _run import run_on_gloo
from layouts import LAYOUTS, STAGES, build_graph, train_eagerly, train_graph
from parity import STEPS, Trained, compare_trainings, have_same_bits


def trained(model: str, optimizer: str, stage: int, ranks: int, dtype: torch.dtype = torch.float64) -> Trained:
    graph = build_graph(model, LAYOUTS[f"dp{ranks}"], stage, True, optimizer, dtype, STEPS)
    found = train_graph(graph, model, dtype=dtype, steps=STEPS)
    apart = compare_trainings(found, train_eagerly(model, optimizer, dtype, STEPS))
    assert apart.within(dtype, optimizer), f"{model}, {optimizer}, stage {stage}, {ranks} ranks, {dtype}: {apart}"
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_mlp_on_four_virtual_ranks_trains_as_plain_pytorch_does(optimizer, stage):
    trained("mlp", optimizer, stage, ranks=4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_trains_alike_even_where_parameters_do_not_divide(ranks):
    trained("mlp", "adamw", stage=3, ranks=ranks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("stage", [0, 2])
def test_batch_norm_sees_the_whole_batch(stage, dtype):
    trained("convnet", "sgd", stage, ranks=3, dtype=dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_gpt2_with_its_tied_embedding_trains_as_plain_pytorch_does(stage):
    trained("gpt2", "adamw", stage, ranks=3)


@pytest.mark.parametrize("model", ["mlp", pytest.param("convnet", marks=pytest.mark.slow)])
def test_all_stages_give_the_same_bits(model):
    runs = [trained(model, "adamw", stage, ranks=3, dtype=torch.float32) for stage in STAGES]
    assert all(have_same_bits(run, runs[0]) for run in runs[1:])


@pytest.mark.parametrize(("model", "stage"), [("gru", 1), ("encoder", 2), ("vit", 3)])
def test_other_kinds_of_networks_train_as_plain_pytorch_does(model, stage):
    trained(model, "adamw", stage, ranks=2)


def test_a_recurrent_layer_stays_split_in_float32_where_torch_has_one_op_for_it():
    trained("lstm", "sgd", stage=3, ranks=2, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lstm", "encoder", "bert", "vit", "t5"])
def test_other_kinds_of_networks_give_the_same_bits_at_all_stages(model):
    runs = [trained(model, "sgd", stage, ranks=3, dtype=torch.float32) for stage in (0, 3)]
    assert all(have_same_bits(run, runs[0]) for run in runs[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer", "dtype"),
    [
        ("gpt2", "adamw", torch.float32),
        ("gpt2", "sgd", torch.float64),
        ("llama", "adamw", torch.float64),
        ("llama", "sgd", torch.float32),
    ],
)
def test_transformers_give_the_same_bits_at_all_stages(model, optimizer, dtype):
    runs = [trained(model, optimizer, stage, ranks=4, dtype=dtype) for stage in STAGES]
    assert all(have_same_bits(run, runs[0]) for run in runs[1:])


CELLS = [(model, stage) for model in ("convnet", "gpt2") for stage in (0, 3)]


@pytest.mark.slow
def test_gloo_processes_train_as_virtual_ranks_do():
    for (model, stage), found in zip(CELLS, run_on_gloo(2, on_rank), strict=True):
        virtual = trained(model, "adamw", stage, ranks=2)
        assert have_same_bits(found, virtual), f"{model}, stage {stage}: {compare_trainings(found, virtual)}"


def on_rank(rank: int) -> list[Trained]:
    graphs = [(model, build_graph(model, LAYOUTS["dp2"], stage, virtual=False, steps=STEPS)) for model, stage in CELLS]
    return [train_graph(graph, model, 2, rank, steps=STEPS) for model, graph in graphs]


def test_a_difference_beyond_the_limits_is_seen():
    wanted, how = train_eagerly("mlp", "sgd"), (torch.float64, "sgd")
    off = Trained([loss * (1 + 2e-6) for loss in wanted.losses], wanted.tensors)
    assert not compare_trainings(off, wanted).within(*how)
    moved = {name: x + 3e-6 for name, x in wanted.tensors.items()}
    assert not compare_trainings(Trained(wanted.losses, moved), wanted).within(*how)
    assert not have_same_bits(off, wanted)
