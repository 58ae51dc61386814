"""Checks of several values; pytest rewrites no asserts here."""


def either(self, a, b, c):
    assert a or b, "neither"


def both(self, a, b, c):
    if a and b:
        raise ValueError("both")


def all_three(self, a, b, c):
    if a and b.item() and bool((c > 0).all()) is True and c:
        raise ValueError("never looked at")


def three(self, a, b, c):
    if a and b.item() and c:
        raise ValueError("three")


def one_and_one_of_two(self, a, b, c):
    if a and (b or c):
        raise ValueError("one and one of two")


def pair_or_one_behind_a_value(self, a, b, c):
    if a and ((b and not c) or (c and not b)):
        raise ValueError("one")


def pair_or_one(self, a, b, c):
    if (a and b) or c:
        raise ValueError("a pair or one")


def not_both(self, a, b, c):
    assert not (a and b) or c, "both alone"


def in_a_function(self, a, b, c):
    def good(x):
        assert x, "bad within"
        return x

    if a and good(b):
        raise ValueError("good")


def known_first(self, a, b, c):
    if self.strict and a and b:
        raise ValueError("strict")


def known_last(self, a, b, c):
    if a and self.strict:
        raise ValueError("strict")


def known_last_and_caught(self, a, b, c):
    try:
        known_last(self, a, b, c)
    except ValueError:
        self.strict = False


def known_between(self, a, b, c):
    if a and (b or self.strict):
        raise ValueError("strict")


def writes_between(self, a, b, c):
    if a and self.model.weight.detach().add_(1).sum():
        raise ValueError("written")


def counts_in_a_loop(self, a, b, c):
    for one in (a, True):
        if one and b:
            raise ValueError("again")
