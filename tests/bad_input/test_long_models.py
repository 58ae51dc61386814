"""Errors about a model of 48 layers stay short and show the place."""

import copy

import pytest
import torch
from torch import nn
from wrong import says

import graphzero as gz
from graphzero.sbp.types import P

LAYERS = 48


class Deep(nn.Module):
    def __init__(self, middle=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.middle = middle

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == LAYERS // 2 and self.middle is not None:
                x = self.middle(x)
        return x


def deep(middle=None):
    class Step(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(4), virtual=True))
            self.model = Deep(middle)
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
            self.config.enable_zero()

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    return Step()


X = torch.randn(8, 4)


def looks(x):
    return x * float(x.sum())


def test_at_capture():
    with says(gz.CaptureError, "test_long_models.py:", "in looks", "called from"):
        deep(looks).compile(X)
    with says(gz.CaptureError, "[8, 4] X [3, 3]", "test_long_models.py:"):
        deep(nn.Sequential(nn.Linear(3, 3, bias=False))).compile(X)


def test_at_verification():
    step = deep()

    def every_tanh_partial(graph):
        for node in graph.nodes:
            if "tanh" in node.name:
                node.meta["sbp"] = (P,)
        return graph

    step.config.add_pass(every_tanh_partial, after="insert_boxing")
    with says(gz.VerifyError, "after pass every_tanh_partial", "test_long_models.py:", "tanh allows"):
        step.compile(X)


def test_at_pins():
    with says(gz.SbpError, "no dim 5", "test_long_models.py:"):
        deep(lambda x: gz.to_global(x, sbp=gz.sbp.S(5))).compile(X)


@pytest.fixture(scope="module")
def called():
    step = deep()
    step(X)
    return step


def test_at_a_state_dict_of_another_model(called):
    sd = copy.deepcopy(called.state_dict())
    sd["modules"]["model"] = {f"other.{key}": held for key, held in sd["modules"]["model"].items()}
    with says(gz.CheckpointError, "missing: modules.model.layers.0.weight", "and 90 more", "unexpected"):
        called.load_state_dict(sd)
    sd = copy.deepcopy(called.state_dict())
    sd["modules"]["model"] = {key: held[:1] for key, held in sd["modules"]["model"].items()}
    with says(gz.CheckpointError, "is [4, 4] here, [1, 4] in the state dict", "and 90 more"):
        called.load_state_dict(sd)


def test_at_parameters_that_get_no_gradient():
    step = deep()
    step.other = nn.Linear(4, 4)
    step.build = lambda x: step.other(x).sum().backward()
    with says(gz.CaptureError, "gets a gradient", "model.layers.0.weight", "and 88 more"):
        step.compile(X)


def test_at_an_optimizer_of_another_model():
    step = deep()
    step.model = Deep()
    with says(gz.ConfigError, "optimizer 0 (AdamW)", "float32[4, 4]", "self.model = model"):
        step.compile(X)


def test_unused_parameters_are_named_in_a_few_lines():
    step = deep()
    step.build = lambda x: step.model.layers[0](x).sum().backward()
    with pytest.warns(UserWarning, match="no gradient reaches .* and 74 more") as caught:
        step.compile(X)
    assert all(len(str(w.message)) < 1000 for w in caught)
