"""Forms of ops that write where they are told: each takes the arguments that the op was given."""

import pytest
import torch

from graphzero.ir.storage import kernel_forms

aten = torch.ops.aten
WITH_NUMBERS = [
    aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.fmod.Scalar,
    aten.remainder.Scalar, aten.bitwise_and.Scalar, aten.bitwise_left_shift.Tensor_Scalar, aten.copysign.Scalar,
    aten.xlogy.Scalar_Other, aten.eq.Scalar, aten.lt.Scalar, aten.add.Tensor, aten.mul.Tensor,
]  # fmt: skip


@pytest.mark.parametrize("op", WITH_NUMBERS, ids=str)
def test_a_form_takes_a_number_where_the_op_does(op):
    integral = "bitwise" in str(op)
    x = torch.arange(1, 7) if integral else torch.rand(6) + 0.5
    wanted = op(x, 2)
    found = kernel_forms.writing(op)
    if found is not None:
        call, keyword = found
        room = torch.empty_like(wanted)
        call(x, 2, **{keyword: room})
        assert torch.equal(room, wanted)
    over = kernel_forms.over_first(op)
    if over is not None and wanted.dtype == x.dtype:
        over(x, 2)
        assert torch.equal(x, wanted)


def test_frequent_ops_have_a_form():
    assert all(
        kernel_forms.writing(op) for op in (aten.add.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.mm.default)
    )
