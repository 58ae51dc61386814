"""A build that asks whether it is being traced goes the way of plain PyTorch wherever that can be written down."""

import resource
import threading

import pytest
import torch
from torch import nn

import graphzero as gz

X = torch.linspace(-1, 1, 24).view(6, 4)
ZERO = torch.zeros(6, 4)
LONG = 4096


def traced(x=None):
    """As packages ask it."""
    return torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor)


class Step(gz.Graph):
    def __init__(self, forward):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(4, 4)
        self.forward = forward

    def build(self, x):
        return self.forward(self, self.model(x))


def run(forward, x=X):
    return Step(forward)(x)


def ways(*forwards, x=X):
    """What each of ``forwards`` gives of one model."""
    torch.manual_seed(0)
    model, found = nn.Linear(4, 4), []
    for forward in forwards:
        step = Step(forward)
        step.model = model
        found.append(step(x))
    return found


def packed(h, length):
    """A mask as published models make it: none where positions follow one another."""
    positions = torch.arange(length).unsqueeze(0) + 1
    starts = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if not traced(starts) and (starts[:, -1] == 0).all():
        return None
    return starts


@pytest.mark.parametrize("length", [6, LONG])
def test_a_branch_on_what_is_known_is_that_of_plain_pytorch(length):
    def forward(self, h):
        return h * 2 if packed(h, length) is None else h * 3

    found, wanted = ways(forward, lambda self, h: h * 2)
    torch.testing.assert_close(found, wanted)


def skips(h, mask):
    """A branch that reads a value, but not where it is traced."""
    if not traced(mask) and mask.all():
        return h
    return h * mask


@pytest.mark.parametrize("x", [X, ZERO])
def test_a_branch_on_what_is_not_known_is_the_one_meant_for_tracing(x):
    found, wanted = ways(lambda self, h: skips(h, h > 0), lambda self, h: h * (h > 0), x=x)
    torch.testing.assert_close(found, wanted)


def test_only_the_function_that_needs_it_is_told_that_it_is_traced():
    def forward(self, h):
        before = traced()
        return before, skips(h, h > 0), traced(h)

    before, _, after = run(forward)
    assert not before and not after


def test_an_answer_that_decides_elsewhere_is_changed_too():
    def forward(self, h):
        reads = wants_to_read()
        return -h if reads and h.sum() > 0 else h * 5

    found, wanted = ways(forward, lambda self, h: h * 5)
    torch.testing.assert_close(found, wanted)


def wants_to_read():
    return not traced()


def test_what_cannot_be_written_down_either_way_is_refused_at_its_line():
    def forward(self, h):
        if traced(h):
            return h * h.sum().numpy()
        return h if h.sum() > 0 else -h

    with pytest.raises(gz.CaptureError, match=r"reads a value: \.numpy\(\)(.|\n)*test_is_compiling.py"):
        run(forward)


def test_what_fails_on_the_other_way_is_refused_as_plain_pytorch_would_go():
    def forward(self, h):
        scale = None if traced() else h.sum().item()
        kept = scale[0:1] if traced() else h[h > 0]
        return h * kept.sum()

    with pytest.raises(gz.CaptureError, match="the shape of a result depends on data") as caught:
        run(forward)
    assert isinstance(caught.value.__cause__, TypeError)


def test_what_build_raises_itself_comes_through_from_the_other_way_too():
    def forward(self, h):
        if traced():
            raise LookupError("where it is traced")
        return h[h > 0].sum() * h

    with pytest.raises(LookupError, match="where it is traced"):
        run(forward)


def test_what_build_raises_itself_comes_through():
    def forward(self, h):
        if not traced() and torch.arange(3).sum() == 3:
            raise LookupError("as in plain PyTorch")
        return h

    with pytest.raises(LookupError, match="as in plain"):
        run(forward)


def test_more_places_than_are_tried_one_by_one_are_all_told():
    source = "def place(h):\n    return h if not traced() and h.sum() > 0 else h * 1\n"
    places = []
    for _ in range(12):
        scope = {"traced": traced}
        exec(source, scope)
        places.append(scope["place"])

    def forward(self, h):
        for place in places:
            h = place(h)
        return h

    found, wanted = ways(forward, lambda self, h: h)
    torch.testing.assert_close(found, wanted)


def test_other_threads_and_modules_imported_meanwhile_are_answered_as_ever(tmp_path, monkeypatch):
    (tmp_path / "imported_in_build.py").write_text("from torch._subclasses import FakeTensor")
    monkeypatch.syspath_prepend(tmp_path)

    def forward(self, h):
        found = []
        thread = threading.Thread(target=lambda: found.append(torch._subclasses.FakeTensor))
        thread.start()
        thread.join()
        import imported_in_build

        return h, found[0] is type(h), imported_in_build.FakeTensor is type(h), torch._subclasses.FakeTensor is type(h)

    assert run(forward)[1:] == (True, True, False)
    assert "FakeTensor" in vars(torch._subclasses) and "__getattr__" not in vars(torch._subclasses)
    assert not torch.compiler.is_compiling()


def test_a_large_table_of_known_numbers_is_not_computed_while_build_is_traced():
    def forward(self, h):
        rows = torch.arange(1 << 15)
        later = rows[:, None] > rows[None]  # a gigabyte
        assert bool((rows == rows).all())
        return h + later.sum()

    step = Step(forward)
    before = _peak()
    step.compile(X)
    assert _peak() - before < 1 << 29


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_way_that_is_taken_only_because_build_is_traced_is_named_and_compared():
    """By less than what counts as rounding in float32."""

    def forward(self, h):
        return h * 1.0001 if traced(h) else h if h.sum() > 0 else -h

    step, plain = Step(forward), Step(lambda self, h: h if not traced(h) else h * 2)
    with pytest.warns(
        UserWarning, match=r"asks whether it is being traced \(tests/capture/test_is_compiling.py:\d+ in forward\)"
    ):
        step(X)
    report = gz.check(step, X)
    assert not report and "captured" in str(report)
    plain(X)
    assert gz.check(plain, X)
