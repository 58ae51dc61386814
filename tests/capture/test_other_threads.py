"""Another thread that uses the modules while a step is captured sees the real ones."""

import copy
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program
from torch import nn

from graphzero.errors import CaptureError


class Both:
    """Runs ``work`` over and over in a thread while the body runs; ``found`` is what it returned or raised."""

    def __init__(self, work):
        self.work, self.found, self.ends = work, [], False
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.ends:
            try:
                self.found.append(self.work())
            except Exception as error:
                self.found.append(error)

    def __enter__(self):
        self.thread.start()
        while not self.found:
            time.sleep(0.001)
        return self

    def __exit__(self, *error):
        self.ends = True
        self.thread.join()


def slow(self, x):
    loss = self.model(x).pow(2).mean()
    time.sleep(0.05)  # others come to run meanwhile
    loss.backward()
    time.sleep(0.05)
    return loss


@pytest.mark.same_kernels
@pytest.mark.parametrize("reads", ["calls", "states", "parameters"])
def test_a_thread_that_uses_the_modules_gets_real_tensors_throughout(reads):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
    x = torch.randn(6, 8)
    expected, weights = model(x).detach(), [p.detach().clone() for p in model.parameters()]

    def work():
        if reads == "calls":
            with torch.no_grad():
                return [model(x)]
        return list(model.state_dict().values()) if reads == "states" else [p.detach() for p in model.parameters()]

    owner = Owner(slow, model=model)
    with Both(work) as both:
        for _ in range(3):
            Program(owner, [torch.optim.SGD(model.parameters(), lr=0.1)], (x,))
    assert len(both.found) > 3
    for found in both.found:
        assert isinstance(found, list), found
        assert all(type(tensor.detach()) is torch.Tensor for tensor in found)
        if reads == "calls":
            assert torch.equal(found[0], expected)
        if reads == "parameters":
            assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


READS = {
    "state_dict": ("_save_to_state_dict", lambda layer: layer.state_dict().values()),
    "parameters": ("named_parameters", lambda layer: [p.detach() for p in layer.parameters()]),
    "members": ("_named_members", lambda layer: [p.detach() for p in layer.parameters()]),
    "attribute": ("__getattr__", lambda layer: [layer.weight.detach()]),
    "copy": ("_reconstruct", lambda layer: [p.detach() for p in copy.deepcopy(layer).parameters()]),
}


@pytest.mark.parametrize("name", READS)
def test_a_thread_that_is_put_to_sleep_while_it_reads_a_module_goes_on_with_real_tensors(name):
    """As one is whose core is taken away, for as long as it is."""
    function, read = READS[name]
    inside, traced, found = threading.Event(), threading.Event(), []

    def sleep(frame, event, arg):
        if frame.f_code.co_name == function:
            inside.set()
            traced.wait(30)

    def reader():
        sys.settrace(sleep)
        found.extend(read(model[0]))

    def build(self, x):
        traced.set()
        time.sleep(0.2)
        return self.model(x)

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    expected = [x.detach().clone() for x in read(model[0])]
    thread = threading.Thread(target=reader)
    thread.start()
    assert inside.wait(30)
    Program(Owner(build, model=model), [], (torch.randn(6, 8),))
    thread.join(30)
    assert len(found) == len(expected)
    assert all(type(x) is torch.Tensor and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_build_registers_and_what_it_copies_are_as_without_other_threads():
    def build(self, x):
        twin = copy.deepcopy(self.model)
        assert type(twin._parameters) is dict
        return self.model(x) + twin(x)

    model = nn.Linear(8, 4)
    registers = model._parameters, model._buffers
    with Both(lambda: None):
        Program(Owner(build, model=model), [], (torch.randn(6, 8),))
    assert model._parameters is registers[0] and model._buffers is registers[1]
    assert type(model.weight) is nn.Parameter


def test_functions_of_torch_are_those_of_torch_in_other_threads():
    q = torch.randn(2, 3, 4, 8)
    expected = F.scaled_dot_product_attention(q, q, q)
    probe = nn.Linear(4, 4)

    def work():
        torch.manual_seed(3)
        probe.zero_grad()
        probe(torch.ones(1, 4)).sum().backward()
        F.dropout(torch.ones(8), 0.5)
        return [F.scaled_dot_product_attention(q, q, q), probe.weight.grad]

    with Both(work) as both:
        for _ in range(3):
            owner = Owner(slow, model=nn.Linear(8, 4))
            Program(owner, [torch.optim.SGD(owner.model.parameters(), lr=0.1)], (torch.randn(6, 8),))
    for found in both.found:
        assert isinstance(found, list), found
        torch.testing.assert_close(found[0], expected)
        assert torch.equal(found[1], torch.ones(4, 4))


def test_steps_that_two_threads_capture_at_once_are_those_of_one():
    def text():
        torch.manual_seed(0)
        owner = Owner(slow, model=nn.Linear(8, 4))
        return str(Program(owner, [torch.optim.SGD(owner.model.parameters(), lr=0.1)], (torch.ones(6, 8),)).graph)

    expected = text()
    with Both(text) as both:
        found = [text() for _ in range(3)]
    assert {*found, *both.found} == {expected}
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_thread_that_build_waits_for_is_told_why_it_does_not_go_on(monkeypatch):
    monkeypatch.setattr("graphzero.capture.trace.other_threads._LONGEST", 0.1)
    asked, answered, answers = threading.Event(), threading.Event(), []
    model = nn.Linear(8, 4)

    def serve():
        asked.wait()
        try:
            answers.append(model.weight)
        except CaptureError as error:
            answers.append(error)
        answered.set()

    def build(self, x):
        asked.set()
        answered.wait(10)
        return self.model(x)

    server = threading.Thread(target=serve, name="server")
    server.start()
    Program(Owner(build, model=model), [], (torch.randn(6, 8),))
    server.join()
    assert "a Linear is used in the thread 'server'" in str(answers[0])
