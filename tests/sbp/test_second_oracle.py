"""DTensor's sharding rules as a second opinion: what they know and ours do not is written down here, with the reason.

Each call of ``samples`` is shown to both, on two ranks.  What DTensor allows and our law proves must be allowed by
our rule too, or stand in LACKING; what DTensor allows and the law refutes is DTensor's mistake, or true of other sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from samples import UNCHECKED_VALUES, Sample, samples
from torch.utils._pytree import tree_leaves

from graphzero.sbp import rule_checks
from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import signatures
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp, partial
from graphzero.testing import fake_world

validation = pytest.importorskip("torch.distributed.tensor._ops.strategy_validation")
pytestmark = pytest.mark.skipif(
    not hasattr(validation, "_query_dtensor_rules"), reason="this torch cannot be asked for DTensor's rules"
)

TURNS = "a maximum of it is a minimum of the operand, and a line has one kind of partial value"
NAN = "not where a NaN is in a piece: it wins a maximum, and the op drops it"
LACKING = {
    "_reshape_alias": "its strides are of the whole",
    "_to_copy": "a large float wraps when it becomes a whole number, and wrapping keeps no order",
    "aminmax": "capture writes it as amin and amax, which have it",
    "any": "truth values do not add; as P(max) the rule has it",
    "bucketize": NAN,
    "erfc": TURNS,
    "fmax": NAN,
    "fmin": NAN,
    "index_put": "capture writes a mask with one value as where, which has it",
    "index_select": "a number has no dim that could be read in pieces",
    "linalg_vector_norm": "true of what is nowhere negative: the norm is of magnitudes",
    "logaddexp": NAN,
    "logaddexp2": NAN,
    "lu_unpack": "what is not asked for is an empty vector, which is whole",
    "nan_to_num": NAN,
    "nansum": NAN,
    "neg": TURNS,
    "special_erfcx": TURNS,
    "special_modified_bessel_k0": TURNS,
    "special_modified_bessel_k1": TURNS,
    "special_scaled_modified_bessel_k0": TURNS,
    "special_scaled_modified_bessel_k1": TURNS,
    "special_xlog1py": "0 times the logarithm of 0 is 0 here, which pieces that are not 0 do not add up to",
    "squeeze_copy": "a rank whose piece has size one would remove the dim",
    "threshold": "a value above the threshold is not the least that the op gives",
    "view": "other bits of the same storage: the last dim changes its size",
    "view_copy": "other bits of the same storage: the last dim changes its size",
}


def _sbp(text: str) -> Sbp:
    kind, _, inner = text.strip().rstrip(")").partition("(")
    return {"R": lambda: B, "S": lambda: S(int(inner)), "P": lambda: partial(inner)}[kind]()


def _known_to_dtensor(sample: Sample, made: list[torch.Tensor]) -> Iterator[Signature]:
    """What DTensor allows for a call and our SBP has a name for, of splits that cut evenly."""
    tensors = [("", x) for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    shapes = [[tuple(x.shape) for x in group] for group in ([x for _, x in tensors], made)]
    asked = (sample.op, tensors, sample.args, sample.kwargs, *map(tuple, shapes), 2, False)
    for combination in validation._query_dtensor_rules(*asked):
        if not all(
            text[:2] in ("R", "S(") or text in ("P(sum)", "P(max)", "P(min)") for c in combination for text in c
        ):
            continue
        signature = Signature(*(tuple(map(_sbp, side)) for side in combination))
        placed = zip((*signature.inputs, *signature.outputs), sum(shapes, []), strict=False)
        whole = (len(signature.inputs), len(signature.outputs)) == tuple(map(len, shapes))
        even = all(not s.is_split or (s.dim < len(x) and x[s.dim] % 2 == 0) for s, x in placed)
        sums = not any(s.reduction in ("max", "min") for s in (*signature.inputs, *signature.outputs))
        if whole and even and (sums or not any(x.is_complex() for x in (*made, *(x for _, x in tensors)))):
            yield signature


@cache
def lacking() -> tuple[dict[str, set[str]], int]:
    """Proven signatures that our rules lack, by op, and how many DTensor has that ours have too."""
    found: dict[str, set[str]] = defaultdict(set)
    shared = 0
    with fake_world(2):
        for sample in samples():
            if sample.op.namespace != "aten" or op_name(sample.op) in UNCHECKED_VALUES:
                continue
            whole = rule_checks._outputs(sample.op(*sample.args, **sample.kwargs))
            metas, made = rule_checks._metas(sample.args, sample.kwargs, whole)
            ours = set(signatures(sample.op, *metas, made, 2))
            for signature in _known_to_dtensor(sample, [x for x in whole if x is not None]):
                shared += signature in ours
                call = (tuple(sample.args), dict(sample.kwargs))
                if signature not in ours and not rule_checks._broken(sample.op, call, whole, signature, 2, True):
                    found[sample.op._schema.name.removeprefix("aten::")].add(f"{signature} of {sample}")
    return found, shared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_dtensor_knows_and_we_lack_has_a_reason() -> None:
    found, shared = lacking()
    assert shared > 1000
    unknown = {name: lines for name, lines in found.items() if name not in LACKING}
    assert not unknown, "\n".join(f"{name}: {sorted(lines)}" for name, lines in unknown.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_reason_is_left_for_what_our_rules_have() -> None:
    found, _ = lacking()
    assert set(LACKING) == set(found), set(LACKING) - set(found)


def test_a_placement_of_dtensor_reads_as_an_sbp() -> None:
    assert [_sbp(text) for text in ("R", "S(1)", "P(sum)", "P(max)")] == [B, S(1), partial(), partial("max")]
