"""What the library of matrix products keeps is asked of the very products that a step has."""

import kept
import matmul
import pytest

from graphzero.runtime.execute.products import Product


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt"])
def test_operands_lie_as_the_step_has_them(layouts):
    a, b = kept.operands(Product(3, 4, 5, layouts))
    assert (a.shape, b.shape) == ((3, 4), (4, 5))
    assert [x.is_contiguous() for x in (a, b)] == [layout == "n" for layout in layouts]


def test_each_product_of_a_step_has_its_bytes():
    found = list(matmul.products("toy"))
    assert len(found) == len(set(found)) == len(kept.measure(0, found)) > 0
