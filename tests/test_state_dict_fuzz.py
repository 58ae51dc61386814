"""Random mutations of a real state dict: it loads and means what it says, or is refused and nothing has changed."""

import copy
import math
import pickle
import random
from functools import cache
from typing import Any

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz


def batch_norm_graph() -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainGraph(
        model, mean_square, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), stage=2
    )


@cache
def saved_after(steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    """The state dict behind some steps on random batches, and the last loss."""
    graph = batch_norm_graph()
    losses = [graph(random_batch(step)) for step in range(steps)]
    return graph.full_state_dict(), losses[-1]


@cache
def trained_graph() -> TrainGraph:
    graph = batch_norm_graph()
    graph(torch.ones(8, 4))
    return graph


def random_batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


JUNK = (
    None, 3, -1, 2.5, math.nan, True, "text", b"x", [], [1, 2], (), {}, {"a": 1}, object(), torch.ones(3),
    torch.ones(2, 2), torch.tensor(1 + 2j), torch.tensor(True), torch.ones(3, device="meta"), torch.eye(3).to_sparse(),
)  # fmt: skip


def places(x, path=()):
    """Every (container, key) of nested dicts and lists, with its path."""
    keys = list(x) if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ()
    for key in keys:
        yield x, key, (*path, key)
        yield from places(x[key], (*path, key))


def mutate(sd, chance):
    """Change one thing; returns what was done."""
    held, key, path = chance.choice(list(places(sd)))
    how = chance.choice(["junk", "drop", "rename", "cast", "reshape", "twice"])
    if how == "junk" or (how in ("cast", "reshape") and not isinstance(held[key], torch.Tensor)):
        held[key] = chance.choice(JUNK)
    elif how == "drop":
        del held[key]
    elif how == "rename" and isinstance(held, dict):
        held[chance.choice(["odd", 7, None, f"{key}x"])] = held.pop(key)
    elif how == "cast":
        held[key] = held[key].to(chance.choice([torch.float64, torch.int32, torch.complex64, torch.bool]))
    elif how == "reshape":
        held[key] = chance.choice([held[key][None], held[key].flatten()[:-1], held[key].clone()])
    elif isinstance(held, list):
        held.append(held[key])
    else:
        held["again"] = held[key]
    return how, path


def equal(a, b):
    """Whether two leaves mean the same."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if b is None or isinstance(b, str):
            return False
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return a.shape == b.shape and torch.equal(
            a.to(torch.complex128).nan_to_num(9.5), b.to(torch.complex128).nan_to_num(9.5)
        )
    return a == b or (a != a and b != b)


def leaves(sd):
    return {path: held[key] for held, key, path in places(sd) if not isinstance(held[key], (dict, list))}


def assert_same(found, wanted, what):
    found, wanted = leaves(found), leaves(wanted)
    assert found.keys() == wanted.keys(), what
    for path, held in wanted.items():
        assert equal(found[path], held), f"{what}: {path} is {found[path]}, was {held}"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_state_dict_means_what_it_says_or_changes_nothing(seed, trained):
    chance = random.Random(seed)
    (good, _), graph = saved_after(2), batch_norm_graph()
    if trained:
        graph(torch.ones(8, 4))
    refused = 0
    for _ in range(150):
        wrong = copy.deepcopy(good)
        what = [mutate(wrong, chance) for _ in range(chance.choice([1, 1, 2]))]
        before = graph.full_state_dict()
        strict = chance.random() < 0.7
        try:
            graph.load_state_dict(wrong, strict=strict)
        except gz.CheckpointError as error:
            refused += 1
            assert "nothing was loaded" in str(error) and len(str(error)) < 4000, what
            assert_same(graph.full_state_dict(), before, what)
        else:
            now, given = leaves(graph.full_state_dict()), leaves(wrong)
            for path in (path for path in now.keys() & given.keys() if "params" not in path):
                assert equal(now[path], given[path]), f"{what}: {path} is {now[path]}, {given[path]} was given"
            if strict:
                there = {p for p in leaves(good) if p[0] == "modules" or "state" in p} - given.keys()
                absent = {p[3] for p in there if p[0] == "optimizers"} - {p[3] for p in given if "state" in p}
                there = {p for p in there if trained or p[0] == "modules" or p[3] not in absent}
                assert not there, f"{what}: taken although something is missing"
            if not trained:
                graph = batch_norm_graph()
    assert refused > 50
    graph.load_state_dict(good)
    assert_same(graph.full_state_dict(), good, "the state dict as it was")
    later, loss = saved_after(3)
    assert equal(graph(random_batch(2)), loss)
    assert_same(graph.full_state_dict(), later, "a step from there")


WRONG = {
    "a number for params": (lambda sd: sd["optimizers"][0]["param_groups"][0].update(params=3), "params is a int"),
    "no step": (lambda sd: sd["random"].update(step=None), "random.step is None"),
    "an unknown state": (
        lambda sd: sd["optimizers"][0]["state"]["model.0.bias"].update(odd=torch.ones(6)), "unexpected.*0.bias.odd"
    ),
    "no rate": (lambda sd: sd["optimizers"][0]["param_groups"][0].pop("lr"), "missing: optimizers.0.param_groups.0.lr"),
    "a text for a rate": (lambda sd: sd["optimizers"][0]["param_groups"][0].update(lr="x"), "lr is 0.0.* here, 'x' in"),
    "one beta": (lambda sd: sd["optimizers"][0]["param_groups"][0].update(betas=(0.9,)), "betas is"),
    "a scheduler's": (lambda sd: sd["schedulers"][0].update(last_epoch="3"), "schedulers.0.last_epoch is"),
    "no scheduler": (lambda sd: sd["schedulers"].__setitem__(0, None), "missing: schedulers.0"),
    "complex values": (
        lambda sd: sd["modules"]["model"].update({"0.bias": torch.ones(6) * 1j}), "0.bias is float32.*complex64"
    ),
    "another optimizer's": (
        lambda sd: sd["optimizers"][0].update(
            state={n: {"momentum_buffer": x["exp_avg"]} for n, x in sd["optimizers"][0]["state"].items()}
        ),
        "missing: .*exp_avg",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_wrong_is_named_by_its_path(what, trained):
    change, text = WRONG[what]
    graph, wrong = trained_graph() if trained else batch_norm_graph(), copy.deepcopy(saved_after(2)[0])
    change(wrong)
    before = graph.full_state_dict()
    with pytest.raises(gz.CheckpointError, match=text):
        graph.load_state_dict(wrong)
    assert_same(graph.full_state_dict(), before, what)


def test_a_graph_that_is_pickled_says_what_to_save():
    with pytest.raises(gz.ConfigError, match="state_dict"):
        pickle.dumps(batch_norm_graph())
