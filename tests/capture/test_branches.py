"""A condition is a check exactly if one side of it only raises."""

import contextlib
import sys

import conditions
import pytest

from graphzero.capture.host_values.branches import check_at


class Asked:
    """Says where its truth is asked for, and what that is taken to be."""

    def __init__(self, truth=True):
        self.truth, self.found = truth, "not asked"

    def __bool__(self):
        self.found = check_at(sys._getframe(1))
        return self.truth


def found_in(function, truth=True):
    asked = Asked(truth)
    with contextlib.suppress(AssertionError, ValueError, KeyError):
        function(asked)
    return asked.found


@pytest.mark.parametrize(
    ("function", "when", "message"),
    [
        (conditions.asserts, False, "AssertionError: it is small"),
        (conditions.asserts_alone, False, "AssertionError: x"),
        (conditions.asserts_not, True, "AssertionError: it is large"),
        (conditions.asserts_both, False, "AssertionError: both"),
        (conditions.raises, True, "ValueError: bad: {x.truth} of {len('abc')}"),
        (conditions.raises_otherwise, False, "KeyError: missing"),
        (conditions.raises_after_a_word, False, "ValueError: {message}"),
        (conditions.raises_in_a_block, True, "ValueError: inside"),
    ],
)
def test_a_condition_that_only_raises_is_a_check_with_the_words_of_its_source(function, when, message):
    found = found_in(function)
    assert (found.when, found.message) == (when, message)


@pytest.mark.parametrize(
    "function",
    [
        conditions.stores,
        conditions.tells,
        conditions.returns,
        conditions.counts,
        conditions.may_raise,
        conditions.always_raises,
        conditions.catches,
        conditions.yields,
        conditions.keeps,
        conditions.either,
        conditions.asks_for_it,
        conditions.loops,
        conditions.one_or_other,
        conditions.both_are_bad,
    ],
)
def test_a_condition_that_does_anything_else_is_no_check(function):
    assert found_in(function) is None


def test_a_loop_that_returns_before_it_raises_is_no_check():
    assert found_in(conditions.raises_at_the_end) is None


def test_code_without_source_is_a_check_without_words():
    names = {}
    exec("def f(x):\n    assert x, 'gone'\n", names)
    found = found_in(names["f"])
    assert found.when is False
    assert found.message == "a check"
