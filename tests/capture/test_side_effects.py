"""Whatever build does to Python objects while it is written down, they are afterwards as they were."""

import threading
from array import array
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from capture_reference import Owner, Program
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:build sets", "ignore:build reads")


class FrozenDict(OrderedDict):
    """A configuration as the diffusers library has it: nothing can be written once it is made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for key, x in self.items():
            setattr(self, key, x)
        self.frozen = True

    def _refuse(self, *args, **kwargs):
        raise AttributeError("frozen")

    clear = update = pop = setdefault = __delitem__ = _refuse

    def __setitem__(self, name, x):
        if getattr(self, "frozen", False):
            self._refuse()
        super().__setitem__(name, x)

    def __setattr__(self, name, x):
        if getattr(self, "frozen", False):
            self._refuse()
        super().__setattr__(name, x)


class Counted(dict):
    """Notices every call that would write."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0

    def __setitem__(self, key, x):
        self.calls += 1
        super().__setitem__(key, x)

    def __delitem__(self, key):
        self.calls += 1
        super().__delitem__(key)

    def update(self, *args, **kwargs):
        raise KeyError("update")

    def clear(self):
        raise KeyError("clear")


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = [1, 2]


def capture(build, **attributes):
    owner = Owner(build, model=nn.Linear(8, 4), **attributes)
    return owner, lambda: Program(owner, [], (torch.randn(6, 8),))


def test_a_configuration_that_refuses_writes_stays_as_it_is():
    config = FrozenDict(width=3, sizes=(1, 2))
    model = nn.Linear(8, 4)
    model.config = config
    before = list(config.items()), dict(vars(config))
    Program(Owner(lambda self, x: self.model(x) * self.model.config.width, model=model), [], (torch.randn(6, 8),))
    assert model.config is config
    assert (list(config.items()), dict(vars(config))) == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_build_writes_past_a_refusal_is_put_back_past_it(fails):
    config, counted = FrozenDict(width=3, depth=4), Counted(a=1, b=2)

    def build(self, x):
        OrderedDict.__setitem__(self.config, "width", 5)
        OrderedDict.move_to_end(self.config, "width")
        self.counted["c"] = 3
        del self.counted["a"]
        if fails:
            raise ValueError("mine")
        return self.model(x)

    _, run = capture(build, config=config, counted=counted)
    if fails:
        with pytest.raises(ValueError, match="mine"):
            run()
    else:
        run()
    assert list(config.items()) == [("width", 3), ("depth", 4)]
    assert list(counted.items()) == [("a", 1), ("b", 2)]
    assert counted.calls == 0


def test_nothing_is_written_where_nothing_has_changed():
    class Strict(list):
        def __setitem__(self, *args):
            raise AssertionError("written")

        clear = extend = append = __setitem__

    _, run = capture(lambda self, x: self.model(x), held=Strict([1, 2]), more={"deep": Counted(a=Strict([3]))})
    run()


def test_containers_of_all_kinds_one_in_another_are_as_they_were():
    inner = {"list": [1, [2]], "set": {1, 2}, "deque": deque([1, 2, 3], maxlen=3), "count": Counter(a=1)}
    space, slotted = SimpleNamespace(n=1, deep=inner), Slotted()

    def build(self, x):
        deep = self.space.deep
        deep["list"][1].append(3)
        deep["list"].insert(0, 0)
        deep["set"] ^= {2, 7}
        deep["deque"].append(4)
        deep["count"]["b"] += 1
        deep["new"] = x
        self.space.n += 1
        self.slotted.a.clear()
        self.slotted.a = self.slotted.b = None
        self.tuple[0].append(1)
        self.order["a"] = self.order.pop("a")
        return self.model(x)

    owner, run = capture(build, space=space, slotted=slotted, tuple=([],), order={"a": 1, "b": 2})
    run()
    assert inner == {"list": [1, [2]], "set": {1, 2}, "deque": deque([1, 2, 3]), "count": Counter(a=1)}
    assert (space.n, space.deep) == (1, inner)
    assert slotted.a == [1, 2]
    assert not hasattr(slotted, "b")
    assert owner.tuple == ([],)
    assert list(owner.order) == ["a", "b"]


def test_an_object_that_threads_share_is_left_to_them():
    class Prefetcher:
        def __init__(self):
            self.lock, self.ready = threading.Lock(), [1]

    prefetcher = Prefetcher()

    def build(self, x):
        prefetcher.ready.append(2)  # as a thread would
        return self.model(x)

    _, run = capture(build, prefetcher=prefetcher)
    run()
    assert prefetcher.ready == [1, 2]


def test_a_list_that_build_fills_with_values_is_named_in_the_warning():
    _, run = capture(lambda self, x: self.seen.append(self.model(x)) or x * 2, seen=[])
    with pytest.warns(UserWarning, match=r"build sets Owner\.seen, which has no effect"):
        run()


def test_a_dict_of_a_function_around_build_is_named_by_its_key():
    counts = {"steps": 0}

    def build(self, x):
        counts["steps"] += 1
        return self.model(x) * counts["steps"]

    _, run = capture(build)
    with pytest.warns(UserWarning, match=r"build sets \['steps'\] of a dict, which has no effect"):
        run()


def test_a_number_of_a_tensor_that_build_keeps_is_named_with_its_line():
    def build(self, x):
        loss = self.model(x).mean()
        self.losses.append(loss.item())
        self.last = loss.item()
        return loss

    _, run = capture(build, losses=[])
    at = r" \(tests/capture/test_side_effects\.py:\d+ in build\)"
    with pytest.warns(UserWarning, match=rf"build sets Owner\.last{at}, Owner\.losses{at}, which has no effect"):
        run()


ARRAYS = {
    "numpy": lambda: np.zeros(3),
    "numpy, of objects": lambda: np.zeros(3, object),
    "numpy, a scalar": lambda: np.zeros(()),
    "numpy, every other one": lambda: np.zeros(6)[::2],
    "numpy, 3 MB": lambda: np.zeros(400_000),
    "array": lambda: array("d", [0.0, 0.0]),
    "bytearray": lambda: bytearray(3),
}


@pytest.mark.parametrize("where", ["attribute", "entry", "variable"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_a_number_that_build_writes_into_an_array_is_put_back_and_named(kind, where):
    counts = ARRAYS[kind]()
    first, held = () if kind == "numpy, a scalar" else 0, [counts]

    def build(self, x):
        written = {"attribute": lambda: self.counts, "entry": lambda: held[0], "variable": lambda: counts}[where]()
        written[first] += 1
        return self.model(x) * float(written[first])

    _, run = capture(build, **({"counts": counts} if where == "attribute" else {}))
    with pytest.warns(UserWarning, match="build sets .*, which has no effect"):
        run()
    assert counts[first] == 0


def test_an_array_that_grows_in_build_is_as_it_was():
    seen = array("d", [1.0])

    def build(self, x):
        seen.append(2.0)
        return self.model(x)

    _, run = capture(build)
    with pytest.warns(UserWarning, match="build sets an entry of an array, which has no effect"):
        run()
    assert list(seen) == [1.0]


@pytest.mark.filterwarnings("error")
def test_arrays_that_build_leaves_alone_are_not_named():
    arrays = {kind: make() for kind, make in ARRAYS.items()}
    fixed = np.ones(3)
    fixed.setflags(write=False)
    _, run = capture(lambda self, x: self.model(x) * float(self.few[1]), few=np.ones(3), arrays=arrays, fixed=fixed)
    run()


AS_TENSORS = {
    "from_numpy": (torch.from_numpy, np.zeros(4, np.float32)),
    "as_tensor of a view": (lambda held: torch.as_tensor(held[:]), np.zeros(4, np.float32)),
    "dlpack": (torch.from_dlpack, np.zeros(4, np.float32)),
    "frombuffer": (lambda held: torch.frombuffer(held, dtype=torch.float32), array("f", [0.0] * 4)),
    "a copy": (torch.tensor, np.zeros(4, np.float32)),
}


@pytest.mark.parametrize("kind", AS_TENSORS)
def test_an_array_that_build_fills_and_reads_as_a_tensor_has_what_build_has_written(kind):
    read, held = AS_TENSORS[kind]

    def build(self, x):
        for i in range(4):
            self.held[i] = 2
        return self.model(x) * 0 + read(self.held)

    program = Program(Owner(build, model=nn.Linear(8, 4), held=held), [], (torch.randn(6, 8),))
    assert program(torch.randn(6, 8)).tolist() == [[2.0] * 4] * 6


@pytest.mark.parametrize("write", [lambda x: f"{x.item():.3f}", lambda x: f"{x}", lambda x: repr(x), lambda x: str(x)])
def test_a_text_of_a_tensor_is_made_once_and_its_line_is_named(write, capsys):
    def build(self, x):
        loss = self.model(x).mean()
        print(write(loss))
        print(f"{loss.shape} {torch.ones(2)}")  # known while build is traced
        return loss

    _, run = capture(build)
    with pytest.warns(UserWarning, match="build converts a tensor to text") as caught:
        run()
    said = [str(warning.message) for warning in caught if "to text" in str(warning.message)]
    assert len(said) == 1 and "test_side_effects.py" in said[0] and said[0].count(" in ") == 1
    assert "size=()" in capsys.readouterr().out


@pytest.mark.parametrize("puts_back", [False, True])
def test_a_mode_that_build_leaves_is_put_back_and_named(puts_back, recwarn):
    def build(self, x):
        self.model.eval()
        loss = self.model(x).mean()
        self.model.train(puts_back)
        return loss

    owner, run = capture(build)
    run()
    said = [str(one.message) for one in recwarn if "another mode" in str(one.message)]
    assert bool(said) is not puts_back
    assert all(module.training for module in owner.model.modules())
    assert all("build leaves" in text and "switch modes between calls" in text for text in said)
