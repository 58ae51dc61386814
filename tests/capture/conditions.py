"""Functions that look at a condition ``x``; pytest rewrites no asserts here."""


def asserts(x):
    assert x, "it is small"


def asserts_alone(x):
    assert x


def asserts_not(x):
    assert not x, "it is large"


def asserts_both(x):
    assert x and len("a") == 1, "both"


def raises(x):
    if x:
        raise ValueError(f"bad: {x.truth} of {len('abc')}")


def raises_otherwise(x):
    if x:
        y = 1
    else:
        raise KeyError("missing")
    return y


def raises_after_a_word(x):
    if not x:
        words = ", ".join(str(i) for i in range(3))
        message = f"bad {words}" if len(words) > 2 else "bad"
        raise ValueError(message)


def raises_at_the_end(x):
    for _ in range(2):
        if x:
            return 1
    raise ValueError("none of them")


def raises_in_a_block(x):
    with open(__file__):
        if x:
            raise ValueError("inside")


def stores(x):
    if x:
        x.seen = 1
        raise ValueError("bad")


def tells(x):
    if x:
        print("bad")
        raise ValueError("bad")


def returns(x):
    if x:
        return 1
    return 2


def counts(x):
    y = 0
    if x:
        y = 1
    return y


def may_raise(x, strict=False):
    if x:
        if strict:
            raise ValueError("bad")
        y = 1
    else:
        y = 2
    return y


def always_raises(x):
    if x:
        raise ValueError("one")
    raise ValueError("two")


def catches(x):
    try:
        if x:
            raise ValueError("bad")
    except ValueError:
        return 2
    return 1


def yields(x):
    def rows():
        if x:
            yield 1
            raise ValueError("bad")

    return list(rows())


def keeps(x):
    kept = [not x]
    return kept[0]


def either(x):
    return x or 1


def asks_for_it(x):
    return bool(x)


def loops(x):
    while x:
        x.truth = False
    return 1


def one_or_other(x, y=True):
    assert x or y, "neither"
    return 1


def both_are_bad(x, y=True):
    if x and y:
        raise ValueError("both")
    return 1
