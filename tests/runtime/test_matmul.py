"""set_matmul: oneDNN computes what torch computes, where it was tried and found precise, and fast enough."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphzero as gz
from graphzero import _compat
from graphzero.runtime.execute import products
from graphzero.runtime.execute.products import Figures, Product

pytestmark = pytest.mark.skipif(_compat.onednn_linear() is None, reason="this torch has no oneDNN")
LINEAR = "mkldnn::_linear_pointwise"


class Net(nn.Module):
    """Layers with and without bias, forwards and backwards: products of all layouts."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 37), nn.Linear(37, 12, bias=False), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(x))))


class Train(gz.Graph):
    def __init__(self, matmul, stage=0, dtype=torch.float32, ranks=2, virtual=True):
        super().__init__(gz.placement("cpu", range(ranks), virtual=virtual))
        torch.manual_seed(0)
        self.model = Net().to(dtype)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.config.set_matmul(matmul)
        self.config.enable_zero(bool(stage), stage=stage or 1)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


class Ops(TorchDispatchMode):
    """Names of the ops that are called while it is active."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func.name())
        return func(*args, **(kwargs or {}))


def batch(dtype=torch.float32):
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=dtype)


def trained(graph, steps=3):
    x = batch(next(graph.model.parameters()).dtype)
    losses = [graph(x) for _ in range(steps)]
    return [*losses, *graph.full_state_dict()["modules"]["model"].values()]


def ops_of_a_call(graph):
    with Ops() as mode:
        graph(batch(next(graph.model.parameters()).dtype))
    return mode.called


def say(monkeypatch, seconds=(1.0, 1.0), errors=(1e-7, 1e-7)):
    """Trying finds this for every product."""
    monkeypatch.setattr(products, "try_out", lambda product: Figures(product, seconds, errors))


@pytest.fixture
def untried():
    products._try_out.cache_clear()
    yield
    products._try_out.cache_clear()


# ---- the setting


def test_an_unknown_name_is_refused_with_the_choices_and_none_is_the_default():
    config = Train("default").config
    assert config.matmul == "default" and "matmul" not in repr(config)
    with pytest.raises(gz.ConfigError, match="'default', 'onednn', 'fastest'"):
        config.set_matmul("mkl")


def test_a_change_makes_another_program_from_the_same_capture_and_back_again():
    graph = Train("default")
    before = graph.config.fingerprint
    graph(batch())
    first = graph._selection.last
    graph.config.set_matmul("onednn")
    assert graph.config.fingerprint != before and "matmul=onednn" in graph.config.description
    assert LINEAR in ops_of_a_call(graph)
    assert graph._selection.last is not first and graph._selection.last.captured is first.captured
    graph.config.set_matmul("default")
    assert LINEAR not in ops_of_a_call(graph) and graph._selection.last is first


# ---- the kernels


def wide(rows, columns):
    return torch.randn(2 * rows, 2 * columns)


LAYOUTS = {
    "dense": lambda r, c: torch.randn(r, c),
    "transposed": lambda r, c: torch.randn(c, r).t(),
    "part of rows": lambda r, c: wide(r, c)[:r, 1 : c + 1],
    "part of columns": lambda r, c: wide(c, r)[:c, 1 : r + 1].t(),
    "every second": lambda r, c: wide(r, c)[::2, ::2],
    "one column for all": lambda r, c: torch.randn(r, 1).expand(r, c),
    "one row for all": lambda r, c: torch.randn(1, c).expand(r, c),
    "windows": lambda r, c: torch.randn(r + 2 * c).as_strided((r, c), (1, 2)),
    "in the middle": lambda r, c: torch.randn(r * c + 3)[3:].view(r, c),
}
VECTORS = {
    "dense": torch.randn,
    "every second": lambda n: torch.randn(2 * n)[::2],
    "one for all": lambda n: torch.randn(1).expand(n),
}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_products_of_matrices_however_they_lie_are_right_and_dense(first, second):
    torch.manual_seed(0)
    a, b = LAYOUTS[first](6, 7), LAYOUTS[second](7, 5)
    found = products.onednn(a, b)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == 6 * 5 * 4
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vector", VECTORS)
def test_a_vector_is_added_however_it_lies(vector):
    a, b, c = torch.randn(6, 7), torch.randn(7, 5), VECTORS[vector](5)
    torch.testing.assert_close(products.onednn_add(c, a, b), torch.addmm(c, a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1), (1, 3, 1), (3, 1, 4)])
def test_empty_shards_and_single_elements_are_served(sizes):
    rows, inner, columns = sizes
    a, b, c = torch.randn(rows, inner), torch.randn(columns, inner).t(), torch.randn(columns)
    torch.testing.assert_close(products.onednn(a, b), torch.mm(a, b))
    torch.testing.assert_close(products.onednn_add(c, a, b), torch.addmm(c, a, b))


# ---- programs


def test_a_step_with_onednn_is_the_step_without_it_up_to_rounding():
    ours, theirs = trained(Train("onednn")), trained(Train("default"))
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-6)


def test_stages_agree_to_the_bit_with_onednn(monkeypatch):
    monkeypatch.setitem(globals(), "batch", lambda dtype: torch.ones(12, 12, dtype=dtype).cumsum(0) / 7)
    first, *others = (trained(Train("onednn", stage, ranks=3)) for stage in (0, 1, 2, 3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_the_plan_is_what_a_call_holds_with_onednn_too(stage):
    with gz.testing.fake_world(2):
        graph = Train("onednn", stage, virtual=False)
        assert LINEAR in ops_of_a_call(graph)
        measured = gz.testing.measure_step(graph, batch())
    memory = graph.plan.memory
    assert (measured.peak, measured.at_peak) == (memory.peak, {k: n for k, n in memory.at_peak.items() if n})


def test_every_product_of_the_step_goes_to_onednn_and_none_is_left_with_torch():
    graph = Train("onednn", ranks=1)
    graph(batch())
    called = ops_of_a_call(graph)
    assert called.count(LINEAR) == 8  # three forwards; three gradients of weights, two of what layers read
    assert not {"aten::mm", "aten::addmm"} & set(called)


def test_other_dtypes_stay_with_torch_and_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(products, "try_out", None)
    assert LINEAR not in ops_of_a_call(Train("onednn", dtype=torch.float64))


def test_compiling_tries_nothing(monkeypatch):
    monkeypatch.setattr(products, "try_out", None)
    graph = Train("fastest").compile(batch())
    assert graph.is_compiled


# ---- trying


def test_every_distinct_product_is_tried_once_with_the_sizes_of_a_rank(monkeypatch):
    tried = []
    say(monkeypatch)
    figures = products.try_out
    monkeypatch.setattr(products, "try_out", lambda product: tried.append(product) or figures(product))
    trained(Train("onednn", ranks=2), steps=1)
    sizes = {"nt": [(4, 12, 37), (4, 37, 12), (4, 12, 5)], "nn": [(4, 5, 12), (4, 12, 37)]}
    sizes["tn"] = [(37, 4, 12), (12, 4, 37), (5, 4, 12)]
    assert len(tried) == 8 and set(tried) == {Product(*s, layouts) for layouts in sizes for s in sizes[layouts]}


def test_a_kernel_of_lower_precision_is_refused_with_its_figures(monkeypatch, untried):
    def coarse(x, weight, bias, *rest):
        return (x.bfloat16() @ weight.t().bfloat16()).float() + (0 if bias is None else bias)

    theirs = trained(Train("default"))
    monkeypatch.setattr(products, "_linear", coarse)
    with pytest.warns(UserWarning, match=r"(?s)'onednn'.*less precise, n[nt] .*relative error of .*e-03, torch's own"):
        ours = trained(Train("onednn"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fastest_refuses_what_is_not_faster_and_onednn_takes_it(monkeypatch):
    say(monkeypatch, seconds=(1.0, 1.0))
    with pytest.warns(
        UserWarning, match=r"(?s)'fastest'.*8 of 8.*not faster, nn \[4, 12\] x \[12, 37\]: .*GFLOP/s.*and 4 more"
    ) as caught:
        assert LINEAR not in ops_of_a_call(Train("fastest"))
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LINEAR in ops_of_a_call(Train("onednn"))


def test_fastest_takes_the_products_that_are_faster(monkeypatch):
    def figures(product):
        return Figures(product, (1.0, 0.5 if product.layouts == "nt" else 2.0), (1e-7, 1e-7))

    monkeypatch.setattr(products, "try_out", figures)
    with pytest.warns(UserWarning, match="not faster, nn") as caught:
        called = ops_of_a_call(Train("fastest", ranks=1))
    assert called.count(LINEAR) == 3 and "nt [" not in str(caught[0].message)


def test_without_onednn_torch_computes_and_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(products, "_linear", None)
    with pytest.warns(UserWarning, match="has no oneDNN"):
        assert LINEAR not in ops_of_a_call(Train("onednn"))


def test_trying_leaves_torchs_random_numbers_alone_and_is_done_once(untried):
    before, product = torch.get_rng_state(), Product(9, 8, 7, "tn")
    found = products.try_out(product)
    assert found.is_precise and min(found.seconds) > 0 and found.product == product
    assert products.try_out(product) is found
    assert torch.equal(torch.get_rng_state(), before)


def test_huge_products_are_tried_at_a_size_that_fits(monkeypatch):
    monkeypatch.setattr(products, "LARGEST", 16)
    assert products.try_out(Product(10**9, 8, 10**9, "nn")).product == Product(16, 8, 16, "nn")


def test_sums_in_another_order_pass_and_half_precision_does_not():
    fair = Figures(Product(8, 8, 8, "nn"), (1.0, 1.0), (4e-7, 9e-7))
    assert fair.is_precise and not fair.is_faster
    assert not replace(fair, errors=(4e-7, 2e-3)).is_precise
    assert not replace(fair, errors=(4e-7, 3e-4)).is_precise  # TF32
    assert replace(fair, seconds=(1.0, 0.5)).is_faster
