"""Items that build takes from an iterator are constants of the program, of which the user is told."""

import csv
import io
import itertools
import warnings

import numpy as np
import pytest
import torch
from capture_reference import Owner, Program
from torch import nn
from torch.utils.data import DataLoader

BATCHES = [torch.randn(4) for _ in range(6)]


def generate(batches):
    i = 0
    while True:
        yield batches[i % 6]
        i += 1


def begun(iterator, count=1):
    for _ in range(count):
        next(iterator)
    return iterator


def yielding_from(iterator):
    yield from iterator


def float_of(row):
    return float(row[0])


def open_this_file():
    OPENED.append(open(__file__))  # noqa: SIM115 - for as long as the test runs
    return OPENED[-1]


OPENED = []


@pytest.fixture(autouse=True)
def _close_files():
    yield
    while OPENED:
        OPENED.pop().close()


ITERATORS = {
    "of a list": lambda: iter(BATCHES),
    "of a dict's values": lambda: iter(dict(enumerate(BATCHES)).values()),
    "a generator": lambda: generate(BATCHES),
    "a generator that has begun": lambda: begun(generate(BATCHES)),
    "a generator expression": lambda: (x + 1 for x in BATCHES),
    "a generator over zip": lambda: (x for x, _ in zip(BATCHES, range(6), strict=True)),
    "map": lambda: map(torch.neg, BATCHES),
    "islice": lambda: itertools.islice(BATCHES, 5),
    "cycle": lambda: itertools.cycle(BATCHES),
    "cycle in its second round": lambda: begun(itertools.cycle(BATCHES), 8),
    "cycle of a generator": lambda: begun(itertools.cycle(x for x in BATCHES), 8),
    "a generator that yields from cycle": lambda: begun(yielding_from(itertools.cycle(BATCHES)), 8),
    "map over cycle": lambda: map(torch.neg, begun(itertools.cycle(BATCHES), 6)),
    "product": lambda: (x for x, _ in itertools.product(BATCHES, range(2))),
    "tee": lambda: itertools.tee(BATCHES)[0],
    "numpy": lambda: begun(np.arange(4.0).flat),
    "csv": lambda: map(float_of, begun(csv.reader(io.StringIO("1\n2\n3\n")))),
    "a file": lambda: map(len, open_this_file()),
    "chain of a generator": lambda: begun(itertools.chain(generate(BATCHES), BATCHES)),
    "count": lambda: itertools.count(300),
    "a DataLoader's": lambda: iter(DataLoader(BATCHES, batch_size=None)),
    "a DataLoader's that has begun": lambda: begun(iter(DataLoader(BATCHES, batch_size=None))),
}


def capture_step(build, **attributes):
    Program(Owner(build, model=nn.Linear(8, 4), **attributes), [], (torch.randn(6, 8),))


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("where", ["attribute", "variable", "entry"])
def test_the_user_is_told_of_each_iterator_that_build_takes_items_from(kind, where):
    data = ITERATORS[kind]()
    held = {"data": [data]}

    def build(self, x):
        taken = {"attribute": lambda: self.data, "variable": lambda: data, "entry": lambda: held["data"][0]}[where]()
        return self.model(x) + next(taken)

    with pytest.warns(UserWarning, match="build takes items from .*, only once, while it is traced"):
        capture_step(build, **({"data": data} if where == "attribute" else {}))


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_that_build_leaves_alone_is_not_named(kind):
    data = ITERATORS[kind]()

    def build(self, x):
        return self.model(x) + (0 if data is None else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_step(build, data=data)


def test_an_iterator_that_build_makes_is_its_own():
    def build(self, x):
        return self.model(x) + next(iter(self.batches)) + sum(next(generate(BATCHES)) for _ in range(2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_step(build, batches=BATCHES)


def test_the_attribute_is_named():
    def build(self, x):
        return self.model(x) + next(self.data)[0]

    with pytest.warns(UserWarning, match=r"build takes items from Owner\.data, only once"):
        capture_step(build, data=zip(BATCHES, strict=True))


def test_an_iterator_goes_on_where_build_has_left_it():
    def build(self, x):
        return self.model(x) + next(self.cycle) + next(self.generator)

    cycle, generator = itertools.cycle([1.0, 2.0]), (x for x in [1.0, 2.0])
    with pytest.warns(UserWarning, match="build takes items from"):
        capture_step(build, cycle=cycle, generator=generator)
    assert [next(cycle) for _ in range(3)] == [2.0, 1.0, 2.0]
    assert next(generator) == 2.0


def test_a_file_that_build_writes_to_is_no_iterator_that_it_takes_items_from():
    def build(self, x):
        self.log.write("a line")
        return self.model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_step(build, log=io.StringIO())
