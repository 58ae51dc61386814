"""Names of nodes that are gone are free again, and a new node is then named as it would be in a copy of the graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from graphzero import _compat

NAMES = ("mul", "mul_1", "mul_3", "a_1_2", "_1", "x", "add_7", "len", "for", "a__2", "y_", "z_01", None)


def add(graph: fx.Graph, name: str | None) -> fx.Node:
    return _compat.add_node(graph, "call_function", torch.mul, (1, 2), {}, name)


@pytest.mark.parametrize("seed", range(50))
def test_new_names_are_those_of_a_copy(seed: int) -> None:
    draw = random.Random(seed)
    graph, copy = fx.Graph(), fx.Graph()
    nodes = [add(graph, draw.choice(NAMES)) for _ in range(draw.randrange(1, 40))]
    for node in nodes:
        if draw.random() < 0.4:
            graph.erase_node(node)
    for node in graph.nodes:
        copy.create_node(node.op, node.target, node.args, name=node.name)
    _compat.forget_names(graph)
    for name in draw.choices(NAMES, k=40):
        assert add(graph, name).name == add(copy, name).name


def test_a_node_that_was_given_the_name_of_another_changes_nothing_for_new_ones() -> None:
    graph = fx.Graph()
    first, second, gone = (add(graph, "mul") for _ in range(3))
    graph.erase_node(gone)
    second.name = first.name
    _compat.forget_names(graph)
    assert len({add(graph, "mul").name for _ in range(3)} - {first.name}) == 3
