"""A call is read once, and whoever else looks at a step is given that record."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.ir.value import Role
from graphzero.runtime.state import partial_update
from graphzero.step.build_inputs import BuildInputReader


class ScaledGraph(gz.Graph):
    def __init__(self, stage: int = 3) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.add_optimizer(self.optimizer)
        self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        loss = (self.model(x) * scale).square().mean()
        loss.backward()
        return loss


X = torch.ones(6, 4)


def prepared(graph: gz.Graph, *args: object, alone: bool = False):
    with graph.prepared_call("a test", args, {}, alone) as found:
        return found


def test_arguments_are_read_once_whether_a_call_compiles_binds_or_does_neither(monkeypatch):
    read, seen = BuildInputReader.read_inputs, []
    monkeypatch.setattr(BuildInputReader, "read_inputs", lambda *args: seen.append(args) or read(*args))
    graph = ScaledGraph()
    for calls in (1, 2, 3):
        graph(X, 0.5)
        assert len(seen) == calls
    graph.compile(X[:2], 0.5)
    assert len(seen) == 4


def test_the_record_says_what_selects_the_program_and_what_it_is_fed():
    graph = ScaledGraph()
    graph(X, 0.5)
    graph.optimizer.param_groups[0]["lr"] = 0.25
    call = prepared(graph, X, 1.5).call
    assert [(leaf.name, leaf.shape) for leaf in call.inputs.leaves] == [("x", (6, 4)), ("scale", None)]
    assert call.numbers[Role("scalar", "scale")] == 1.5
    assert call.numbers[Role("hyper", "optimizer0.group0", "lr")] == 0.25
    assert call.settings is graph.config.settings and not call.is_global
    assert prepared(graph, X, 2.5).call.key is call.key
    assert prepared(graph, X[:2], 2.5).call.key != call.key


def test_a_prepared_call_is_not_taken():
    graph, twin = ScaledGraph(), ScaledGraph()
    for _ in range(2):
        assert torch.equal(graph(X, 0.5), twin(X, 0.5))
        before = graph.full_state_dict()
        program = prepared(graph, X, 0.5).program
        after = graph.full_state_dict()
        torch.testing.assert_close(after["modules"], before["modules"], rtol=0, atol=0)
        torch.testing.assert_close(after["optimizers"][0]["state"], before["optimizers"][0]["state"], rtol=0, atol=0)
        assert program.graph is graph.program


def test_what_has_never_run_is_not_recalled():
    graph = ScaledGraph()
    graph.compile(X, 0.5)
    with pytest.raises(gz.ConfigError, match="ScaledGraph has not run yet: call it once"):
        prepared(graph, X, 0.5, alone=True)
    graph(X, 0.5)
    assert prepared(graph, X, 0.5, alone=True).program.graph is graph.program
    with pytest.raises(gz.ConfigError, match="ScaledGraph has not run yet: call it once"):
        prepared(graph, X[:2], 0.5, alone=True)


def test_what_is_measured_is_the_call_with_these_arguments_whichever_was_last():
    graph = ScaledGraph(stage=2)
    graph(X[:2], 0.5)
    measured = gz.testing.measure_step(graph, X[:2], 0.5)
    graph(X, 0.5)
    again = gz.testing.measure_step(graph, X[:2], 0.5)
    assert measured.timeline and again.timeline == measured.timeline
    graph(X, 0.5)
    assert gz.testing.profile_step(graph, X[:2], 0.5).seconds


def test_a_split_tensor_of_the_shape_of_a_plain_share_is_not_taken_for_a_larger_one():
    with gz.testing.fake_world(2):
        placement = gz.placement("cpu", range(2))
        reader = BuildInputReader(lambda x: x, placement)
        whole = gz.to_global(torch.zeros(2, 3), placement=placement, sbp=gz.sbp.S(0))
        for x, shape in ((torch.zeros(4, 3), (8, 3)), (whole, (4, 3)), (torch.zeros(4, 3), (8, 3))):
            (leaf,) = reader.read_inputs((x,), {}, {}).leaves
            assert tuple(x.shape) == (4, 3) and leaf.shape == shape and leaf.nd == (gz.sbp.S(0),)


class FirstOfMany(gz.Graph):
    """Trains one of many layers; the optimizer has all parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))
        self.add_optimizer(torch.optim.AdamW(self.layers.parameters()))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layers[0](x).mean()
        loss.backward()
        return loss


def python_calls(graph: gz.Graph, x: torch.Tensor) -> Counter[str]:
    """How often each Python function is called by one call of ``graph``."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([frame.f_code.co_name] if event == "call" else []))
    try:
        graph(x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
def test_a_call_runs_no_python_function_per_parameter(monkeypatch):
    monkeypatch.setattr(partial_update, "_marks", {})  # other tests may have left some, and then each call looks at all
    x, found = torch.zeros(2, 1), []
    for layers in (4, 32):
        graph = FirstOfMany(layers)
        for _ in range(3):
            graph(x)
        found.append(python_calls(graph, x))
    assert found[0] == found[1] and found[0]["build"] == 0 < found[0].total()
