"""Splits of a model's weights that its transformers configuration names: ``to_global(model, placement, sbp="auto")``.

``base_model_tp_plan`` is for an axis ``tp``, ``base_model_ep_plan`` for an axis ``ep``.  Each maps paths of modules or
parameters, with ``*`` for the number of a layer, to a style (transformers 5.23, ``distributed/tensor_parallel.py`` and
``expert_parallel.py``).  Only what a style says of weights is read: which activations follow is propagation's work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from graphzero.errors import SbpError
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd, S, Sbp

PLANS = {"tp": "base_model_tp_plan", "ep": "base_model_ep_plan"}
OUTPUTS, INPUTS = -2, -1  # dims of a weight; a bias has outputs alone
SPLITS: dict[str, tuple[int, int]] = {  # style -> the dim that is split, and its sections
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), (OUTPUTS, 1)),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), (INPUTS, 1)),
    "packed_colwise": (OUTPUTS, 2),
    "packed_rowwise": (INPUTS, 2),
    "embedding_rowwise": (0, 1),
    "embedding_colwise": (1, 1),
    "grouped_gemm": (0, 1),
}
WHOLE = (  # styles of activations, or of weights that every rank has
    "all_reduce", "ep_dispatch_experts", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts",
    "replicate", "replicated_with_grad_allreduce", "sequence_parallel",
)  # fmt: skip


def planned_splits(module: nn.Module, placement: Placement) -> dict[str, Nd]:
    """The SBPs of the parameters that the plans split, by name.

    Raises SbpError where no axis has a plan, for a style that is not known, and for an entry that fits no parameter.
    """
    axes = [name for name in placement.names if name in PLANS]
    if not axes:
        raise SbpError(
            f'to_global(sbp="auto"): of the axes {", ".join(placement.names)} none is called tp or ep, for which a '
            "configuration has plans\n  Name an axis so, or give the splits: sbp={'*.experts.*': S(0)}"
        )
    splits: dict[str, dict[str, Sbp]] = {}
    for axis in axes:
        split_here = dict(_splits_on(module, PLANS[axis]))
        if not split_here:
            raise SbpError(
                f'to_global(sbp="auto"): no configuration in this {type(module).__name__} has a {PLANS[axis]} that '
                f"splits weights over {axis}\n  Give the splits: sbp={{'*.q_proj.weight': S(0)}}"
            )
        for name, sbp in split_here.items():
            splits.setdefault(name, {})[axis] = sbp
    return {name: tuple(on.get(axis, B) for axis in placement.names) for name, on in splits.items()}


def _splits_on(module: nn.Module, attribute: str) -> Iterator[tuple[str, Sbp]]:
    """(name of a parameter, its split) by the plans of the models in ``module`` that have the modules they name."""
    for path, model in module.named_modules():
        plan = getattr(getattr(model, "config", None), attribute, None)
        if not isinstance(plan, Mapping) or not all(hasattr(model, entry.split(".")[0]) for entry in plan):
            continue
        for name, parameter in model.named_parameters(remove_duplicate=False):
            style = next((style for entry, style in plan.items() if _fits(entry, name)), None)
            sbp = B if style is None else _sbp(style, parameter, attribute, name)
            if sbp is not B:
                yield f"{path}.{name}" if path else name, sbp


def _fits(entry: str, name: str) -> bool:
    """Return whether an entry names a parameter or its module."""
    pattern = re.escape(entry).replace(r"\*", r"[^.]+")
    return re.fullmatch(rf"{pattern}(\.[^.]+)?", name) is not None


def _sbp(style: str, parameter: Tensor, attribute: str, name: str) -> Sbp:
    if style in WHOLE:
        return B
    if style not in SPLITS:
        raise SbpError(
            f'to_global(sbp="auto"): {attribute} has style {style!r} for {name}, and known are '
            f"{', '.join((*SPLITS, *WHOLE))}\n  Give the splits yourself: sbp={{name or pattern: SBPs}}"
        )
    dim, sections = SPLITS[style]
    if dim == INPUTS and parameter.dim() == 1:
        return B  # a bias is added after the sum
    return S(max(dim + parameter.dim(), 0) if dim < 0 else dim, sections)
