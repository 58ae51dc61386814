"""A check of several values, ``assert a or b``, raises where plain PyTorch does; what is no such check is refused."""

import joint_conditions
import pytest
import torch
from torch import nn

import graphzero as gz

X = torch.zeros(4, 3)


class Step(gz.Graph):
    def __init__(self, check):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(3, 3)
        self.strict = True
        self.check = check

    def build(self, x, a, b, c):
        self.check(self, a, b, c)
        return self.model(x)


def runs(check, *truths):
    """Whether plain PyTorch and the Graph raise; the Graph's is one Graph for all."""
    values = [torch.tensor(float(t)) for t in truths]
    try:
        check(Step(check), *values)
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


CHECKS = [
    joint_conditions.either,
    joint_conditions.both,
    joint_conditions.three,
    joint_conditions.one_and_one_of_two,
    joint_conditions.in_a_function,
    joint_conditions.known_first,
    joint_conditions.not_both,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_raises_for_the_values_for_which_plain_pytorch_raises(check):
    step = Step(check)
    for number in range(8):
        truths = [bool(number & 1 << i) for i in range(3)]
        wanted, found = runs(check, *truths), ""
        try:
            step(X, *(torch.tensor(float(t)) for t in truths))
        except gz.CheckError as error:
            found = str(error)
        assert (wanted in found) and bool(wanted) == bool(found), (truths, wanted, found)


@pytest.mark.parametrize(
    "check",
    [
        joint_conditions.known_last,
        joint_conditions.known_last_and_caught,
        joint_conditions.known_between,
        joint_conditions.writes_between,
        joint_conditions.counts_in_a_loop,
        joint_conditions.all_three,
        joint_conditions.pair_or_one,
        joint_conditions.pair_or_one_behind_a_value,
    ],
    ids=lambda check: check.__name__,
)
def test_what_may_do_anything_but_check_is_refused_at_its_line(check):
    with pytest.raises(gz.CaptureError, match=r"reads a value: bool\(tensor\)(.|\n)*joint_conditions.py"):
        Step(check)(X, *torch.ones(3))
