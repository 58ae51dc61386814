"""An op that reads a number from memory computes what it computes with the number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import lower

from graphzero import _compat
from graphzero.ops import ADAM_
from graphzero.runtime.record.feeding import FORMS, Cells, Fed, Feeding, constants

aten = torch.ops.aten
NUMBER = 0.9973  # 0.9961 in bfloat16
CALLS: dict[tuple[str, Any], Any] = {  # by where the number stands: an op, and how it is called
    ("mul", 1): (aten.mul.out, lambda k, x, y: ((x, k), {})),
    ("div", 1): (aten.div.out, lambda k, x, y: ((x, k), {})),
    ("add", 1): (aten.add.out, lambda k, x, y: ((x, k), {})),
    ("sub", 1): (aten.sub.out, lambda k, x, y: ((x, k), {})),
    ("rsub", 1): (aten.rsub.Scalar_out, lambda k, x, y: ((x, k), {})),
    ("add", "alpha"): (aten.add.out, lambda k, x, y: ((x, y), {"alpha": k})),
    ("pow", 0): (aten.pow.Scalar_out, lambda k, x, y: ((k, x), {})),
    ("pow", 1): (aten.pow.Tensor_Scalar_out, lambda k, x, y: ((x, k), {})),
    ("lerp", 2): (aten.lerp.Scalar_out, lambda k, x, y: ((x, y, k), {})),
    ("addcmul", "value"): (aten.addcmul.out, lambda k, x, y: ((x, y, x), {"value": k})),
    ("addcdiv", "value"): (aten.addcdiv.out, lambda k, x, y: ((x, y, x), {"value": k})),
}


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CASES = [(key, d) for key, form in FORMS.items() for d in DTYPES if form.narrow or d is not torch.bfloat16]


@pytest.mark.parametrize("shape", [(5, 7), ()], ids=str)
@pytest.mark.parametrize("form, dtype", CASES, ids=str)
def test_each_form_computes_what_its_op_computes(form: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    op, written = CALLS[form]
    x, y = (torch.rand(shape, dtype=torch.float64).add(0.5).to(dtype) for _ in range(2))
    wide = torch.float32 if dtype is torch.bfloat16 else dtype  # some CPU kernels round the number to 16 bits first
    args, kwargs = written(NUMBER, x.to(wide), y.to(wide))
    wanted = op(*args, **kwargs, out=torch.empty_like(x, dtype=wide)).to(dtype)
    cells = Cells(x.device)
    args, kwargs = written(Fed.at_place(NUMBER, 3, cells), x, y)
    out = torch.empty_like(x)
    with Feeding() as feeding:
        found = _compat.direct(op)(*args, **kwargs, out=out)
    assert found is out and feeding.seen == {3}
    tolerance = {torch.bfloat16: 0.0, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_in_place_without_out_and_by_torchs_own_names_it_is_read_too() -> None:
    x, cells = torch.rand(4).bfloat16(), Cells(torch.device("cpu"))
    number = Fed.at_place(NUMBER, 0, cells)
    own, wanted = x.clone(), x * NUMBER
    with Feeding():
        found = torch.mul(x, number)
        assert _compat.direct(aten.mul_.Tensor)(own, number) is own
    for each in (found, own):
        torch.testing.assert_close(each, wanted, rtol=0, atol=0)


def test_what_is_filled_later_is_what_is_read() -> None:
    x, cells = torch.rand(4), Cells(torch.device("cpu"))
    number = Fed.at_place(0.0, 7, cells)
    with Feeding():
        torch.mul(x, number)
        cells.fill({7: 0.25, 8: 1.0})
        torch.testing.assert_close(torch.mul(x, number), x * 0.25)


def test_no_memory_is_taken_while_a_step_is_recorded() -> None:
    cells = Cells(torch.device("cpu"))
    cells.is_frozen = True
    with Feeding(), pytest.raises(RuntimeError, match="before this recording"):
        torch.mul(torch.ones(2), Fed.at_place(0.5, 0, cells))


def test_a_rate_of_fused_adam_is_read_by_its_kernel() -> None:
    cells, made = Cells(torch.device("cpu")), []
    for rate in (0.01, Fed.at_place(0.01, 0, cells)):
        torch.manual_seed(0)
        tensors = [torch.rand(40) for _ in range(4)]
        with Feeding():
            steps = [torch.ones((), dtype=torch.float64)]
            _compat.direct(ADAM_)(*([x] for x in tensors), [], steps, rate, 0.9, 0.99, 1e-8, 0.1)
        made.append(tensors)
    torch.testing.assert_close(*made, rtol=1e-6, atol=1e-7)


def test_a_number_is_a_constant_where_an_op_reads_it_that_has_no_form() -> None:
    graph = lower("""
graph step(dp=1)
  x  = batch()  : f32[4, 2]
  h  = batch()  : bf16[4, 2]
  i  = batch()  : i64[4, 2]
  a  = scalar() : float
  b  = scalar() : float
  c  = scalar() : float
  d  = scalar() : float
  e  = scalar() : float
forward:
  x1 = mul(x, a)                     : f32[4, 2]
  x2 = lerp.Scalar(x1, x, a)         : f32[4, 2]
  h1 = mul(h, b)                     : bf16[4, 2]
  h2 = lerp.Scalar(h1, h, c)         : bf16[4, 2]
  x3 = clamp.default(x2, d, None)    : f32[4, 2]
  x4 = mul(x3, d)                    : f32[4, 2]
  f  = operator.mul(e, 2.0)          : float
  i1 = mul(i, f)                     : f32[4, 2]
  return h2, x4, i1
""")
    found = {name: node if node is None else node.name for name, node in constants(graph).items()}
    assert found == {"a": None, "b": None, "c": "h2", "d": "x3", "f": "i1"}
