"""Checks of operands before kernels that would access memory out of bounds: for programs read from a text.

In a captured program an index comes from the op that chose it, and a gradient has the shape of its value.  ATen's
backward kernels rely on that without a check, so an index in a text that lies outside of its tensor, or a gradient of
another shape, would read and write foreign memory.  ``KernelGuard`` checks before each of these kernels, and before
graphzero's own ops that call them, and raises.  Programs that were captured run without it.

``CONDITIONS`` has the ops whose kernels do not look themselves, as found by calling ATen's with operands altered one at
a time before a page that may not be read.  A condition is given the operands by their names in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero.errors import VerifyError

aten = torch.ops.aten
_MEAN, _MAX = 1, 2  # modes of an embedding bag


class UnmetCondition(Exception):
    """Says what an op is given that it must not be given."""


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise UnmetCondition(problem)


def _shape(x: Tensor | None, shape: Any, what: str) -> None:
    _need(x is None or tuple(x.shape) == tuple(shape), f"a {what} of other sizes than {list(shape)}")


def _inside(x: Tensor, size: int, what: str, first: int = 0, but: int | None = None) -> None:
    """Check that all numbers lie from ``first`` to ``size``, except those that equal ``but``."""
    outside = (x < first) | (x >= size)
    outside = outside if but is None else outside & (x != but)
    _need(not bool(outside.any()), f"{what} outside of {first} to {size - 1}")


def _meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# ---- by kind of op


def _pool(forward: Any, dims: int, a: Any) -> None:
    """Checks of a pooling with windows, whose result has the gradient's sizes; indices of maxima lie in the image."""
    _need(a.self.dim() in (dims + 1, dims + 2), f"an input that is not an image of {dims} dims")
    own = {"dilation", "ceil_mode", "count_include_pad", "divisor_override"} & vars(a).keys()
    result = forward(_meta(a.self), a.kernel_size, a.stride, a.padding, **{name: getattr(a, name) for name in own})
    result = result[0] if isinstance(result, tuple) else result
    _shape(a.grad_output, result.shape, "gradient")
    _indices(a, dims)


def _adaptive_pool(dims: int, a: Any) -> None:
    _need(a.self.dim() in (dims + 1, dims + 2), f"an input that is not an image of {dims} dims")
    _shape(a.grad_output, (*a.self.shape[:-dims], *a.grad_output.shape[-dims:]), "gradient")
    _need(prod(a.self.shape[-dims:]) > 0, "an input without elements")
    _indices(a, dims)


def _fractional_pool(dims: int, a: Any) -> None:
    _shape(a.grad_output, (*a.self.shape[:-dims], *a.output_size), "gradient")
    _indices(a, dims)


def _indices(a: Any, dims: int) -> None:
    if "indices" in vars(a):
        _shape(a.indices, a.grad_output.shape, "tensor of indices")
        _inside(a.indices, prod(a.self.shape[-dims:]), "an index")


def _padding(dims: int, a: Any) -> None:
    _need(len(a.padding) == 2 * dims and a.self.dim() in (dims + 1, dims + 2), "another number of dims")
    more = [a.padding[2 * i] + a.padding[2 * i + 1] for i in reversed(range(dims))]
    sizes = [n + m for n, m in zip(a.self.shape[-dims:], more, strict=True)]
    _shape(a.grad_output, (*a.self.shape[:-dims], *sizes), "gradient")


def _grid(dims: int, a: Any) -> None:
    _need(a.input.dim() == a.grid.dim() == dims + 2, f"an input that is not an image of {dims} dims")
    _shape(a.grid, (a.input.shape[0], *a.grid.shape[1:-1], dims), "grid")
    _shape(a.grad_output, (*a.input.shape[:2], *a.grid.shape[1:-1]), "gradient")


def _softmax(a: Any) -> None:
    _shape(a.grad_output, a.output.shape, "gradient")


def _batch_norm(a: Any) -> None:
    given, x = vars(a), a.input
    _need(x.dim() >= 2, "an input without channels")
    for name in ("grad_out", "grad_output"):
        _shape(given.get(name), x.shape, "gradient")
    for name in ("weight", "bias", "running_mean", "running_var"):
        _shape(given.get(name), x.shape[1:2], name)
    trains = bool(given.get("train", given.get("update", False)))
    for name in ("save_mean", "save_invstd", "save_var"):
        saved = given.get(name)
        if saved is not None and (trains or saved.numel()):
            _shape(saved, x.shape[1:2], name)
    if "save_mean" in given:
        complete = (given.get("save_mean"), given.get("save_invstd", given.get("save_var")))
        needed = complete if trains else (a.running_mean, a.running_var)
        _need(all(one is not None and one.numel() == x.shape[1] for one in needed), "no statistics of its channels")


def _layer_norm(a: Any) -> None:
    inner = len(a.normalized_shape)
    _shape(a.grad_out, a.input.shape, "gradient")
    _need(tuple(a.input.shape[a.input.dim() - inner :]) == tuple(a.normalized_shape), "other dims than it normalises")
    rows = prod(a.input.shape[: a.input.dim() - inner])
    for name in ("mean", "rstd"):
        one = vars(a).get(name)
        _need(one is None or one.numel() == rows, f"a {name} of other rows")
    for name in ("weight", "bias"):
        _shape(vars(a).get(name), a.normalized_shape, name)


def _group_norm(a: Any) -> None:
    _shape(a.grad_out, a.input.shape, "gradient")
    _need(a.input.numel() == a.N * a.C * a.HxW and a.group > 0 and a.C % a.group == 0, "other sizes than it says")
    for one in (a.mean, a.rstd):
        _need(one.numel() == a.N * a.group, "statistics of other groups")
    _shape(a.weight, (a.C,), "weight")


def _nll(a: Any) -> None:
    """Check nll_loss and nll_loss2d, forward and backward."""
    given, x = vars(a), a.self
    _need(x.dim() in (1, 2, 4), "scores of another number of dims")
    at = 0 if x.dim() == 1 else 1
    _shape(a.target, (*x.shape[:at], *x.shape[at + 1 :]), "target") if x.dim() > 1 else None
    _need(x.dim() > 1 or a.target.numel() == 1, "several targets of one sample")
    _shape(a.weight, x.shape[at : at + 1], "weight")
    _inside(a.target, given.get("total", x.shape[at]), "a class", but=a.ignore_index)
    if "grad_output" in given:
        whole = a.target.shape if a.reduction == 0 and x.dim() > 1 else ()
        _need(a.grad_output.numel() == prod(whole), "a gradient of other sizes than the loss")
        _need(a.total_weight.numel() == 1, "a total weight that is not a number")


def _bag(a: Any) -> None:
    given = vars(a)
    rows = a.weight.shape[0] if "weight" in given else a.num_weights
    bags, count = a.grad.shape[0], a.indices.numel()
    offsets = given.get("offsets")
    _need(a.grad.dim() == 2 and a.indices.dim() == 1, "indices and gradients of other dims")
    _need("weight" not in given or a.weight.shape[1:] == a.grad.shape[1:], "a gradient of another width")
    _inside(a.indices, rows, "an index")
    if offsets is not None:
        _offsets(a)
        has_end = offsets.numel() == bags + 1 and int(offsets[-1]) == count
        _need(has_end or offsets.numel() == bags, "other offsets than bags")
    if a.offset2bag.numel() or offsets is None:
        _shape(a.offset2bag, (count,), "bag of each index")
        _inside(a.offset2bag, bags, "a bag")
    if "bag_size" in given and a.mode == _MEAN:
        _need(a.bag_size.numel() >= bags, "fewer sizes than bags")
    if "maximum_indices" in given and a.mode == _MAX:
        _shape(a.maximum_indices, a.grad.shape, "tensor of largest indices")
        _inside(a.maximum_indices, rows, "a largest index", first=-1)
    weights = given.get("per_sample_weights")
    _need(weights is None or weights.numel() == count, "other weights than indices")


def _offsets(a: Any) -> None:
    """Check the offsets of bags of ``indices``."""
    _inside(a.offsets, a.indices.numel() + 1, "an offset")
    _need(a.offsets.dim() == 1, "offsets of other dims")
    _need(not bool((a.offsets[1:] < a.offsets[:-1]).any()) and not bool(a.offsets[:1].any()), "offsets that fall")


def _embedding(a: Any) -> None:
    _need(a.indices.numel() * a.grad_output.shape[-1] == a.grad_output.numel(), "a gradient of other indices")
    if a.scale_grad_by_freq:
        _inside(a.indices, a.num_weights, "an index", but=a.padding_idx)


def _ctc(a: Any) -> None:
    """Check ctc_loss, forward and backward; lengths are lists or tensors."""
    x, given = a.log_probs, vars(a)
    inputs, targets = ([int(n) for n in lengths] for lengths in (a.input_lengths, a.target_lengths))
    many = x.shape[1] if x.dim() == 3 else -1
    _need(len(inputs) == len(targets) == many, "lengths of other samples")
    _need(all(0 <= n <= x.shape[0] for n in inputs) and all(n >= 0 for n in targets), "a length that is none")
    most = max(targets, default=0)
    room = sum(targets) <= a.targets.numel() if a.targets.dim() == 1 else a.targets.shape[1] >= most
    _need(room and (a.targets.dim() == 1 or a.targets.shape[0] == many), "fewer targets than lengths say")
    _inside(a.targets, x.shape[2], "a class")
    _need(0 <= a.blank < x.shape[2], "a blank that is not a class")
    if "grad" in given:
        for name in ("grad", "neg_log_likelihood"):
            _shape(given[name], (many,), name)
        _need(given["log_alpha"].dim() == 3 and given["log_alpha"].shape[0] == many, "a log_alpha of other samples")
        _need(given["log_alpha"].shape[1] >= max(inputs, default=0), "a log_alpha of other lengths")
        _need(given["log_alpha"].shape[2] >= 2 * most + 1, "a log_alpha of other targets")


def _weight_norm(a: Any) -> None:
    _shape(a.grad_w, a.saved_v.shape, "gradient")
    _need(a.dim in (0, a.saved_v.dim() - 1), "a dim that is neither the first nor the last")
    for one in (a.saved_g, a.saved_norms):
        _need(one.numel() == a.saved_v.shape[a.dim], "norms of other sizes")


def _alias(a: Any) -> None:
    reach = 1 + sum((n - 1) * step for n, step in zip(a.size, a.stride, strict=True)) if all(a.size) else 0
    room = a.self.untyped_storage().nbytes() // a.self.element_size() - a.self.storage_offset()
    _need(all(step >= 0 for step in a.stride) and reach <= room, "a shape larger than its storage")


def _pdist(a: Any) -> None:
    n = a.self.shape[0] if a.self.dim() == 2 and a.self.numel() else -1
    _need(n > 0, "points that are none")
    for one in (a.grad, a.pdist):
        _shape(one, (n * (n - 1) // 2,), "tensor of distances")


def _cdist(a: Any) -> None:
    distances = aten._cdist_forward(_meta(a.x1), _meta(a.x2), 2.0, None).shape
    _shape(a.grad, distances, "gradient")
    _shape(a.cdist, distances, "tensor of distances")


def _segments(a: Any) -> None:
    data = vars(a).get("data")
    _need(a.lengths is not None and getattr(a, "offsets", None) is None, "offsets for lengths")
    _need(not getattr(a, "unsafe", False) and a.axis == a.lengths.dim() - 1, "lengths along another dim")
    _need(data.dim() > a.axis and a.lengths.shape[:-1] == data.shape[: a.axis], "lengths of other rows")
    _need(not bool((a.lengths < 0).any()), "a length below 0")
    _need(not bool((a.lengths.sum(-1) != data.shape[a.axis]).any()), "lengths that do not add up")
    for name in ("grad", "output"):
        _shape(vars(a).get(name), (*a.lengths.shape, *data.shape[a.axis + 1 :]), name)


def _pivots(a: Any) -> None:
    _need(a.LU_data.dim() >= 2, "data that are not matrices")
    rows, columns = a.LU_data.shape[-2:]
    _shape(a.LU_pivots, (*a.LU_data.shape[:-2], min(rows, columns)), "tensor of pivots")
    _inside(a.LU_pivots, rows + 1, "a pivot", first=1)


def _flash(a: Any) -> None:
    _shape(a.grad_out, a.out.shape, "gradient")
    _shape(a.out, (*a.query.shape[:3], a.value.shape[-1]), "result")
    _shape(a.key, (*a.value.shape[:3], a.query.shape[-1]), "key")
    _need(a.query.dim() == 4 and a.query.shape[0] == a.key.shape[0], "other batches")
    _need(a.logsumexp.numel() == prod(a.query.shape[:3]), "a logsumexp of other rows")


def _own_bag(a: Any) -> None:
    """Check graphzero's ops on bags, which are rows of indices."""
    given, bags = vars(a), a.indices.shape[0]
    rows = a.weight.shape[0] if "weight" in given else a.rows
    _need(a.indices.dim() == a.grad.dim() == 2 and a.grad.shape[0] == bags, "a gradient of other bags")
    _need("weight" not in given or a.weight.shape[1:] == a.grad.shape[1:], "a gradient of another width")
    _inside(a.indices, rows, "an index")
    _shape(given.get("scales"), a.indices.shape, "tensor of scales")
    if given.get("mode") == 2:  # the largest
        _shape(a.largest, a.grad.shape, "tensor of largest indices")
        _inside(a.largest, rows, "a largest index", first=-1)


def _named(check: Callable[[Any], None], **names: str) -> Callable[[Any], None]:
    """Apply ``check`` to an op with other argument names: ``names`` maps each of the op's names to the one that the
    check uses."""
    return lambda a: check(SimpleNamespace(**{names.get(name, name): x for name, x in vars(a).items()}))


def _groups(a: Any) -> None:
    x, y, ends = a.self, a.mat2, a.offs
    if ends is not None:
        size = x.shape[-1] if x.dim() == y.dim() == 2 else x.shape[-2] if x.dim() == 2 else y.shape[-1]
        _inside(ends, size + 1, "a group's end")
        _need(not bool((ends[1:] < ends[:-1]).any()), "ends of groups that fall")
        groups = {one.shape[0] for one in (x, y) if one.dim() == 3}
        _need(not groups or groups == {ends.numel()}, "other groups than ends")
        first = vars(a).get("first")
        _need(first is None or (first.dim() == 0 and 0 <= int(first) <= int(ends[:1].sum())), "a first group before 0")


CONDITIONS: dict[str, Callable[[Any], None]] = {
    "aten::avg_pool2d_backward": partial(_pool, aten.avg_pool2d, 2),
    "aten::avg_pool3d_backward": partial(_pool, aten.avg_pool3d, 3),
    "aten::max_pool2d_with_indices_backward": partial(_pool, aten.max_pool2d_with_indices, 2),
    "aten::max_pool3d_with_indices_backward": partial(_pool, aten.max_pool3d_with_indices, 3),
    **{f"aten::{name}": partial(_adaptive_pool, dims) for dims in (2, 3) for name in (
        f"_adaptive_avg_pool{dims}d_backward", f"adaptive_max_pool{dims}d_backward")},
    **{f"aten::fractional_max_pool{dims}d_backward": partial(_fractional_pool, dims) for dims in (2, 3)},
    **{f"aten::{kind}_pad{dims}d_backward": partial(_padding, dims) for dims in (1, 2, 3) for kind in (
        "reflection", "replication")},
    **{f"aten::grid_sampler_{dims}d_backward": partial(_grid, dims) for dims in (2, 3)},
    "aten::_grid_sampler_2d_cpu_fallback_backward": partial(_grid, 2),
    **dict.fromkeys(("aten::_log_softmax_backward_data", "aten::_softmax_backward_data"), _softmax),
    **{f"aten::{name}": _batch_norm for name in (
        "native_batch_norm", "native_batch_norm_backward", "batch_norm_backward", "_batch_norm_no_update",
        "_batch_norm_with_update", "_batch_norm_with_update_functional", "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")},
    "aten::native_layer_norm_backward": _layer_norm,
    "aten::_fused_rms_norm_backward": _layer_norm,
    "aten::native_group_norm_backward": _group_norm,
    **{f"aten::nll_loss{kind}": _nll for kind in ("_forward", "_backward", "2d_forward", "2d_backward")},
    **{f"aten::_embedding_bag_{kind}backward": _bag for kind in (
        "", "dense_", "sparse_", "per_sample_weights_")},
    **dict.fromkeys(("aten::_embedding_bag", "aten::_embedding_bag_forward_only"), _offsets),
    "aten::embedding_dense_backward": _embedding,
    **dict.fromkeys(("aten::_ctc_loss", "aten::_ctc_loss_backward"), _ctc),
    "aten::_weight_norm_interface_backward": _weight_norm,
    "aten::_reshape_alias": _alias,
    "aten::_pdist_backward": _pdist,
    "aten::_cdist_backward": _cdist,
    "aten::segment_reduce": _segments,
    "aten::_segment_reduce_backward": _segments,
    "aten::lu_unpack": _pivots,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash,
    "aten::_grouped_mm": _groups,
    "graphzero::grouped_mm": _named(_groups, a="self", b="mat2", ends="offs"),
    "graphzero::cross_entropy_backward": _named(_nll, grad="grad_output", log_probs="self"),
    **{f"graphzero::nll_loss{kind}_from": _named(_nll, x="self") for kind in (
        "_forward", "_backward", "2d_forward", "2d_backward")},
    **dict.fromkeys(("graphzero::bag_backward", "graphzero::bag_scales_backward"), _own_bag),
    **{f"graphzero::{name}_backward": _named(_flash, grad="grad_out", q="query", k="key", v="value") for name in (
        "attention", "attention_block")},
}  # fmt: skip


class KernelGuard(TorchDispatchMode):
    """Within it ops raise VerifyError for operands that their kernels would trust and must not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        condition = CONDITIONS.get(func._schema.name)
        if condition is not None:
            try:
                condition(_by_name(func, args, kwargs or {}))
            except UnmetCondition as error:
                op = func._schema.name.replace("::", ".")
                raise VerifyError(
                    f"{op} is given {error}; its kernel does not check that, so a program read from text must not "
                    "use it"
                ) from None
        return func(*args, **(kwargs or {}))


def _by_name(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = zip(func._schema.arguments, args, strict=False)
    defaults = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    return SimpleNamespace(**{**defaults, **{one.name: x for one, x in given}, **kwargs})
