"""Another thread that uses the modules while a step is captured sees the real ones."""

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
    monkeypatch.setattr("graphzero.capture.threads._LONGEST", 0.1)
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
