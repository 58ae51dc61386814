"""Mixtures of experts: experts over ranks, and the tokens of each rank sorted by themselves."""

from graphzero.config import Check, GraphConfig, PluginSetting
from graphzero.config.setting import one_of
from graphzero.passes import PassEntry
from graphzero.plugins.experts.expert_choices import ExpertLines
from graphzero.plugins.experts.expert_ways import AUTO_WAY, CAPACITY, WAYS
from graphzero.plugins.experts.room_check import ROOM_FOR_ROWS
from graphzero.plugins.experts.split_experts import SplitExperts
from graphzero.plugins.experts.split_routing import SplitRouting
from graphzero.sbp.link_costs import is_finite


def set_split_experts(config: GraphConfig, way: str, *, capacity: float = CAPACITY) -> dict[str, str | float]:
    """Say how tokens and weights come together where a data axis splits experts; "auto", the default, or one of
    these.

    ========== =====================================================================================================
    "exchange" tokens go to the ranks of their experts, and results back, by all-to-all; none is ever dropped
    "tokens"   each rank gathers all tokens, and computes what its experts make of them
    "weights"  each rank gathers the weights of all experts, and computes its own tokens
    "auto"     what sends fewest bytes, or takes fewest seconds after ``set_links``
    ========== =====================================================================================================

    capacity: of an exchange, for how many rows of one rank another one has room, as a multiple of an even share.  A
    step that needs more stops before it changes anything, and runs again, as the same step, in a program with
    twice the room, which the Graph goes on with; with as much as there are ranks there is room for any routing.
    With ``set_cuda_graph`` a step cannot stop: there is always room for all rows.

    The step is the same either way, but for rounding.  The ways are described in docs/experts.md.
    """
    return {"split_experts": way, "expert_capacity": capacity}


WAY = PluginSetting(default=AUTO_WAY, check=one_of(AUTO_WAY, *WAYS), method=set_split_experts)
ROOM = PluginSetting(
    default=CAPACITY,
    check=Check(lambda x: is_finite(x) and x > 0, "give a number above 0, such as 1.25"),
    doc="Room of an exchange, as ``set_split_experts`` left it, or a step that needed more.",
    method=set_split_experts,
    said="set_split_experts(capacity={})",
)
ROUTING = PassEntry(SplitRouting, "captured", after="assign_stages")
EXPERTS = PassEntry(SplitExperts, "captured", after="split_routing")
CHECK = ROOM_FOR_ROWS
PLAN = ExpertLines()
