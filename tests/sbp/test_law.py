"""Every rule keeps the one law, and the law catches rules that are wrong."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from samples import LOCALIZED_ELSEWHERE, NO_CPU_KERNEL, UNCHECKED_VALUES, Sample, by_op, samples

from graphzero.ir.known_ops import NAMESPACES
from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import registered
from graphzero.sbp.rule_checks import violations


@pytest.mark.parametrize("calls", [pytest.param(group, id=op_name(op)) for op, group in by_op()])
def test_every_signature_joins_to_the_op_itself(calls: list[Sample]) -> None:
    broken = [
        f"{call} on {ranks} ranks: {line}"
        for call, ranks in product(calls, (2, 3))
        for line in violations(call.op, call.args, call.kwargs, ranks, values=op_name(call.op) not in UNCHECKED_VALUES)
    ]
    assert not broken, "\n".join(broken)


def test_every_op_with_a_rule_has_a_sample() -> None:
    tried = {op_name(sample.op) for sample in samples()} | {*LOCALIZED_ELSEWHERE, *NO_CPU_KERNEL}
    ours = {op_name(op) for op in registered() if op.namespace in NAMESPACES}  # others come with tests that need them
    assert len(ours) > 600 and ours <= tried


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 6), (1, 2, 3)), ((6, 1), (2, 3, 1)), ((0, 6), (0, 3, 2)), ((6, 0), (3, 2, 0)), ((0,), (3, 0)),
        ((0, 5), (7, 0)), ((2, 0, 4), (0,)), ((0, 1), (1, 0)),
    ],
)  # fmt: skip
def test_views_of_dims_of_one_and_of_no_elements_keep_it(
    before: tuple[int, ...], after: tuple[int, ...], ranks: int
) -> None:
    assert not violations(torch.ops.aten.view.default, (torch.rand(before), list(after)), {}, ranks)
