"""Names that are the Graph's own."""

import pytest
import torch
from torch import nn

import graphzero as gz


class Net(gz.Graph):
    def __init__(self) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(2, 2)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


OWN = {name for name in vars(Net()) if name.startswith("_")}


@pytest.mark.parametrize("name", sorted({"config", "placement", "program", "plan", *OWN}))
def test_what_a_graph_is_made_of_is_not_replaced_by_an_attribute_of_that_name(name: str) -> None:
    graph = Net()
    with pytest.raises(gz.ConfigError, match=f"self.{name} is the Graph's own .*another name"):
        setattr(graph, name, "mine")
    assert graph(torch.ones(2, 2)).shape == (2, 2)


def test_other_names_are_free_with_an_underscore_too() -> None:
    graph = Net()
    graph._data, graph.source = 1, 2
    assert (graph._data, graph.source) == (1, 2) and graph(torch.ones(2, 2)).shape == (2, 2)
