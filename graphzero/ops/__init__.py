"""The tensor ops that graphzero adds to ATen, one file a kind: its schema, kernel, shapes and gradient.

Collectives and the other ops that passes insert, which no user calls, are in ``graphzero.ir.ops``.
"""

from graphzero.ops import offset_index
from graphzero.ops.adam import ADAM, ADAM_
from graphzero.ops.adam_rounded import ADAM_ROUNDED, ADAM_ROUNDED_
from graphzero.ops.attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from graphzero.ops.cross_entropy import CROSS_ENTROPY_BACKWARD
from graphzero.ops.embedding_bag import BAG, BAG_BACKWARD, BAG_SCALES_BACKWARD
from graphzero.ops.grouped_mm import GROUPED_MM
from graphzero.ops.local_region import AS_GLOBAL, AS_LOCAL, FREE, SAME, dual
from graphzero.ops.markers import CHECK, MOVE, PIN
from graphzero.ops.random import RANK_KEY, UNIFORM_LIKE
from graphzero.ops.stochastic_round import STOCHASTIC_ROUND
