"""What the library of matrix products keeps of memory: ``python bench/kept.py --model A``.

Every distinct product of a step is made twice in a fresh process, in the order of the step; how much memory the process
holds more, once operands and results are gone, is what the library has kept for the next time.  No plan knows of it.
"""

from __future__ import annotations

import argparse
import os

import torch
from _run import markdown, on_gloo, options_of
from gpt import SHAPES
from jobs import JOBS
from matmul import products
from peak import MALLOC, mb, reset

from graphzero.runtime.execute.products import Product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="A")
    options = options_of(parser)
    os.environ.update(MALLOC)
    found = list(products(options.model))
    kept = on_gloo(1, measure, found)
    rows = [[product, mb(nbytes)] for product, nbytes in zip(found, kept, strict=True)]
    print(JOBS[options.model].what, markdown(["product", "kept, MB"], [*rows, ["all", mb(sum(kept))]]), sep="\n\n")


def measure(rank: int, found: list[Product]) -> list[int]:
    """Bytes that are kept since each product, beyond those kept before."""
    torch.mm(*operands(Product(4, 4, 4, "nn")))
    kept = []
    for product in found:
        before = reset()
        for _ in range(2):
            torch.mm(*operands(product))
        kept.append(reset() - before)
    return kept


def operands(product: Product) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (product.rows, product.inner), (product.inner, product.columns)
    a, b = (
        torch.randn(shape[::-1]).t() if layout == "t" else torch.randn(shape)
        for shape, layout in zip(shapes, product.layouts, strict=True)
    )
    return a, b


if __name__ == "__main__":
    main()
