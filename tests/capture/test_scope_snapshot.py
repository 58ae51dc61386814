"""Globals, shared variables, classes, settings and random streams are after a capture as they were before."""

import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from capture_reference import Owner, Program
from torch import nn

from graphzero.capture.objects.scope_snapshot import ScopeReferences

pytestmark = pytest.mark.filterwarnings("ignore:build sets", "ignore:build draws")

COUNT, SEEN, CACHE = 0, [], {"a": [1]}


class Noted(nn.Module):
    """Writes to what its class has in common."""

    made, all = 0, []

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        type(self).made += 1
        Noted.more = x
        self.all.append(x)
        note(x)
        return self.linear(x)


def note(x):
    global COUNT, FRESH
    COUNT += 1
    FRESH = x
    SEEN.append(x)
    CACHE["a"].append(x)
    note.calls = 1


def counting(inner=0, kept=None):
    def build(self, x):
        nonlocal inner
        inner += 1
        kept.append(x)
        return self.model(x)

    return build


@pytest.mark.parametrize("fails", [False, True])
def test_globals_classes_and_functions_that_forward_names(fails):
    def build(self, x):
        y = self.model(x)
        return y.item() if fails else y

    owner = Owner(build, model=Noted())
    if fails:
        with pytest.raises(Exception, match="reads a value"):
            Program(owner, [], (torch.randn(6, 8),))
    else:
        Program(owner, [], (torch.randn(6, 8),))
    assert (COUNT, SEEN, CACHE, Noted.made, Noted.all) == (0, [], {"a": [1]}, 0, [])
    assert "FRESH" not in globals()
    assert not hasattr(Noted, "more")
    assert not hasattr(note, "calls")


def test_variables_that_build_shares_with_a_function_around_it():
    kept = []
    build = counting(kept=kept)
    Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))
    cells = dict(zip(build.__code__.co_freevars, build.__closure__, strict=True))
    assert (cells["inner"].cell_contents, kept) == (0, [])


class Named:
    """Reached by its name alone."""

    calls, names = 0, {"a": 0}


class Tracker:
    """Reached as an object."""

    calls = 0

    def count(self):
        type(self).calls += 1

    def count_globally(self):
        global COUNT
        COUNT += 1


def add_one(to=[0], *, more={"n": 0}):  # noqa: B006 - defaults that calls share
    to[0] += 1
    more["n"] += 1


def name_class():
    Named.calls += 1
    Named.names["a"] += 1


def set_in_module():
    other_module.calls += 1
    other_module.Inner.calls += 1


other_module = ModuleType("other_module")
exec(compile("calls = 0\nclass Inner:\n    calls = 0\n", __file__, "exec"), vars(other_module))
other_module.__file__ = __file__
sys.modules["other_module"] = other_module
WRITES = {
    "a class by its name": (name_class, ["an attribute of the class Named", "['a'] of a dict"]),
    "the class of an object": (Tracker().count, ["an attribute of the class Tracker"]),
    "a global, in a method of an object": (Tracker().count_globally, ["the global COUNT"]),
    "defaults": (add_one, ["an entry of a list", "['n'] of a dict"]),
    "another module": (set_in_module, ["the global calls", "an attribute of the class Inner"]),
}


@pytest.mark.filterwarnings("default:build sets")
@pytest.mark.parametrize("name", WRITES)
def test_what_functions_that_build_calls_write_is_restored_and_the_user_is_told(name):
    write, names = WRITES[name]

    def build(self, x):
        write()
        return self.model(x)

    with pytest.warns(UserWarning, match="build sets") as told:
        Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))
    text = "\n".join(str(one.message) for one in told)
    assert all(part in text for part in names), text
    assert (Named.calls, Named.names, Tracker.calls, COUNT) == (0, {"a": 0}, 0, 0)
    assert (other_module.calls, other_module.Inner.calls) == (0, 0)
    assert (add_one.__defaults__, add_one.__kwdefaults__) == (([0],), {"more": {"n": 0}})


@pytest.mark.filterwarnings("error:build sets")
def test_an_equal_number_in_place_of_another_is_no_write():
    numbers = [2.5]

    def build(self, x):
        numbers[0] = float(str(numbers[0]))
        return self.model(x)

    Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))


def settings():
    return (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.backends.mha.get_fastpath_enabled(), torch.is_inference_mode_enabled(),
    )  # fmt: skip


def test_settings_of_torch():
    before = settings()

    def build(self, x):
        y = self.model(x)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        return y

    Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))
    assert settings() == before


def test_random_streams_and_that_the_user_is_told():
    def build(self, x):
        return self.model(x) * random.random() + float(np.random.rand()) + torch.rand(4)

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"module random, only once(.|\n)*") as told:
        Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))
    assert any("module numpy.random" in str(one.message) for one in told)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]


def test_a_function_that_is_given_other_code_is_looked_into_anew():
    def first():
        global COUNT
        COUNT += 1

    def second():
        global FRESH
        FRESH = 1

    found = []
    for code in (first.__code__, second.__code__, first.__code__):
        first.__code__ = code
        reached = ScopeReferences()
        reached.names_of(first)
        found.append([kept.names for kept in reached.snapshots])
    assert found == [[("COUNT",)], [("FRESH",)], [("COUNT",)]]
