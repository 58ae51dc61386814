"""The tensor ops that graphzero adds to ATen, one file an op: its schema, kernel, shapes and gradient."""

from graphzero.ops import offset_index as offset_index
from graphzero.ops.adam import ADAM as ADAM
from graphzero.ops.adam import ADAM_ as ADAM_
from graphzero.ops.adam_rounded import ADAM_ROUNDED as ADAM_ROUNDED
from graphzero.ops.adam_rounded import ADAM_ROUNDED_ as ADAM_ROUNDED_
from graphzero.ops.attention import ATTENTION as ATTENTION
from graphzero.ops.attention import ATTENTION_BACKWARD as ATTENTION_BACKWARD
from graphzero.ops.attention import ATTENTION_BLOCK as ATTENTION_BLOCK
from graphzero.ops.attention import ATTENTION_BLOCK_BACKWARD as ATTENTION_BLOCK_BACKWARD
from graphzero.ops.cross_entropy import CROSS_ENTROPY_BACKWARD as CROSS_ENTROPY_BACKWARD
from graphzero.ops.embedding_bag import BAG as BAG
from graphzero.ops.embedding_bag import BAG_BACKWARD as BAG_BACKWARD
from graphzero.ops.embedding_bag import BAG_SCALES_BACKWARD as BAG_SCALES_BACKWARD
from graphzero.ops.grouped_mm import GROUPED_MM as GROUPED_MM
from graphzero.ops.local_region import AS_GLOBAL as AS_GLOBAL
from graphzero.ops.local_region import AS_LOCAL as AS_LOCAL
from graphzero.ops.local_region import FREE as FREE
from graphzero.ops.local_region import SAME as SAME
from graphzero.ops.local_region import dual as dual
from graphzero.ops.move import MOVE as MOVE
from graphzero.ops.pin_check import CHECK as CHECK
from graphzero.ops.pin_check import PIN as PIN
from graphzero.ops.pin_check import ROOM_FOR_ROWS as ROOM_FOR_ROWS
from graphzero.ops.random import RANK_KEY as RANK_KEY
from graphzero.ops.random import UNIFORM_LIKE as UNIFORM_LIKE
from graphzero.ops.stochastic_round import STOCHASTIC_ROUND as STOCHASTIC_ROUND
