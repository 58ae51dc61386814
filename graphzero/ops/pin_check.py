"""The ops ``pin``, which marks a value whose SBP is fixed, and ``check``, a condition that a step must meet.

``pin`` is the identity.  A Graph's step raises where a ``check`` does not hold.
"""

from __future__ import annotations

import torch

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("pin(Tensor x, int id) -> Tensor")
LIBRARY.define("check(Tensor ok, str message) -> Tensor")
PIN = torch.ops.graphzero.pin.default
CHECK = torch.ops.graphzero.check.default
ROOM_FOR_ROWS = "room for the rows of experts"  # what a check of ours says, which the Graph answers itself
LIBRARY.impl("pin", lambda x, id: x.clone(), ANYWHERE)
LIBRARY.impl("check", lambda ok, message: ok.clone(), ANYWHERE)
torch.library.register_autograd("graphzero::pin", lambda ctx, grad: (grad, None), lib=LIBRARY)
