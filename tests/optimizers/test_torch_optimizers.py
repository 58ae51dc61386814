"""Every optimizer of torch that can be a graph, and some of users' kinds: as plain PyTorch at every stage.

A run: hyperparameters change on the way, the graph is saved and goes on in a fresh one at another stage, and in the end
plain PyTorch goes on from the graph's full state.
"""

import copy

import pytest
import torch
from optimizer_reference import Copies, D, GlobalNorm, Lamb, Toy, batch, change, distance, eager_step, mse_graph

o = torch.optim
EXACT = 1e-12
# Where eager rounds to float32 on its way, as a 0-d tensor of that dtype takes part, and the graph does not.
SINGLE, RATE = 5e-8, 5e-7


def one(kind, **arguments):
    return lambda model: [kind(model.parameters(), **arguments)]


def grouped(kind, **arguments):
    """Two groups, the second with a rate of its own."""

    def make(model):
        first, *rest = model.parameters()
        return [kind([{"params": [first]}, {"params": rest, "lr": 0.003}], **arguments)]

    return make


def muon(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [o.Muon(matrices, lr=0.02), o.AdamW([p for p in model.parameters() if p.ndim != 2], weight_decay=0.0)]


CASES = {
    "sgd": (one(o.SGD, lr=0.1), EXACT),
    "sgd momentum": (one(o.SGD, lr=0.1, momentum=0.9), EXACT),
    "sgd nesterov": (one(o.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), EXACT),
    "sgd dampening": (one(o.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1), EXACT),
    "sgd maximize": (one(o.SGD, lr=0.01, momentum=0.9, maximize=True), EXACT),
    "sgd tensor lr": (one(o.SGD, lr=torch.tensor(0.1), momentum=0.9), EXACT),
    "adam": (grouped(o.Adam, lr=0.01), EXACT),
    "adam amsgrad": (one(o.Adam, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1), EXACT),
    "adamw": (one(o.AdamW, lr=0.01, weight_decay=0.0), EXACT),
    "adamw amsgrad": (one(o.AdamW, lr=torch.tensor(0.01, dtype=D), amsgrad=True), EXACT),
    "adamw float32 lr": (one(o.AdamW, lr=torch.tensor(0.01)), RATE),
    "nadam": (one(o.NAdam, lr=0.01), SINGLE),
    "nadam decoupled": (one(o.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), SINGLE),
    "radam": (one(o.RAdam, lr=0.01), EXACT),
    "radam decoupled": (one(o.RAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True), EXACT),
    "adamax": (one(o.Adamax, lr=0.01), EXACT),
    "adagrad": (one(o.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.3), EXACT),
    "adadelta": (one(o.Adadelta, lr=0.5), EXACT),
    "asgd": (one(o.ASGD, lr=0.05, t0=2), EXACT),
    "rmsprop": (one(o.RMSprop, lr=0.01), EXACT),
    "rmsprop centered": (one(o.RMSprop, lr=0.01, centered=True, momentum=0.9), EXACT),
    "rprop": (one(o.Rprop, lr=0.01), EXACT),
    "muon": (muon, EXACT),
    "adafactor": (one(o.Adafactor, lr=0.8, eps=(None, 0.3), weight_decay=0.1), EXACT),
    "norm of each": (one(Lamb), EXACT),
    "norm of all": (one(GlobalNorm), EXACT),
    "copies": (one(Copies), SINGLE),
}
STAGES = ((0, 2), (3, 1))  # at which a run begins, and goes on
FAST = {
    "sgd dampening": (3, 1), "adam": (0, 2), "nadam": (0, 2), "radam": (3, 1), "asgd": (0, 2), "rprop": (0, 2),
    "muon": (0, 2), "adafactor": (3, 1), "norm of all": (3, 1),
}  # fmt: skip


def train(model, optimizers, stages, make, limit):
    eager = copy.deepcopy(model)
    others = make(eager)
    graph = mse_graph(model, optimizers, stages[0])
    for step in range(7):
        if step == 2:
            change(optimizers)
            change(others)
        if step == 4:
            saved = copy.deepcopy(graph.state_dict())
            model = Toy(seed=9)
            optimizers = make(model)
            graph = mse_graph(model, optimizers, stages[1])
            graph.load_state_dict(saved)
        loss = graph(*batch(step))
        torch.testing.assert_close(loss, eager_step(eager, others, step), atol=limit, rtol=0)
        assert distance(model, optimizers, eager, others) <= limit, f"step {step}"
    full = copy.deepcopy(graph.full_state_dict())
    model = Toy(seed=9)
    optimizers = make(model)
    model.load_state_dict(full["modules"]["model"])
    for optimizer, entry in zip(optimizers, full["optimizers"], strict=True):
        optimizer.load_state_dict(entry)
    for other in others:  # torch's own loading turns some states to the parameter's dtype
        other.load_state_dict(other.state_dict())
    for step in range(7, 9):
        eager_step(model, optimizers, step)
        eager_step(eager, others, step)
    assert distance(model, optimizers, eager, others) <= limit


def every_case():
    """All optimizers on split states, and those that differ most in kind at all stages, of which one run is fast."""
    for name in CASES:
        for stages in STAGES if name in FAST else STAGES[1:]:
            marks = [] if FAST.get(name) == stages else [pytest.mark.slow]
            yield pytest.param(name, stages, marks=marks, id=f"{name}-{stages[0]} then {stages[1]}")


@pytest.mark.parametrize(("name", "stages"), list(every_case()))
def test_it_steps_as_plain_pytorch_through_changes_and_checkpoints(name, stages):
    make, limit = CASES[name]
    model = Toy()
    train(model, make(model), stages, make, limit)
