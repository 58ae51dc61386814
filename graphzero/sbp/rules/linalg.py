"""Factorisations and transforms.  A matrix stays whole, a batch of matrices may be split."""

from __future__ import annotations

from graphzero.sbp.call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._write import dims_of, letters, overloads

MATRICES = {
    "linalg_cholesky_ex linalg_inv_ex": "~...__->...__,...",
    "_linalg_det": "~...__->...,...__,..._",
    "_linalg_slogdet": "~...__->...,...,...__,..._",
    "_linalg_eigh": "~...__->..._,...__",
    "_linalg_svd": "~...__->...__,..._,...__",
    "linalg_qr": "~...__->...__,...__",
    "linalg_lu_factor_ex": "~...__->...__,..._,...",
    "linalg_matrix_exp cholesky_inverse": "~...__->...__",
    "cholesky_solve linalg_solve_triangular": "~...__,~...__->...__",
    "linalg_lu_solve": "~...__,~..._,~...__->...__",
    "linalg_householder_product": "~...__,~..._->...__",
}
for _names, _line in MATRICES.items():
    rule(overloads(_names), _line, nonempty=True)


@rule(overloads("_fft_r2c", "_fft_c2r", "_fft_c2c"), nonempty=True)
def fourier(call: Call) -> str:
    """Dims that are transformed stay whole."""
    taken = dims_of(call["dim"], len(call.shape))
    line = "".join("_" if i in taken else name for i, name in enumerate(letters(len(call.shape))))
    return f"{line}->{line}"


@rule(overloads("diag_embed"))
def diag_embed(call: Call) -> str | None:
    end = len(call.out) - 1
    last = {call["dim1"] % (end + 1), call["dim2"] % (end + 1)} == {end, end - 1}
    return "sum: ..._->...__" if last else None
