"""What the tests of wrong uses share: a small Graph around any build, and what an error of ours must look like."""

import pytest
import torch
from torch import nn

import graphzero as gz

X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))


def train(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    loss.backward()
    return loss


def make(build=train, optimizer=torch.optim.SGD, ranks=2, stage=2, model=None, **options):
    """A Graph over a linear layer whose build is ``build``; ``optimizer`` makes its optimizer from parameters."""

    class Step(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(ranks), virtual=True))
            self.model = nn.Linear(4, 3) if model is None else model
            self.loss_fn = nn.CrossEntropyLoss()
            if optimizer is not None:
                self.add_optimizer(optimizer(self.model.parameters(), **({"lr": 0.1} | options)))
            self.config.enable_zero(True, stage=stage)

    Step.build = build
    return Step()


def says(kind, *words):
    """A context in which an error of ``kind`` is raised, at most 40 lines long, that holds each of ``words``."""
    return _Says(kind, words)


class _Says:
    def __init__(self, kind, words):
        self.kind, self.words, self.raises = kind, words, pytest.raises(kind)

    def __enter__(self):
        self.caught = self.raises.__enter__()
        return self

    def __exit__(self, *error):
        done = self.raises.__exit__(*error)
        if done:
            self.message = str(self.caught.value)
            missing = [word for word in self.words if word not in self.message]
            assert not missing, f"{missing} not in:\n{self.message}"
            assert issubclass(self.kind, gz.GraphZeroError)
            assert len(self.message.splitlines()) < 40
            assert max(map(len, self.message.splitlines())) < 600
        return done


def refused(graph, kind, *words, args=(X, Y)):
    """The message of the error that calling ``graph`` raises; each of ``words`` stands in it."""
    with says(kind, *words) as caught:
        graph(*args)
    return caught.message
