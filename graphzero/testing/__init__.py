"""Tools to unit-test passes on a laptop: a fake world, text in and text out, the same step twice.

def test_my_pass():
    graph = gz.parse(TEXT)
    after = gz.Pipeline([my_pass])(graph)
    assert_graph(after, EXPECTED)            # pytest --accept writes EXPECTED
    assert_same_step(graph, after, ranks=4)  # both on virtual ranks: equal outputs, equal new states
"""

from graphzero.sbp.rule_checks import check_rule
from graphzero.testing.compare import assert_graph, assert_same_step
from graphzero.testing.fake import fake_world
from graphzero.testing.measure import measure_step, profile_step, trace_step
from graphzero.testing.strict import strict_transfers

__all__ = [
    "assert_graph", "assert_same_step", "check_rule", "fake_world", "measure_step", "profile_step", "strict_transfers",
    "trace_step",
]  # fmt: skip
