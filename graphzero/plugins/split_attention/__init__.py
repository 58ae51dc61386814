"""Attention over a split sequence: ranks exchange heads, gather keys, or let keys go round."""

from graphzero.passes import PassEntry
from graphzero.plugins.split_attention.attention_choice import has_ring
from graphzero.plugins.split_attention.attention_fit import AttentionFit
from graphzero.plugins.split_attention.ring_attention import RingAttention
from graphzero.plugins.split_attention.setting import SETTING, ways_of
from graphzero.plugins.split_attention.split_attention import SplitAttention

__all__ = ["PLAN", "RING", "SETTING", "SPLIT"]

SPLIT = PassEntry(SplitAttention, "captured", after="assign_stages")
RING = PassEntry(RingAttention, "lowered", lambda options: has_ring(ways_of(options)), after="lower_boxing")
PLAN = AttentionFit()
