"""What importing graphzero loads, each in a fresh process: nothing but what its next step needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# What only tracing needs: each costs tens of megabytes, and torch itself loads it when something is traced.
TRACING = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd")
SYMBOLIC = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor")

PLACES = {
    "the package": ("import graphzero", (*TRACING, *SYMBOLIC)),
    "its errors": ("from graphzero import GraphZeroError, errors", (*TRACING, *SYMBOLIC)),
    "a Graph": ("import graphzero; graphzero.Graph; graphzero.placement", TRACING),
    "a program and what runs it": (
        "from graphzero import parse; from graphzero.runtime.execute.executor import Executor",
        (*TRACING, "graphzero.capture", "graphzero.passes", "graphzero.plan", "graphzero.graph"),
    ),
}
FIRST_CALL = """
import graphzero as gz
class Train(gz.Graph):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 2)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss
Train()(torch.ones(2, 2))
"""
UNUSED = (
    "graphzero.testing",
    "graphzero.plugins.calibrate",
    "graphzero.plugins.explain",
    "graphzero.cli",
    "graphzero.plugins.check",
)


def loaded_by(statement: str) -> set[str]:
    """The modules that ``statement`` loads beyond those of ``import torch``."""
    show = "print(json.dumps([*set(sys.modules) - before]))"
    program = f"import json, sys, torch\nbefore = set(sys.modules)\n{statement}\n{show}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_importing_loads_nothing_that_it_does_not_need(place: str) -> None:
    statement, absent = PLACES[place]
    found = loaded_by(statement)
    assert "graphzero" in found
    assert not found & {*absent, *UNUSED}


def test_the_package_alone_loads_itself_only() -> None:
    assert {name for name in loaded_by("import graphzero") if name.partition(".")[0] != "importlib"} == {"graphzero"}


@pytest.mark.slow
def test_a_first_call_loads_nothing_of_export_and_aot_autograd() -> None:
    found = loaded_by(FIRST_CALL)
    assert "torch._dynamo" in found  # with which torch's own optimizers come
    assert not found & {"torch.export._trace", "torch._functorch.aot_autograd", "networkx", *UNUSED}
