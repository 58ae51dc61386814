"""The law holds on every ATen call that PyTorch's own operator samples make, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import UNCHECKED_VALUES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphzero.sbp.call import op_name
from graphzero.sbp.law import meta_of, violations
from graphzero.sbp.registry import has_rule

pytest.importorskip("expecttest", reason="PyTorch's operator samples need expecttest")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

FAMILIES = ("linalg", "fft", "sparse", "special", "masked", "signal", "_refs", "jiterator", "svd")  # few rules there
SAMPLES = 6


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_rule(func):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _small(x: torch.Tensor) -> bool:
    """Huge values drown the partial addends, which are of order ten."""
    return not x.is_floating_point() or bool(x.abs().sum() < 1e5)


def calls(info: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The ATen calls under one operator's samples, each kind once."""
    seen = set()
    for sample in list(info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd))[:SAMPLES]:
        with Recorder() as recorder:
            try:
                out = info(sample.input, *sample.args, **sample.kwargs)
                results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                if results:
                    torch.autograd.backward(results, [torch.rand_like(x) for x in results])
            except (RuntimeError, TypeError, NotImplementedError):
                pass  # samples that are meant to fail, and outputs without gradients
        for op, args, kwargs in recorder.calls:
            call = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            tensors = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
            key = (op, str(tree_map(lambda x: meta_of(x) if isinstance(x, torch.Tensor) else x, call)))
            plain = all(x.layout == torch.strided and x.numel() < 4000 and _small(x) for x in tensors)
            if key not in seen and plain:
                seen.add(key)
                yield op, *call


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(info, id=info.full_name)
        for info in op_db
        if torch.float64 in info.supported_dtypes("cpu") and not info.name.startswith(FAMILIES)
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_signature_of_every_call_joins_to_the_op_itself(info: Any) -> None:
    broken = [
        line
        for op, args, kwargs in calls(info)
        for ranks in (2, 3)
        for line in violations(op, args, kwargs, ranks, values=op_name(op) not in UNCHECKED_VALUES)
    ]
    assert not broken, "\n".join(broken)
