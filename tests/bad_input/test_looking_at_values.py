"""A build that looks at values, or makes shapes of them, is refused at its line; what needs no value works."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from wrong import X, Y, make, refused, train

import graphzero as gz

HERE = "test_looking_at_values.py:"


def swallowed(self, x):
    try:
        return float(x.sum())
    except Exception:
        return 1.0


LOOKS = {
    "float": lambda self, x: float(self.model.weight.sum()),
    "if": lambda self, x: 1 if x.sum() > 0 else 2,
    "assert": lambda self, x: all(torch.isfinite(x).all() for _ in range(1)),
    "for": lambda self, x: max(v for v in x[:, 0]),
    "index": lambda self, x: [1, 2, 3][x[0, 0].long()],
    "range": lambda self, x: list(range(x[0, 0].long())),
    "in": lambda self, x: 1 in x,
    "numpy": lambda self, x: x.numpy(),
    "asarray": lambda self, x: np.asarray(x),
    "tensor of tensors": lambda self, x: torch.tensor([x.sum(), x.sum()]),
    "index of tensors": lambda self, x: x[tuple(x[:2, 0].long()), tuple(x[:2, 1].long())],
    "write to an index of tensors": lambda self, x: x.clone().__setitem__((tuple(x[:2, 0].long()),), 0.0),
    "log of a number": lambda self, x: logging.getLogger("graphzero.tests").warning("x is %.3f", x.sum()),
    "caught by the user": swallowed,
    "one_hot": lambda self, x: F.one_hot(x[:, 0].long()),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_build_that_looks_at_a_value_is_refused_at_its_line(name):
    def build(self, x, y):
        LOOKS[name](self, x)
        return train(self, x, y)

    refused(make(build), gz.CaptureError, "build reads a value", HERE, "torch.where", "outside")


def test_it_is_refused_under_a_mode_of_the_users_too():
    class Passing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def build(self, x, y):
        LOOKS["index of tensors"](self, x)
        return train(self, x, y)

    with Passing():
        refused(make(build), gz.CaptureError, "a tensor made from the values of others", HERE)


def test_len_shape_device_and_rows_of_a_tensor_are_no_values():
    def build(self, x, y):
        rows = torch.stack([self.model(row) for row in x])
        assert len(x) == x.shape[0] and not x.is_cuda
        loss = self.loss_fn(rows + torch.zeros(3, device=x.device), y)
        loss.backward()
        return loss

    graph = make(build)
    expected = F.cross_entropy(graph.model(X), Y).detach()
    torch.testing.assert_close(graph(X, Y), expected)


# ---- shapes that are data

SHAPES = {
    "boolean mask": lambda x, y: x[y > 0] * 2,
    "masked_select": lambda x, y: torch.masked_select(x, x > 0),
    "nonzero": lambda x, y: torch.where(y > 0),
    "unique": lambda x, y: torch.unique(y),
    "repeat_interleave": lambda x, y: x.repeat_interleave(y, 0),
    "bincount": lambda x, y: torch.bincount(y),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_data_is_refused(name):
    def build(self, x, y):
        SHAPES[name](x, y)
        return train(self, x, y)

    refused(make(build), gz.CaptureError, "the shape of a result depends on data", name, HERE, "torch.where")


def test_writing_through_a_boolean_mask_is_no_shape_and_works():
    def build(self, x, y):
        x = x.clone()
        x[y > 0] = 0.0
        return train(self, x, y)

    graph = make(build)
    x = X.clone()
    x[Y > 0] = 0.0
    expected = F.cross_entropy(graph.model(x), Y).detach()
    torch.testing.assert_close(graph(X, Y), expected)
