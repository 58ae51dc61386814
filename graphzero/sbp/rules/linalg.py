"""Factorisations and transforms.  A matrix stays whole, a batch of matrices may be split."""

from __future__ import annotations

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import dims_of, letters_except, overloads

MATRICES = {
    "linalg_cholesky_ex linalg_inv_ex": "~...__->...__,...",
    "_linalg_det": "~...__->...,...__,..._",
    "_linalg_slogdet": "~...__->...,...,...__,..._",
    "_linalg_eigh": "~...__->..._,...__",
    "_linalg_svd": "~...__->...__,..._,...__",
    "linalg_qr": "~...__->...__,...__",
    "linalg_lu_factor_ex": "~...__->...__,..._,...",
    "linalg_matrix_exp cholesky_inverse cholesky": "~...__->...__",
    "geqrf": "~...__->...__,..._",
    "linalg_eig": "~...__->..._,...__",
    "_linalg_eigvals": "~...__->..._",
    "linalg_lu": "~...__->...__,...__,...__",
    "linalg_ldl_factor_ex": "~...__->...__,..._,...",
    "linalg_ldl_solve": "~...__,~..._,...__->...__",
    "ormqr": "~...__,~..._,...__->...__",
    "triangular_solve": "...__,~...__->...__,...__:1",
    "cholesky_solve": "...__,~...__->...__",
    "linalg_solve_triangular": "~...__,...__->...__",
    "linalg_lu_solve": "~...__,~..._,...__->...__",
    "linalg_householder_product": "~...__,~..._->...__",
}
for _names, _line in MATRICES.items():
    rule(overloads(_names), _line, nonempty=True)


@rule(overloads("_linalg_solve_ex"), nonempty=True)
def solve(call: Call) -> str:
    """The right-hand side may be one vector a matrix."""
    right = "..._" if len(call.tensors[1].shape) < len(call.shape) else "...__"
    return f"~...__,{right}->{right},...__:0,..._:0,...:0"


@rule(overloads("lu_unpack"), nonempty=True)
def lu_unpack(call: Call) -> str:
    """Results that are not asked for are empty vectors."""
    permutation = "...__" if call["unpack_pivots"] else "_:"
    triangle = "...__" if call["unpack_data"] else "_:"
    return f"~...__,~..._->{permutation},{triangle},{triangle}"


@rule(overloads("linalg_pinv.atol_rtol_tensor"), nonempty=True)
def pseudo_inverse(call: Call) -> str:
    """One tolerance for each matrix, or one for all."""
    return ",".join(["~...__"] + ["~..."] * (len(call.tensors) - 1)) + "->...__"


@rule(overloads("_fft_r2c", "_fft_c2r", "_fft_c2c"), nonempty=True)
def fourier(call: Call) -> str:
    """Dims that are transformed stay whole."""
    line = letters_except(call.shape, *dims_of(call["dim"], len(call.shape)))
    return f"{line}->{line}"


@rule(overloads("diag_embed"))
def diag_embed(call: Call) -> str | None:
    end = len(call.out) - 1
    last = {call["dim1"] % (end + 1), call["dim2"] % (end + 1)} == {end, end - 1}
    return "sum: ..._->...__" if last else None
