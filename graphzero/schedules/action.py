"""The cell of a schedule: an action of one stage on one micro-batch, and its text.

The text is that of torch.distributed.pipelining: ``0F3`` (stage 0, forward, micro-batch 3), ``1SEND_B2``, ``2UNSHARD``,
``(0F1;3B0)OVERLAP_F_B``.  Torch's own parser takes the first match and drops what follows it, so that ``0F3xyz`` is 0F3
and ``0B1W2`` is 0B1; the parser here refuses what it does not understand whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from graphzero.errors import ScheduleError


class ActionKind(str, Enum):
    """The kinds of action, by their words in torch.distributed.pipelining.

    BACKWARD is BACKWARD_INPUT, the gradient of what the stage received, and BACKWARD_WEIGHT, those of its parameters,
    in one (Zero Bubble Pipeline Parallelism, Qi et al., 2023, where they are called B and W).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"  # the output, to the next stage
    RECEIVE_FORWARD = "RECV_F"  # from the stage before
    SEND_BACKWARD = "SEND_B"  # the gradient of the input, to the stage before
    RECEIVE_BACKWARD = "RECV_B"  # from the next stage
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"  # a forward and a backward action of different stages, side by side

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # that of Enum is written in Python, and these are hashed for every action


COMPUTATIONS = frozenset(
    [ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
)
SENDS = frozenset([ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD])
RECEIVES = frozenset([ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD])
SHARDING = frozenset([ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD])  # of one micro-batch, or of all

NUMBER = "0|[1-9][0-9]{0,8}"
WORDS = "|".join(sorted((kind.value for kind in ActionKind if kind is not ActionKind.OVERLAP), key=len, reverse=True))
SINGLE = re.compile(rf"({NUMBER})({WORDS})({NUMBER})?")
COMPOUND = re.compile(rf"\(([^()]*)\){ActionKind.OVERLAP.value}")
EXPECTED = "expected a stage, a kind of action and a micro-batch, as in 0F3, 2B0, 1SEND_F4 or (0F1;3B0)OVERLAP_F_B"


@dataclass(frozen=True)
class Action:
    """One action of ``stage`` on ``micro_batch``.

    micro_batch: None for UNSHARD, RESHARD and REDUCE_GRAD of all.  parts: of OVERLAP, the forward and the backward
    action; its own stage is -1.
    """

    stage: int
    kind: ActionKind
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def computations(self) -> tuple[Action, ...]:
        """The F, B, I and W of this cell: itself, its parts, or none."""
        return self.parts or ((self,) if self.kind in COMPUTATIONS else ())


def parse_action(text: str) -> Action:
    """The action that is written ``text``.  Raises ScheduleError if there is any doubt about it."""
    text = text.strip(" \t")
    if compound := COMPOUND.fullmatch(text):
        parts = tuple(map(parse_action, compound[1].split(";")))
        kinds = [part.kind for part in parts]
        backward = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        if len(kinds) != 2 or ActionKind.FORWARD not in kinds or not any(kind in backward for kind in kinds):
            raise ScheduleError(f"{text!r} is not an action: expected one F and one B or I in the brackets")
        return Action(-1, ActionKind.OVERLAP, parts=parts)
    single = SINGLE.fullmatch(text)
    if single is None:
        raise ScheduleError(f"{text!r} is not an action: {EXPECTED}")
    kind = ActionKind(single[2])
    if single[3] is None and kind not in SHARDING:
        raise ScheduleError(f"{text!r} is not an action: expected a micro-batch after {kind}, as in {text}0")
    return Action(int(single[1]), kind, None if single[3] is None else int(single[3]))
