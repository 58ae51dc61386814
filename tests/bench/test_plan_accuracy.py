"""Which of the measured stages have an order that a plan must have too."""

import plan_accuracy


def test_stages_have_an_order_where_the_distance_is_large_and_no_chance():
    always, mostly, hardly = [1.0] * 15, [1.0] * 9 + [1.3] * 6, [1.08] * 15
    assert plan_accuracy.clear_order({0: always, 1: [1.1] * 15}, 0.03) == [(0, 1)]
    assert plan_accuracy.clear_order({0: always, 1: [1.02] * 15}, 0.03) == []
    assert plan_accuracy.clear_order({0: mostly, 1: hardly}, 0.03) == []  # 9 of 15 rounds
    assert plan_accuracy.clear_order({2: [1.1] * 15, 3: [1.0] * 13 + [1.2] * 2}, 0.03) == [(3, 2)]
