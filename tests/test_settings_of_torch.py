"""Settings of torch that are the user's do not change what a Graph computes, and are as they were afterwards."""

from contextlib import nullcontext

import pytest
import torch
from graphs import TrainGraph
from torch import nn

import graphzero as gz


def shifted_loss(model, x):
    """Of a tensor that the step makes itself."""
    return (model(x) + torch.arange(2)).pow(2).mean()


def dropout_graph(kind=TrainGraph):
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    return kind(model, shifted_loss, torch.optim.AdamW(model.parameters(), lr=0.1), clip=1.0, stage=2)


AROUND = {
    "meta": lambda: torch.device("meta"),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", AROUND)
def test_steps_and_states_are_those_without_the_setting(name):
    x = torch.randn(4, 4)
    plain = dropout_graph()
    expected = [plain(x) for _ in range(3)], plain.full_state_dict()["modules"]["model"]
    with AROUND[name]():
        graph = dropout_graph()
        found = [graph(x) for _ in range(2)]
        saved = graph.full_state_dict()
        graph.load_state_dict(saved)
        found.append(graph.compile(x)(x))
        saved = graph.full_state_dict()
        assert "graph" in repr(graph)
        assert gz.check(graph, x)
        gz.parse(str(graph.program))
    assert torch.equal(torch.stack(found), torch.stack(expected[0]))
    assert all(torch.equal(saved["modules"]["model"][key], held) for key, held in expected[1].items())


def test_the_default_device_stays_what_it_was():
    torch.set_default_device("meta")
    try:
        dropout_graph()(torch.randn(4, 4, device="cpu"))
        assert torch.get_default_device().type == "meta"
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("inside", [False, True])
def test_anomaly_mode_stays_what_it_was_also_if_build_sets_it(inside):
    class Sets(TrainGraph):
        def build(self, x):
            with torch.autograd.detect_anomaly(check_nan=False) if inside else nullcontext():
                return super().build(x)

    with pytest.warns(UserWarning, match="Anomaly") if inside else nullcontext():
        dropout_graph(Sets).compile(torch.randn(4, 4))
    assert not torch.is_anomaly_enabled()


def test_build_may_not_set_the_default_device():
    class Sets(TrainGraph):
        def build(self, x):
            torch.set_default_device("cpu")
            return super().build(x)

    with pytest.raises(gz.CaptureError, match=r"sets torch's default device(.|\n)*test_settings_of_torch.py"):
        dropout_graph(Sets).compile(torch.randn(4, 4))
