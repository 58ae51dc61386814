"""What a collective costs: seconds of one link, and prices that compare moves on different axes."""

import pytest

import graphzero as gz
from graphzero.sbp import boxing
from graphzero.sbp.link_costs import Costs, Link, messages
from graphzero.sbp.types import B, P, S, partial

ALL = (B, S(0), S(1), P, partial("max"))


@pytest.mark.parametrize(
    ("kind", "count"), [("all_gather", 7), ("reduce_scatter", 7), ("all_to_all", 7), ("all_reduce", 14), ("slice", 0)]
)
def test_messages_are_the_steps_of_a_ring_or_of_pairwise_exchange(kind, count):
    assert messages(kind, 8) == count
    assert messages(kind, 1) == 0


def test_seconds_are_latency_for_each_message_and_bytes_over_bandwidth():
    link = Link(latency=1e-3, bandwidth=1e6)
    assert link.seconds("all_reduce", sent=500_000, ranks=4) == pytest.approx(6e-3 + 0.5)
    assert link.seconds("all_gather", sent=0, ranks=4) == pytest.approx(3e-3)


@pytest.mark.parametrize("src", ALL)
@pytest.mark.parametrize("dst", ALL)
def test_without_links_the_price_of_a_box_is_its_bytes(src, dst):
    assert Costs((2, 6)).box(src, dst, 1200, axis=1) == boxing.cost(src, dst, 1200, 6)


def test_links_that_are_alike_and_without_latency_price_by_bytes_too():
    alike, free = Costs((2, 4), (Link(0, 3e9), Link(0, 3e9))), Costs((2, 4))
    assert all(alike.box(a, b, 999, axis) == free.box(a, b, 999, axis) for a in ALL for b in ALL for axis in (0, 1))


def test_prices_compare_axes_in_bytes_of_the_fastest():
    costs = Costs((4, 4), (Link(0, 1e9), Link(0, 10e9)))
    assert costs.price_of("all_gather", 400, axis=1) == 300
    assert costs.price_of("all_gather", 400, axis=0) == pytest.approx(3000)
    slow, fast = (link.seconds("all_gather", 300, 4) for link in costs.links)
    assert costs.price_of("all_gather", 400, 0) / costs.price_of("all_gather", 400, 1) == pytest.approx(slow / fast)


def test_latency_lets_few_messages_win_where_tensors_are_small():
    costs = Costs((8,), (Link(latency=1e-5, bandwidth=1e9),))
    one, two = (costs.price_of("all_reduce", n, 0) for n in (64, 1 << 26))
    both = [costs.price_of("reduce_scatter", n, 0) + costs.price_of("all_gather", n, 0) for n in (64, 1 << 26)]
    assert one == pytest.approx(both[0]) and two == pytest.approx(both[1])  # a ring's all_reduce is these two
    assert costs.price_of("all_to_all", 64, 0) > 0.9 * costs.price_of("all_gather", 64, 0)  # messages count
    assert costs.price_of("all_to_all", 1 << 26, 0) < 0.2 * costs.price_of("all_gather", 1 << 26, 0)  # bytes count


@pytest.mark.parametrize("links", [(), (Link(1e-5, 1e9), Link(1e-6, 1e11))])
def test_what_sends_nothing_costs_nothing(links):
    costs = Costs((2, 2), links)
    assert all(costs.price_of(kind, 1e6, axis) == 0 for kind in ("same", "slice", "keep_first") for axis in (0, 1))
    assert costs.box(B, P, 1e6, 0) == costs.box(S(0), S(0), 1e6, 1) == 0
    assert Costs((1, 2), links).box(P, B, 1e6, axis=0) == 0  # an axis of one rank


def test_costs_are_values():
    links = (Link(1e-5, 1e9),)
    assert Costs((4,), links) == Costs((4,), links) and len({Costs((4,), links), Costs((4,), links), Costs((4,))}) == 2


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ({"latency": -1e-6, "bandwidth": 1e9}, "latency=-1e-06"),
        ({"latency": float("nan"), "bandwidth": 1e9}, "finite"),
        ({"latency": True, "bandwidth": 1e9}, "latency=True"),
        ({"latency": 0, "bandwidth": 0}, "nothing would ever arrive"),
        ({"latency": 0, "bandwidth": -5}, "bandwidth=-5"),
        ({"latency": 0, "bandwidth": float("inf")}, "finite"),
        ({"latency": 0, "bandwidth": "1e9"}, "bytes per second"),
    ],
)
def test_numbers_that_no_link_has_are_refused(numbers, word):
    with pytest.raises(gz.ConfigError, match=word):
        Link(**numbers)


def test_costs_want_a_link_for_every_axis():
    with pytest.raises(gz.ConfigError, match="1 links for 2 placement axes"):
        Costs((2, 2), (Link(0, 1),))
