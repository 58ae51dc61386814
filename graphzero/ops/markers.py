"""The ops ``pin``, ``check`` and ``move``, which change no value.

``pin`` marks a value whose SBP is fixed, ``check`` a condition that a step must meet: a Graph's step raises where it
does not hold.  ``move`` is a value of one pipeline stage on another one: where stages have ranks of their own, it is
what one stage sends and another one receives.
"""

from __future__ import annotations

import torch

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("pin(Tensor x, int id) -> Tensor")
LIBRARY.define("check(Tensor ok, str message) -> Tensor")
LIBRARY.define("move(Tensor x, int stage) -> Tensor")
PIN = torch.ops.graphzero.pin.default
CHECK = torch.ops.graphzero.check.default
MOVE = torch.ops.graphzero.move.default
for _name in ("pin", "check", "move"):
    LIBRARY.impl(_name, lambda x, about: x.clone(), ANYWHERE)
torch.library.register_autograd("graphzero::pin", lambda ctx, grad: (grad, None), lib=LIBRARY)
