"""No op that a program may hold is forgotten: each has a rule, or a reason why it needs none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import graphzero as gz
from graphzero.capture.randomness import Draws
from graphzero.capture.rewrite import decompositions
from graphzero.errors import CaptureError
from graphzero.sbp.op_call import op_name
from graphzero.sbp.registry import has_rule

aten = torch.ops.aten
DRAWS_NOTHING = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "it refuses dropout",
    "aten._scaled_dot_product_fused_attention_overrideable.default": "a place for other devices' kernels",
    "aten._fused_sdp_choice.default": "gives a number that names a kernel",
}
NOT_IN_PROGRAMS = {
    "aten.atan2.out": "writes in place, and programs are functional: it becomes atan2",
    "aten.resize_.default": "writes in place, and programs are functional: it becomes resize",
    "aten.sym_is_contiguous.default": "sizes are plain numbers in a program",
    "aten.sym_numel.default": "sizes are plain numbers in a program",
    "aten.sym_size.int": "sizes are plain numbers in a program",
    "aten.sym_storage_offset.default": "sizes are plain numbers in a program",
    "aten.sym_stride.int": "sizes are plain numbers in a program",
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "aten._local_scalar_dense.default": lambda x: aten._local_scalar_dense(x.sum()),
    "aten.nonzero.default": torch.nonzero,
}
# What eleven models held before decompositions: MLP, conv net, LSTM, TransformerEncoder, GPT-2, Llama, BERT, T5,
# Qwen3-MoE, ViT, and the MLP under autocast, each with its backward and AdamW.
OF_MODELS = """
    _log_softmax _log_softmax_backward_data _native_batch_norm_legit_functional _safe_softmax
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward _softmax
    _softmax_backward_data _to_copy _unsafe_view abs add.Tensor addcdiv addcmul addmm alias arange bmm cat clone
    constant_pad_nd convolution convolution_backward copy cos cumsum detach div.Scalar div.Tensor embedding
    embedding_dense_backward empty_like eq.Scalar expand fill.Tensor floor_divide full_like gather ge.Tensor gelu
    gelu_backward gt.Scalar histc index.Tensor index_put lerp.Scalar lift_fresh_copy log lt.Scalar masked_fill.Scalar
    max_pool2d_with_indices max_pool2d_with_indices_backward mean.dim minimum mm mul.Scalar mul.Tensor
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward neg new_zeros nll_loss_backward nll_loss_forward ones ones_like permute
    pow.Scalar pow.Tensor_Scalar reciprocal relu rsqrt rsub.Scalar scalar_tensor scatter.src select.int select_backward
    select_scatter sigmoid sigmoid_backward silu silu_backward sin slice.Tensor slice_backward slice_scatter sort
    split.Tensor sqrt squeeze.dim stack sub.Tensor sum.dim_IntList t tanh tanh_backward threshold_backward topk
    transpose.int tril unbind.int unsqueeze view where.self zeros zeros_like
"""


# Backward ops with a kernel for the CPU that training in a Graph does not make.
NOT_MADE = {
    "aten._ctc_loss_backward.default": "capture refuses ctc_loss",
    "aten._ctc_loss_backward.Tensor": "capture refuses ctc_loss",
    "aten._masked_softmax_backward.default": "attention of plain modules is graphzero's own",
    "aten._slow_conv2d_backward.output_mask": "autograd makes convolution_backward",
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default": "quantisation: whole, with a warning",
    "aten._fake_quantize_learnable_per_channel_affine_backward.default": "quantisation: whole, with a warning",
    "aten.glu_backward_jvp.default": "belongs to forward-mode differentiation",
    "aten.mkldnn_rnn_layer_backward.default": "capture takes recurrent layers as matrix products",
}


def overloads() -> Iterator[Any]:
    """Every overload of ATen that this torch has."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and hasattr(getattr(aten, packet, None), overload or "default"):
            yield getattr(getattr(aten, packet), overload or "default")


def runs_on_cpu(op: Any) -> bool:
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def is_out(op: Any) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


def decomposed() -> set[Any]:
    return {*decompositions.TABLE, *Draws(torch.tensor(0)).table()}


def test_every_core_op_has_a_rule_or_a_reason_to_need_none() -> None:
    core = {op for op in overloads() if torch.Tag.core in op.tags}
    assert len(core) > 150
    without = {op_name(op) for op in core - decomposed() if not has_rule(op)}
    assert without == {*NOT_IN_PROGRAMS, *REFUSED} & {op_name(op) for op in core}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_without_a_fixed_shape_or_with_a_value_for_the_host_is_refused(name: str) -> None:
    class Refused(gz.Graph):
        def build(self, x: Tensor) -> Any:
            return REFUSED[name](x)

    with pytest.raises(CaptureError, match="test_core_aten"):
        Refused(gz.placement("cpu", range(2), virtual=True)).compile(torch.ones(4, 4))


def test_every_op_of_eleven_models_has_a_rule_or_is_decomposed() -> None:
    known = decomposed()
    for name in OF_MODELS.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        assert has_rule(op) or op in known, name


def test_every_backward_op_that_training_makes_has_a_rule_or_is_decomposed() -> None:
    backwards = {op for op in overloads() if "_backward" in op._schema.name and not op._schema.is_mutable}
    assert len(backwards) > 100
    without = {
        op_name(op)
        for op in backwards - decomposed()
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU") and not has_rule(op)
    }
    assert without == set(NOT_MADE)


def test_every_op_that_draws_is_written_down_or_refused() -> None:
    """What neither decomposition nor refusal knows would draw other numbers on every rank."""
    draws = {op for op in overloads() if torch.Tag.nondeterministic_seeded in op.tags and not is_out(op)}
    assert len(draws) > 50
    special = re.compile("generator|names")  # refused, by whatever op
    without = {op_name(op) for op in draws - decomposed() if runs_on_cpu(op) and not special.search(op._overloadname)}
    assert without == set(DRAWS_NOTHING)


def test_every_foreach_op_becomes_one_op_a_tensor() -> None:
    foreach = {op for op in overloads() if op._schema.name.startswith("aten::_foreach_") and not is_out(op)}
    assert len(foreach) > 100
    left = {op_name(op).split(".")[1] for op in foreach - decomposed()}
    assert left <= {"_foreach_copy", "_foreach_zero"}  # torch has no function of that name
