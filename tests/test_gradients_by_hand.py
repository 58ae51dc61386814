"""Gradients that build makes otherwise than by ``loss.backward()`` train as in plain PyTorch, at every stage."""

import collections
import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad as imported_grad

import graphzero as gz

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def loss_of(self, x, y):
    return F.cross_entropy(self.model(x), y)


def put(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def backward(self, x, y):
    loss = loss_of(self, x, y)
    loss.backward()
    return loss


def by_hand(self, x, y):
    loss = loss_of(self, x, y)
    params = list(self.model.parameters())
    put(params, torch.autograd.grad(loss, params))
    return loss


def of_the_optimizer(self, x, y):
    self.optimizer.zero_grad()
    loss = loss_of(self, x, y)
    params = [p for group in self.optimizer.param_groups for p in group["params"]]
    put(params, imported_grad(loss, params))
    return loss


def added_up(self, x, y):
    for rows, labels in zip(x.split(4), y.split(4), strict=True):
        loss = loss_of(self, rows, labels)
        params = list(self.model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad / 2 if param.grad is None else param.grad + grad / 2
    return loss


def one_by_one(self, x, y):
    loss = loss_of(self, x, y)
    for param in self.model.parameters():
        (param.grad,) = torch.autograd.grad(loss, [param], retain_graph=True)
    return loss


def second_order(self, x, y):
    loss = loss_of(self, x, y)
    params = list(self.model.parameters())
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    put(params, torch.autograd.grad(loss + sum(s.square().sum() for s in slopes), params))
    return loss


def functional(self, x, y):
    params = dict(self.model.named_parameters())

    def loss(values):
        return F.cross_entropy(torch.func.functional_call(self.model, values, (x,)), y)

    grads, value = torch.func.grad_and_value(loss)({name: p.detach() for name, p in params.items()})
    put(params.values(), grads.values())
    return value


def signs(self, x, y):
    loss = by_hand(self, x, y)
    for param in self.model.parameters():
        param.grad.sign_().mul_(0.5)
    return loss


def some(self, x, y):
    loss = loss_of(self, x, y)
    (self.model[0].weight.grad,) = torch.autograd.grad(loss, self.model[0].weight)
    return loss


def and_backward(self, x, y):
    loss = loss_of(self, x, y)
    (slope,) = torch.autograd.grad(loss, self.model[2].weight, retain_graph=True)
    loss = loss + 0.1 * self.model(x).square().mean() * slope.norm()
    loss.backward()
    return loss


def of_each_row(self, x, y):
    losses = F.cross_entropy(self.model(x), y, reduction="none")
    losses.backward(torch.arange(8, dtype=x.dtype) / 36)
    return losses


def of_each_score(self, x, y):
    scores = self.model(x)
    scores.backward(scores.detach().softmax(1) - F.one_hot(y, 3))
    return scores


def of_several(self, x, y):
    scores = self.model(x)
    tensors = [scores, scores.square().mean()]
    torch.autograd.backward(tensors, [torch.full_like(scores, 0.1), None])
    return scores


def of_an_input(self, x, y):
    x.requires_grad_()
    out = self.model(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    loss = F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss


def returned(self, x, y):
    x.requires_grad = True
    loss = loss_of(self, x, y)
    loss.backward()
    return loss, x.grad


WAYS = [by_hand, of_the_optimizer, added_up, one_by_one, second_order, functional, signs, some, and_backward]
WAYS += [of_each_row, of_each_score, of_several, of_an_input, returned]


def make(build, ranks=2, stage=0, **options):
    class Step(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(ranks), virtual=True))
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, eps=1e-3)
            self.add_optimizer(self.optimizer, **options)
            if stage:
                self.config.enable_zero(stage=stage)

    Step.build = build
    return Step()


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
@pytest.mark.parametrize(
    ("build", "stage"),
    [*((way, stage) for way in WAYS for stage in (0, 3)), *((by_hand, n) for n in (1, 2)), (of_each_row, 2)],
)
def test_gradients_train_as_in_plain_pytorch(build, stage):
    graph = make(build, stage=stage, clip_grad_norm=0.1)
    model = copy.deepcopy(graph.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    plain = types.SimpleNamespace(model=model, optimizer=optimizer)
    for _ in range(2):
        expected = build(plain, X.clone(), Y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(graph(X, Y), torch.utils._pytree.tree_map(torch.Tensor.detach, expected))
    torch.testing.assert_close(list(graph.model.parameters()), list(model.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_by_hand_are_the_program_that_backward_is(stage):
    def program(build):
        graph = make(build, stage=stage)
        graph(X, Y)
        nodes = [node for node in graph.program.nodes if node.op == "call_function"]
        return collections.Counter((str(node.target), node.meta["phase"], str(node.meta["sbp"])) for node in nodes)

    assert program(by_hand) == program(backward)


def refused(graph, *words):
    with pytest.raises(gz.CaptureError) as caught:
        graph(X, Y)
    for word in (*words, "test_gradients_by_hand.py:"):
        assert word in str(caught.value)


def test_gradients_that_no_optimizer_reads_are_refused():
    graph = make(by_hand)
    graph._source.optimizers.clear()
    refused(graph, "puts gradients into p.grad", "no optimizer", "add_optimizer")


def test_a_gradient_of_another_shape_than_the_tensor_is_refused():
    def build(self, x, y):
        self.model(x).backward(torch.ones(3, dtype=x.dtype))

    refused(make(build), "[8, 3]", "[3]", "ones_like")


def test_several_numbers_without_gradients_are_refused():
    refused(make(lambda self, x, y: self.model(x).backward()), "not on one number", "backward(gradient)")


def test_an_input_that_requires_grad_is_told_how_build_takes_its_gradient():
    with pytest.raises(gz.CaptureError, match=r"requires grad.*x.requires_grad_\(\) in build"):
        make(backward)(X.clone().requires_grad_(), Y)
