"""On PyTorch's own operator samples no captured step and no signature of its calls gives another result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator samples need expecttest")
import ops  # noqa: E402

BARE = {
    # sparse layouts, which rules say nothing of; and losses whose kernel loops over chunks of the batch
    "aten._to_sparse.default",
    "aten._to_sparse.sparse_dim",
    "torch_nn._linear_cross_entropy_batch_chunked.default",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default",
}


@pytest.mark.filterwarnings("ignore")
def test_some_operators_agree_in_every_signature_of_every_call() -> None:
    found = ops.tally_samples(torch.float64, set(), every=40, most=2)
    assert found.samples > 20
    assert found.split > 20
    assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in ops.DTYPES if d != torch.float32], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_operator_agrees_in_every_signature_of_every_call(dtype: torch.dtype) -> None:
    """In the floating dtypes beside float64 every second one: neither rules nor captures choose by them."""
    every = 2 if dtype in (torch.bfloat16, torch.complex128) else 1
    found = ops.tally_samples(dtype, set(), every, most=2 if dtype == torch.float64 else 1)
    assert found.samples > 100
    assert not found.wrong, "\n".join(found.wrong)
    assert set(found.bare) <= BARE, "give these a rule, or say in sbp/rules/broadcast_only.py why they have none"


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_rule_and_a_wrong_capture_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "violations", lambda *args, **kwargs: ["a wrong signature"])
    found = ops.tally_samples(torch.float64, set(), every=300, most=1)
    assert "a wrong signature" in found.wrong
    monkeypatch.setattr(ops, "violations", lambda *args, **kwargs: [])

    def off_by_one(step: Any, captured: Any, graph: Any) -> Any:
        values = original(step, captured, graph)
        return {node: x + 1 if node in graph.outputs else x for node, x in values.items()}

    original = ops.SampledStep.compute_values
    monkeypatch.setattr(ops.SampledStep, "compute_values", off_by_one)
    found = ops.tally_samples(torch.float64, set(), every=300, most=1)
    assert any("computes something else" in line for line in found.wrong)
