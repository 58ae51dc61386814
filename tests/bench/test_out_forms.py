"""What is said of kernels that are told where to write is what PyTorch's own operator samples show."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator samples need expecttest")
import out_forms  # noqa: E402

from graphzero.ir.storage import kernel_forms  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore")


def test_some_operators_are_right_in_every_form_that_they_are_given() -> None:
    found = out_forms.measure([torch.float32], most=1, every=25)
    assert len(found) > 30
    assert not out_forms.problems(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", out_forms.DTYPES, ids=str)
def test_every_operator_is_right_in_every_form_that_it_is_given(dtype: torch.dtype) -> None:
    found = out_forms.measure([dtype], most=2, allowed_only=True)
    assert not out_forms.problems(found)


def test_a_table_that_allows_what_goes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    calls = [
        out_forms.Call(aten._softmax.default, (x, 1, False), {}),
        out_forms.Call(aten.cumsum.default, (x, 1), {}),
        out_forms.Call(aten.add.Tensor, (x, y), {}),
    ]
    found = {call.op: out_forms.facts_of([call]) for call in calls}
    assert not out_forms.problems(found)
    monkeypatch.setattr(kernel_forms, "ROWS_ONLY", frozenset())
    monkeypatch.setattr(kernel_forms, "ANY_STRIDES", kernel_forms.ANY_STRIDES | {"_softmax"})
    assert any(line.startswith("_softmax, out, turned") for line in out_forms.problems(found))


def test_what_was_not_tried_is_in_no_table_that_allows_something() -> None:
    x = torch.rand(3, 4)
    found = {op: out_forms.facts_of([out_forms.Call(op, (x,), {})]) for op in (aten.neg.default, aten.relu.default)}
    tables = out_forms.Tables.of(found)
    assert set(tables.ANY_STRIDES) == {"neg"}
    assert set(tables.OVER_FIRST) == {"neg", "relu"}
    assert tables.text().count("_names(") == len(fields(tables))


def test_a_process_that_dies_of_a_kernel_says_so() -> None:
    dies = out_forms.Call(aten.neg.default, (torch.rand(3, 4),), {"no such": 1})
    assert out_forms.facts_of([dies]) is not None  # an op that fails is no death
    assert out_forms.problems({aten.neg.default: None}) == ["neg: the process died"]


def test_a_name_that_is_in_a_table_is_that_of_an_op_with_a_form() -> None:
    for name in kernel_forms.ANY_STRIDES | kernel_forms.ROWS_ONLY:
        assert kernel_forms.out_form(_op(name)) is not None, name
    for name in kernel_forms.OVER_FIRST:
        assert kernel_forms.in_place_form(_op(name)) is not None, name


def _op(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("graphzero.")
    packet, _, overload = (rest or name).partition(".")
    found = getattr(torch.ops.graphzero if rest else aten, packet)
    return getattr(found, overload or "default")
