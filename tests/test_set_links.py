"""config.set_links: what it takes and refuses, that it makes a program of its own, and the seconds of a plan."""

import json

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.config import GraphConfig

FAST, SLOW = gz.Link(latency=1e-6, bandwidth=1e11), gz.Link(latency=2e-5, bandwidth=1e9)
BOTH = {"dp": SLOW, "tp": FAST}


def grid():
    return gz.placement("cpu", [[0, 1], [2, 3]], virtual=True)


def linear_graph() -> TrainGraph:
    model = nn.Linear(8, 4)
    return TrainGraph(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), placement=grid(), stage=3)


@pytest.fixture
def config():
    return GraphConfig(grid())


def test_links_are_kept_in_the_order_of_axes(config):
    config.set_links({"tp": FAST, "dp": SLOW})
    assert config.links == (SLOW, FAST)
    config.set_links(None)
    assert config.links == ()


def test_links_may_be_plain_numbers_or_the_file_that_was_measured(config, tmp_path):
    numbers = {name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in BOTH.items()}
    config.set_links(numbers)
    assert config.links == (SLOW, FAST)
    (tmp_path / "links.json").write_text(json.dumps({"links": numbers, "torch": "any"}))
    for path in (tmp_path / "links.json", str(tmp_path / "links.json")):
        config.set_links(None)
        config.set_links(path)
        assert config.links == (SLOW, FAST)


def test_an_axis_of_one_rank_needs_no_link():
    config = GraphConfig(gz.placement("cpu", [[0, 1]], virtual=True))
    config.set_links({"tp": FAST})
    assert config.links[1] == FAST


def test_links_are_part_of_the_configuration_to_the_last_digit(config):
    known = {config.fingerprint: config.description}
    for latency in (1e-5, 1e-5 + 1e-20, 2e-5):
        config.set_links(BOTH | {"dp": gz.Link(latency, 1e9)})
        known[config.fingerprint] = config.description
    assert len(known) == len(set(known.values())) == 4


WRONG = {
    "another axis": ({"dp": SLOW, "pp": FAST}, "no axis is called 'pp'"),
    "a part of the axes": ({"dp": SLOW}, "nothing is said of tp"),
    "a bare number": ({"dp": 1e9, "tp": FAST}, "dp is 1000000000.0"),
    "other words": ({"dp": {"alpha": 1, "beta": 2}, "tp": FAST}, "latency="),
    "a negative number": ({"dp": {"latency": -1, "bandwidth": 2}, "tp": FAST}, "dp: Link"),
    "links by place": ((SLOW, FAST), "for each placement axis"),
    "no file": ("nowhere.json", "graphzero calibrate"),
}


@pytest.mark.parametrize("name", WRONG)
def test_links_without_meaning_are_refused_and_change_nothing(config, name):
    given, word = WRONG[name]
    config.set_links(BOTH)
    with pytest.raises(gz.ConfigError, match=word):
        config.set_links(given)
    assert config.links == (SLOW, FAST)


@pytest.mark.parametrize(("text", "word"), [("{", "not JSON"), ("[1]", '"links"'), ('{"links": 3}', '"links"')])
def test_a_file_of_something_else_is_refused(config, tmp_path, text, word):
    (tmp_path / "links.json").write_text(text)
    with pytest.raises(gz.ConfigError, match=word):
        config.set_links(tmp_path / "links.json")


def test_a_change_of_links_compiles_anew_and_the_old_program_is_found_again():
    graph, x = linear_graph(), torch.ones(4, 8)
    first = graph.compile(x).program
    graph.config.set_links(BOTH)
    assert graph.compile(x).program is not first
    graph.config.set_links(None)
    assert graph.compile(x).program is first


def test_a_plan_tells_the_seconds_of_each_collective_and_of_all():
    graph, x = linear_graph(), torch.ones(4, 8)
    graph.config.set_links(BOTH)
    plan = graph.compile(x).plan
    of = {"dp": SLOW, "tp": FAST}
    assert plan.collectives
    for call in plan.collectives:
        assert call.seconds == of[call.axis].seconds(call.kind, call.bytes, ranks=2)
    assert plan.comm_seconds == pytest.approx(sum(call.seconds for call in plan.collectives))
    assert plan.to_dict()["comm_seconds"] == plan.comm_seconds
    total = next(line for line in str(plan).splitlines() if line.split()[:2] == ["total", str(len(plan.collectives))])
    assert total.endswith(f"{plan.comm_seconds * 1e6:.1f} us") and "alone" in str(plan)


def test_a_plan_without_links_says_nothing_of_seconds():
    plan = linear_graph().compile(torch.ones(4, 8)).plan
    assert plan.comm_seconds is None and all(call.seconds is None for call in plan.collectives)
    assert "alone" not in str(plan)
