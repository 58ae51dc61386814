"""The packages whose models the zoo tries, loaded once, before models' processes are forked."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import torch

USUAL = (
    "torchvision", "transformers", "transformers.modeling_utils", "transformers.masking_utils",
    "transformers.models.auto.modeling_auto", "transformers.integrations.moe", "transformers.loss.loss_utils",
    "transformers.modeling_rope_utils", "transformers.models.llama.modeling_llama", "torch._dynamo", "torch.export",
    "torch.distributed.tensor", "graphzero.graph",
)  # fmt: skip
_OPS: list[torch.library.Library] = []


def load() -> None:
    declare_torchvision_ops()
    for name in USUAL:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if importlib.util.find_spec("transformers"):
        name_rules()


def name_rules() -> None:
    """How transformers' own product of groups may be split; see ``products_in_float64``."""
    import graphzero as gz

    forward, backward = torch.ops.transformers.grouped_mm_fallback, torch.ops.transformers.grouped_mm_fallback_backward
    gz.sbp.rule(forward.default, "_k,_kn,~_->_n")
    gz.sbp.rule(backward.default, "~_k,~_kn,~_,_n->_k:123,_kn:023")


@contextmanager
def products_in_float64() -> Iterator[None]:
    """torch's product of groups takes no float64; transformers' own op stands in, for plain PyTorch too."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.integrations import moe

    with patch.object(moe, "_can_use_grouped_mm", lambda *args: False):
        yield


def _compiled() -> bool:
    """Whether torchvision's own ops load; PyPI's are built for CUDA."""
    try:
        import torchvision
    except Exception:
        return False
    return bool(torchvision.extension._has_ops())


def declare_torchvision_ops() -> None:
    """Where torchvision's compiled ops do not load, declare the two that it registers, so that the package loads.

    No classifier or segmentation model calls them.
    """
    if importlib.util.find_spec("torchvision") is None or _compiled():
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _OPS.append(library)
