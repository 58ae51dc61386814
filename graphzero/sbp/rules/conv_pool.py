"""Convolution, pooling and resampling.  Space stays whole: a piece would need its neighbours' border."""

from __future__ import annotations

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import MOVE, overloads


def _convolution(call: Call, weight: int) -> tuple[str, str, str, str]:
    """(input, weight, bias, output).  Grouped ones mix channels of a group only, so channels stay whole."""
    space = len(call.tensors[weight].shape) - 2
    size = "_" * space
    if call["groups"] != 1:
        return f"nC{size}", f"__{size}", "O", f"nO{size}"
    return f"nc{size}", f"{'co' if call['transposed'] else 'oc'}{size}", "o", f"no{size}"


@rule(overloads("convolution"), nonempty=True)
def convolution(call: Call) -> str:
    x, w, bias, y = _convolution(call, 1)
    return f"{x},{w}+{bias}->{y}"


@rule(
    overloads("convolution_backward"),
    nonempty=True,
    sizes={"bias_sizes": lambda i, o: [i[0][1]]},
)
def convolution_backward(call: Call) -> str:
    x, w, bias, y = _convolution(call, 2)
    return f"{y},{x},{w}->{x}:02,{w}:01,{bias}:0"


rule(overloads("conv_tbc"), "_nc,_co+o->_no", nonempty=True)

# The number of spatial dims, and what they are called; {d} and {x} stand for them.
POOLS = {
    "max_pool{d}d_with_indices adaptive_max_pool{d}d": "~...{x}->...{x},...{x}",
    "fractional_max_pool{d}d": "~nc{x},~nc_->nc{x},nc{x}",
    "max_pool{d}d_with_indices_backward adaptive_max_pool{d}d_backward fractional_max_pool{d}d_backward": (
        "...{x},?...{x},~...{x}->...{x}"
    ),
    "max_unpool{d}d": "...{x},~...{x}->...{x}",
    "avg_pool{d}d_backward _adaptive_avg_pool{d}d_backward": "...{x},?...{x}->...{x}",
    "reflection_pad{d}d replication_pad{d}d": "...{x}->...{x}",
    "reflection_pad{d}d_backward replication_pad{d}d_backward": "...{x},?...{x}->...{x}",
}
for _d in (1, 2, 3):
    for _names, _line in POOLS.items():
        rule(overloads(_names.format(d=_d)), _line.format(x="_" * _d), nonempty=True)


@rule(overloads("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
                "_adaptive_avg_pool2d _adaptive_avg_pool3d"), nonempty=True)  # fmt: skip
def average_pool(call: Call) -> str:
    """Linear, but for the rounding of whole numbers."""
    space = "_" * int(call.op.__name__.split("pool")[1][0])
    return f"{'' if call.tensors[0].dtype.is_floating_point else '~'}...{space}->...{space}"


RESAMPLINGS = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa
"""
for _name in RESAMPLINGS.split():
    _space = "_" * int(_name[_name.index("d") - 1])
    rule(overloads(_name), f"...{_space}->...{_space}", nonempty=True)
    rule(overloads(f"{_name}_backward"), f"...{_space}->...{_space}", nonempty=True,
         sizes={"input_size": lambda i, o: o[0]})  # fmt: skip


@rule(
    overloads("affine_grid_generator"),
    nonempty=True,
    sizes={"size": lambda i, o: [o[0][0], 1, *o[0][1:-1]]},  # channels do not matter
)
def affine_grid(call: Call) -> str:
    return f"n__->n{'_' * (len(call.out) - 1)}"


rule(overloads("grid_sampler_2d"), "nc__,~nhw_->nchw", nonempty=True)
rule(overloads("grid_sampler_3d"), "nc___,~ndhw_->ncdhw", nonempty=True)
rule(overloads("grid_sampler_2d_backward"), "nchw,~nc__,~nhw_->nc__:02,nhw_:012", nonempty=True)
rule(overloads("grid_sampler_3d_backward"), "ncdhw,~nc___,~ndhw_->nc___:02,ndhw_:012", nonempty=True)


@rule(overloads("channel_shuffle", "native_channel_shuffle"), nonempty=True)
def channel_shuffle(call: Call) -> str:
    line = f"n_{'abcdef'[: len(call.shape) - 2]}"
    return f"{line}->{line}"


rule(overloads("pixel_shuffle"), MOVE + "...(c_)hw->...c(h_)(w_)", nonempty=True)
rule(overloads("pixel_unshuffle"), MOVE + "...c(h_)(w_)->...(c_)hw", nonempty=True)
rule(overloads("im2col"), "n___->n__", nonempty=True)
rule(overloads("col2im"), "n__->n___", nonempty=True)
