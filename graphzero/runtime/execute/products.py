"""Which kernel computes a program's matrix products on a CPU: torch's own, or oneDNN's.

On CPUs whose maker is not that of the library behind ``torch.mm`` oneDNN may be much faster; elsewhere it is not.  So
both are tried on every distinct product of a program, in this process, before it first runs.  The first rank decides
for all.  Float32 ``mm``, and ``addmm`` with a vector, are served; all else stays with torch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import value
from graphzero.ir.aliases import Kind, kind_of, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.ir.layout import shape_on
from graphzero.ir.storage import inplace
from graphzero.runtime.world.agree import Ranks
from graphzero.runtime.world.world import World

LARGEST = 4096  # sizes that are tried are cut there
SECONDS = 0.1  # for which a product is tried, at least twice
ROWS = 64  # of a result that are compared with float64
SHOWN = 4  # products in a warning
COARSER = 4.0  # times torch's error that oneDNN's may be: sums of another order, not of another precision
FASTER = 0.95  # of torch's time that oneDNN may take to count as faster


@dataclass(frozen=True, order=True)
class Product:
    """[rows, inner] x [inner, columns]; ``layouts``: of both operands, "nn", "nt", "tn" or "tt" as BLAS names them."""

    rows: int
    inner: int
    columns: int
    layouts: str

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"{self.layouts} [{self.rows}, {self.inner}] x [{self.inner}, {self.columns}]"


@dataclass(frozen=True)
class Figures:
    """What trying a product gave: best seconds, and error relative to float64; of torch's kernel, then of oneDNN's."""

    product: Product
    seconds: tuple[float, float]
    errors: tuple[float, float]

    @property
    def is_precise(self) -> bool:
        return self.errors[1] <= COARSER * self.errors[0] + torch.finfo(torch.float32).eps

    @property
    def is_faster(self) -> bool:
        return self.seconds[1] <= FASTER * self.seconds[0]

    @property
    def speeds(self) -> tuple[float, float]:
        """GFLOP/s."""
        ours, theirs = (self.product.flops / seconds / 1e9 for seconds in self.seconds)
        return ours, theirs

    def __str__(self) -> str:
        errors, speeds = self.errors, self.speeds
        return (
            f"{self.product}: {speeds[1]:.0f} GFLOP/s with a relative error of {errors[1]:.1e}, "
            f"torch's own kernel {speeds[0]:.0f} with {errors[0]:.1e}"
        )


def onednn(a: Tensor, b: Tensor) -> Tensor:
    """``mm`` by oneDNN, or by torch where ``b`` does not lie as oneDNN reads a matrix."""
    if not _is_matrix(b):
        return torch.mm(a, b)
    result: Tensor = _linear(a, b.t(), None, "none", [], "")
    return result


def onednn_add(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``addmm`` of a vector ``c``; one with gaps oneDNN would read as if it had none."""
    if not (c.is_contiguous() and _is_matrix(b)):
        return torch.addmm(c, a, b)
    result: Tensor = _linear(a, b.t(), c, "none", [], "")
    return result


def _is_matrix(b: Tensor) -> bool:
    """Rows or columns lie one behind the other, none in another; and there is something to sum."""
    (inner, columns), (down, across) = b.shape, b.stride()
    return inner > 0 and ((across == 1 and down >= columns) or (down == 1 and across >= inner))


_linear: Any = _compat.onednn_linear()
KERNELS: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: onednn,
    torch.ops.aten.addmm.default: onednn_add,
}


def kernels_of(graph: StepGraph, world: World, wanted: str) -> Mapping[fx.Node, Callable[..., Tensor]]:
    """The products of ``graph`` that oneDNN computes, as ``GraphConfig.set_matmul(wanted)`` says."""
    if wanted == "default" or world.device.type != "cpu":
        return {}
    products = products_of(graph)
    if not products:
        return {}
    taken = Ranks(world.placement).share(lambda: _taken(set(products.values()), wanted))
    return {node: KERNELS[node.target] for node, product in products.items() if product in taken}


def products_of(graph: StepGraph) -> dict[fx.Node, Product]:
    """The products that oneDNN could compute, with the sizes they have on the first rank."""
    return {node: _product(graph, node) for node in graph.nodes if _is_served(node)}


def _is_served(node: fx.Node) -> bool:
    if node.target not in KERNELS or inplace.out_of(node) is not None or node.kwargs:
        return False
    result = value.tensor_type(node)
    added = [value.tensor_type(x).shape for x in node.args[:-2] if isinstance(x, fx.Node)]
    return result.dtype == torch.float32 and all(shape == result.shape[1:] for shape in added)


def _product(graph: StepGraph, node: fx.Node) -> Product:
    a, b = (x for x in node.args[-2:] if isinstance(x, fx.Node))
    (rows, inner), (_, columns) = (shape_on(graph, value.tensor_type(x), value.nd_of(x)) for x in (a, b))
    return Product(rows, inner, columns, _layout(a) + _layout(b))


def _layout(x: fx.Node) -> str:
    return "t" if kind_of(unnamed(x).target) is Kind.TURN else "n"


def _taken(products: set[Product], wanted: str) -> set[Product]:
    """The products for which oneDNN is taken; warns of the others, the largest first."""
    if _linear is None:
        _warn(f"config.set_matmul({wanted!r}): this torch has no oneDNN, so its own kernels are used")
        return set()
    found = {p: try_out(p) for p in sorted(products, key=lambda p: (-p.flops, p)) if p.flops}
    coarse = {p for p, figures in found.items() if not figures.is_precise}
    slow = {p for p, figures in found.items() if wanted == "fastest" and not figures.is_faster} - coarse
    lines = [f"less precise, {found[p]}" for p in found if p in coarse]
    lines += [f"not faster, {found[p]}" for p in found if p in slow]
    if lines:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        _warn(
            f"config.set_matmul({wanted!r}): torch's own kernels compute {len(coarse | slow)} of {len(found)} distinct "
            "products, for oneDNN's would be\n  " + "\n  ".join(lines)
        )
    return set(found) - coarse - slow


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=11)  # the user's call of the Graph


def try_out(product: Product) -> Figures:
    """Both kernels on random matrices of these sizes; once in a process for the same threads and precision."""
    rows, inner, columns = (min(size, LARGEST) for size in (product.rows, product.inner, product.columns))
    cut = Product(rows, inner, columns, product.layouts)
    return _try_out(cut, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _try_out(product: Product, threads: int, precision: str) -> Figures:
    with _compat.without_modes(), torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        a = _random(product.rows, product.inner, product.layouts[0], generator)
        b = _random(product.inner, product.columns, product.layouts[1], generator)
        some = torch.arange(0, product.rows, max(product.rows // ROWS, 1))
        exact = a[some].double() @ b.double()
        errors = [float((kernel(a, b)[some] - exact).norm() / exact.norm()) for kernel in (torch.mm, onednn)]
        seconds = _seconds(lambda: torch.mm(a, b), lambda: onednn(a, b))
    return Figures(product, seconds, (errors[0], errors[1]))


def _random(rows: int, columns: int, layout: str, generator: torch.Generator) -> Tensor:
    if layout == "t":
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)


def _seconds(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """The best of alternating calls: other work of the machine meets both."""
    best, since, rounds = [float("inf")] * 2, time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - since < SECONDS:
        for i, call in enumerate((ours, theirs)):
            started = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - started)
        rounds += 1
    return best[0], best[1]
