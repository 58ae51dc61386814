"""Ctrl-C at any instruction of a call: afterwards all works, or is refused with the reason."""

import gc

import interrupts
import pytest
import torch
from interrupts import SAVED, WORKS, Subject, X, know_undisturbed, run_sweep
from torch import nn

import graphzero as gz
from graphzero import _compat
from graphzero.runtime.state.modules import replace_tensor, tensors


@pytest.mark.parametrize("name", [name for name in WORKS if name not in ("first step", "compile", "check")])
def test_an_interrupt_at_any_place_leaves_all_as_before_or_is_refused_until_a_load(name):
    assert not run_sweep(name, 12, 0)


def test_an_interrupted_capture_leaves_torch_as_it_was_and_the_same_call_works_then():
    assert not run_sweep("first step", 4, 0)


def test_an_interrupt_as_a_turn_is_taken_or_ends_leaves_it_free():
    """The places in which a process was broken for good, each of them."""
    know_undisturbed()
    subject = Subject(2)
    subject.step()
    places = interrupts.Places()
    found = interrupts.places_of(subject.step, places)
    names = (
        "call_lock.py",
        "consensus.py",
        "program_cache.py",
        "mutation_watch.py",
        "interrupts.py",
        "overrides.py",
        "steps.py",
    )
    numbers = {
        number
        for (code, _), numbers in places.found.items()
        for number in numbers[:1]
        if code.co_filename.endswith(names) or "_python_dispatch" in code.co_filename
    }
    assert numbers <= set(found) and len(numbers) > 50
    bad = [(at, end, where) for at in sorted(numbers)[::4] for end, where in [interrupts.trial("step", at)]
           if end not in ("worked", "refused", "unnoticed")]  # fmt: skip
    assert not bad


def test_a_scheduler_that_an_interrupt_keeps_from_stepping_is_refused_not_one_step_behind():
    know_undisturbed()
    subject = Subject(2)
    scheduler = subject.graph._source.schedulers[0]

    def interrupted():
        raise KeyboardInterrupt

    scheduler.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        subject.step()
    del scheduler.step
    with pytest.raises(gz.GraphZeroError, match="in the middle of its update"):
        subject.step()
    subject.graph.load_state_dict(SAVED[2])
    assert abs(subject.step() - interrupts.LOSSES[2]) < 1e-6


def test_a_signal_handlers_error_in_a_first_call_leaves_nothing_changed():
    """Out of memory, say, or the alarm of a time limit: any error, at a line of capture."""
    know_undisturbed()
    subject, original, calls = Subject(0), torch.Tensor.square, []
    before = interrupts.surroundings()

    def fails(x):
        calls.append(x)
        raise TimeoutError("too long")

    torch.Tensor.square = fails
    try:
        with pytest.raises(TimeoutError):
            subject.step()
    finally:
        torch.Tensor.square = original
    assert calls and gc.isenabled()
    assert interrupts.surroundings() == before
    assert abs(float(subject.graph(X)) - interrupts.LOSSES[0]) < 1e-6


def test_a_tensor_that_an_interrupt_meets_as_it_is_replaced_stands_everywhere_or_nowhere():
    def made():
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers[1].weight = layers[0].weight  # a tie
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        layers(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found = tensors({"model": layers})["model.0.weight"]
        new = found.tensor.detach().clone()
        work = _compat.cpu_by_default(lambda: replace_tensor(found, new, [optimizer]))
        return layers, optimizer, work, found.tensor, new.clone()

    places = interrupts.places_of(made()[2])
    assert len(places) > 20
    for at in places:
        layers, optimizer, work, old, new = made()
        error, where = interrupts.interrupted(work, at)
        now, other = layers[0].weight, layers[1].weight
        assert now is other and now.equal(new), where
        assert any(p is now for p in optimizer.param_groups[0]["params"]), where
        assert "momentum_buffer" in optimizer.state[now], where
        assert now is old or old not in optimizer.state, where
