"""The tensor ops that graphzero adds to ATen.

* ``attention`` and ``attention_backward``: scaled dot product attention as one op, so that a plan made on a
  laptop holds for a GPU; ``attention`` has the kernels of each device.
* ``uniform_like``: random numbers that are a function of (key, op, global index of the element), so that a
  draw does not depend on placement, stage or world.
* ``adam``, and ``adam_`` in place: the update of parameters by Adam, one or many at once; ``fused`` has the kernel.
* ``cross_entropy_backward``, and ``.out``: backward of nll_loss and log_softmax at once; ``cross_entropy`` has the
  kernel.
* ``grouped_mm``: products of matrices group by group; ``grouped`` has the kernel.
* ``bag``, ``bag_backward`` and ``bag_scales_backward``: ``embedding_bag`` of bags of one length; ``bags`` has the
  kernels.
* ``pin``: the identity; it marks a value whose SBP is fixed.
* ``check``: whether a condition holds that the step must meet; a Graph's step raises where it does not.
* ``as_local`` and ``as_global``: the two ends of per-rank code.  ``sbp`` says, per placement axis, what the ranks'
  tensors are of the global one (``SAME``: equal, and made by equal work), ``shape`` what comes out.  A rank that
  executes them hands on what it holds.
* ``rank_key``: the key of the random draws that are a rank's own.
* ``embedding_from`` and others in ``_from``: ATen's ops that index, on a piece of the dim they index; ``pieces``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphzero import attention, bags, cross_entropy, fused, grouped, pieces
from graphzero.errors import SbpError

_lib: Any = torch.library.Library("graphzero", "DEF")  # type: ignore[no-untyped-call]
_lib.define("attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale) -> (Tensor, Tensor)")
_lib.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? bias, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)
_lib.define("uniform_like(Tensor like, Tensor key, int op, int[] start, int[] total) -> Tensor")
_RATES = "Scalar lr, Scalar beta1, Scalar beta2, Scalar eps, Scalar weight_decay"
_MODES = "bool decoupled=True, bool maximize=False"
_lib.define(
    "adam(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    f"Tensor[] steps, {_RATES}, *, {_MODES}) -> Tensor[]"
)
_lib.define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] max_exp_avg_sqs, Tensor[] steps, {_RATES}, *, {_MODES}) -> ()"
)
_SCORES = (
    "Tensor grad, Tensor log_probs, Tensor target, Tensor? weight, int reduction, int ignore_index, Tensor total_weight"
)
_lib.define(f"cross_entropy_backward({_SCORES}) -> Tensor")
_lib.define(f"cross_entropy_backward.out({_SCORES}, *, Tensor(a!) out) -> Tensor(a!)")
_lib.define("grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor")
_lib.define("bag(Tensor weight, Tensor indices, Tensor? scales, int mode, int padding) -> (Tensor, Tensor)")
_lib.define(
    "bag_backward(Tensor grad, Tensor indices, Tensor? scales, Tensor largest, int rows, int mode, int padding) "
    "-> Tensor"
)
_lib.define("bag_scales_backward(Tensor grad, Tensor weight, Tensor indices, int padding) -> Tensor")
_lib.define("pin(Tensor x, int id) -> Tensor")
_lib.define("check(Tensor ok, str message) -> Tensor")
_lib.define("as_local(Tensor x, str[] sbp, int[] shape) -> Tensor")
_lib.define("as_global(Tensor x, str[] sbp, int[] shape) -> Tensor")
_lib.define("rank_key(Tensor key, int[] at) -> Tensor")
for _name, (_schema, _kernel) in pieces.FORMS.items():
    _lib.define(_name + _schema)
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")

ATTENTION = torch.ops.graphzero.attention.default
ATTENTION_BACKWARD = torch.ops.graphzero.attention_backward.default
UNIFORM_LIKE = torch.ops.graphzero.uniform_like.default
ADAM = torch.ops.graphzero.adam.default
ADAM_ = torch.ops.graphzero.adam_.default
CROSS_ENTROPY_BACKWARD = torch.ops.graphzero.cross_entropy_backward.default
GROUPED_MM = torch.ops.graphzero.grouped_mm.default
BAG = torch.ops.graphzero.bag.default
BAG_BACKWARD = torch.ops.graphzero.bag_backward.default
BAG_SCALES_BACKWARD = torch.ops.graphzero.bag_scales_backward.default
PIN = torch.ops.graphzero.pin.default
CHECK = torch.ops.graphzero.check.default
AS_LOCAL = torch.ops.graphzero.as_local.default
AS_GLOBAL = torch.ops.graphzero.as_global.default
RANK_KEY = torch.ops.graphzero.rank_key.default


def _attention_meta(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=attention.wide(q.dtype))


def _attention_backward_meta(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def like(x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)

    return like(q), like(k), like(v)


_PRIME_A, _PRIME_B, _MASK = 0x27D4EB2F165667C5, 0x2545F4914F6CDD1D, 0xFFFFFFFF


def _signed(number: int) -> int:
    """The low 64 bits as int64 holds them."""
    return ((number + 2**63) % 2**64) - 2**63


def _mixed_(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    bits ^= (bits >> 30) & 0x3FFFFFFFF
    bits *= -0x40A7B892E31B1A47
    bits ^= (bits >> 27) & 0x1FFFFFFFFF
    bits *= -0x6B2FB644ECCEEE15
    bits ^= (bits >> 31) & 0x1FFFFFFFF
    return bits


def _rank_key(key: Tensor, at: list[int]) -> Tensor:
    """A key that nothing else has, for the rank that stands at ``at`` on some placement axes."""
    for place in at:
        key = _mixed_(key + _signed((place + 1) * _PRIME_A))
    return key


def _uniform_like(like: Tensor, key: Tensor, op: int, start: list[int], total: list[int]) -> Tensor:
    """Uniform in [0, 1), float32, one number per element of ``like``.

    ``start`` is the global index of ``like``'s first element, ``total`` the global shape.  The number is a
    hash of (key, op, global row-major index): two rounds of multiply and xor-shift on int64, the finaliser
    of SplitMix64 with arithmetic shifts masked (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014), cut to 24 bits.
    """
    index = torch.zeros((), dtype=torch.int64, device=like.device)
    stride = 1
    for dim in reversed(range(like.dim())):
        length = like.shape[dim]
        line = torch.arange(start[dim] * stride, (start[dim] + length) * stride, stride, device=like.device)
        index = index + line.view((length,) + (1,) * (like.dim() - 1 - dim))
        stride *= max(total[dim], 1)  # of an empty tensor no element is asked for
    bits = (index + 1) * _PRIME_A
    bits += key + _signed((op + 1) * 0x1F123BB5159A55E5)
    bits = _mixed_(bits)
    bits &= 0xFFFFFF
    return bits.to(torch.float32).mul_(2.0**-24)


_lib.impl("attention", _attention_meta, "Meta")
_lib.impl("attention_backward", _attention_backward_meta, "Meta")
_lib.impl("attention", attention.forward, "CompositeExplicitAutograd")
_lib.impl("attention_backward", attention.backward, "CompositeExplicitAutograd")
_lib.impl("uniform_like", _uniform_like, "CompositeExplicitAutograd")
_lib.impl("uniform_like", lambda like, key, op, start, total: like.new_empty(like.shape, dtype=torch.float32), "Meta")
_lib.impl("adam", fused.adam, "CompositeExplicitAutograd")
_lib.impl("adam_", fused.adam_, "CompositeExplicitAutograd")
_lib.impl("adam", lambda p, g, *rest, **modes: [x.new_empty(x.shape) for xs in (p, *rest[:3]) for x in xs], "Meta")
_lib.impl("adam_", lambda *args, **modes: None, "Meta")
_lib.impl("cross_entropy_backward", cross_entropy.backward, "CompositeExplicitAutograd")
_lib.impl("cross_entropy_backward", lambda grad, logs, *rest: logs.new_empty(logs.shape), "Meta")
for _device in ("CPU", "CUDA"):
    _lib.impl("cross_entropy_backward.out", cross_entropy.backward_out, _device)
_lib.impl("cross_entropy_backward.out", lambda *args, out: out, "Meta")
_lib.impl("grouped_mm", grouped.product, "CompositeExplicitAutograd")
_lib.impl("grouped_mm", lambda a, b, ends: a.new_empty(grouped.shape(a, b, ends)), "Meta")
_lib.impl("bag", bags.forward, "CompositeExplicitAutograd")
_lib.impl("bag_backward", bags.backward, "CompositeExplicitAutograd")
_lib.impl("bag_scales_backward", bags.scales_backward, "CompositeExplicitAutograd")
_lib.impl("bag", bags.shapes, "Meta")
_lib.impl("bag_backward", lambda grad, i, s, m, rows, *rest: grad.new_empty(rows, grad.shape[1]), "Meta")
_lib.impl("bag_scales_backward", lambda grad, weight, indices, padding: grad.new_empty(indices.shape), "Meta")
_lib.impl("pin", lambda x, id: x.clone(), "CompositeExplicitAutograd")
_lib.impl("check", lambda ok, message: ok.clone(), "CompositeExplicitAutograd")
_lib.impl("rank_key", _rank_key, "CompositeExplicitAutograd")
_lib.impl("rank_key", lambda key, at: torch.empty_like(key), "Meta")
for _end in ("as_local", "as_global"):
    _lib.impl(_end, lambda x, sbp, shape: x.clone(), "CompositeExplicitAutograd")
    _lib.impl(_end, lambda x, sbp, shape: x.new_empty(shape), "Meta")


def _save_attention(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bias, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, out, logsumexp = ctx.saved_tensors
    dq, dk, dv = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, bias, ctx.causal, ctx.scale)
    return dq, dk, dv, None, None, None


torch.library.register_autograd("graphzero::attention", _attention_grad, setup_context=_save_attention, lib=_lib)
torch.library.register_autograd("graphzero::pin", lambda ctx, grad: (grad, None), lib=_lib)


def _save_bag(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    weight, indices, scales, ctx.mode, ctx.padding = inputs
    ctx.save_for_backward(weight, indices, scales, output[1])
    ctx.mark_non_differentiable(output[1])


def _bag_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    weight, indices, scales, largest = ctx.saved_tensors
    of_weight, _, of_scales, *_ = ctx.needs_input_grad
    dw = BAG_BACKWARD(grad, indices, scales, largest, weight.shape[0], ctx.mode, ctx.padding) if of_weight else None
    ds = BAG_SCALES_BACKWARD(grad, weight, indices, ctx.padding) if of_scales else None
    return dw, None, ds, None, None


torch.library.register_autograd("graphzero::bag", _bag_grad, setup_context=_save_bag, lib=_lib)


SAME = "="
_DUAL = {"B": "P", "P": "B"}


def dual(sbp: list[str]) -> list[str]:
    """What the gradient of an end of per-rank code is on each axis, by what the value is there.

    Of what every rank holds whole, each rank's gradient is one summand: B and P change places.  A split stays, and so
    does what ranks hold equal because they do the same.
    Raises SbpError for maxima and minima of the ranks.
    """
    greatest = next((one for one in sbp if one[0] == "P" and one != "P"), None)
    if greatest is not None:
        raise SbpError(
            f"a local_region has no gradient through {greatest}: nobody knows whose value it is. Give it a detached "
            "tensor, or return one"
        )
    return [_DUAL.get(one, one) for one in sbp]


def _save_end(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.sbp, _ = inputs
    ctx.shape = list(x.shape)


torch.library.register_autograd(
    "graphzero::as_local",
    lambda ctx, grad: (AS_GLOBAL(grad, dual(ctx.sbp), ctx.shape), None, None),
    setup_context=_save_end,
    lib=_lib,
)
torch.library.register_autograd(
    "graphzero::as_global",
    lambda ctx, grad: (AS_LOCAL(grad, dual(ctx.sbp), ctx.shape), None, None),
    setup_context=_save_end,
    lib=_lib,
)
