"""Arguments of a call: what a Graph takes in any form, and what it refuses by name."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wrong import X, Y, make, refused, train

import graphzero as gz

FORMS = {
    "transposed": lambda: torch.randn(4, 8).t(),
    "expanded": lambda: torch.randn(1, 4).expand(8, 4),
    "strided": lambda: torch.randn(16, 8)[::2, ::2],
    "overlapping": lambda: torch.randn(11).as_strided((8, 4), (1, 1)),
    "negated": lambda: torch.randn(8, 4, dtype=torch.complex64).conj().imag,
    "from inference mode": lambda: torch.inference_mode()(torch.randn)(8, 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_any_layout_in_memory_work(form):
    graph, x = make(), FORMS[form]()
    expected = F.cross_entropy(graph.model(x.clone()), Y).detach()
    torch.testing.assert_close(graph(x, Y), expected)


def test_complex_inputs_and_values_work():
    def build(self, x, y):
        return train(self, torch.fft.fft(x).abs(), y)

    graph, x = make(build), torch.randn(8, 4, dtype=torch.complex64)
    expected = F.cross_entropy(graph.model(torch.fft.fft(x).abs()), Y).detach()
    torch.testing.assert_close(graph(x, Y), expected)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*MaskedTensors", "ignore:.*quantize")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make_input", "words"),
    [
        (lambda: X.to_sparse(), ("sparse_coo", "x.to_dense()")),
        (lambda: X.to_sparse_csr(), ("sparse_csr", "x.to_dense()")),
        (lambda: torch.nested.nested_tensor([X[:2], X[:3]]), ("nested", "pad")),
        (lambda: torch.nested.nested_tensor([X[:2], X[:3]], layout=torch.jagged), ("nested", "pad")),
        (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), ("quantized", "x.dequantize()")),
        (lambda: torch.masked.masked_tensor(X, X > 0), ("MaskedTensor", "plain tensors")),
        (lambda: X.clone().requires_grad_(), ("requires grad", "x.detach()")),
        (lambda: nn.Parameter(X), ("requires grad", "nn.Parameter of a module")),
        (lambda: X.numpy(), ("ndarray", "torch.as_tensor(x)")),
        (lambda: {1, 2}, ("set", "dicts, lists")),
    ],
)
def test_tensors_that_are_not_dense_numbers_are_refused_by_name(make_input, words):
    refused(make(), gz.CaptureError, "input x", *words, args=(make_input(), Y))


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


class Listed:
    def __init__(self, x, y):
        self.held = [x, y]


@pytest.mark.parametrize(("batch", "where"), [(Slotted(X, Y), ".x"), (Listed(X, Y), ".held[0]")])
def test_tensors_hidden_in_an_object_are_refused_rather_than_written_down(batch, where):
    def build(self, batch):
        return train(self, *(batch.held if isinstance(batch, Listed) else (batch.x, batch.y)))

    refused(make(build), gz.CaptureError, "input batch", f"a tensor in {where}", "register", args=(batch,))


def test_an_iterator_is_refused_since_only_the_first_call_would_read_it():
    def build(self, batches):
        return train(self, *next(batches))

    refused(make(build), gz.CaptureError, "input batches", "graph(next(batches))", args=(iter([(X, Y), (Y, X)]),))


def test_tensors_without_values_are_for_compile_only():
    graph = make()
    graph.compile(X.to("meta"), Y.to("meta"))
    refused(graph, gz.ConfigError, "input x (float32[8, 4])", "meta device", args=(X.to("meta"), Y.to("meta")))
    graph(X, Y)
    refused(graph, gz.ConfigError, "meta device", args=(X.to("meta"), Y))


def test_a_text_or_none_where_build_wants_a_tensor_shows_the_line():
    for x, kind in (("text", "str"), (None, "NoneType")):
        refused(make(), gz.CaptureError, f"not {kind}", "wrong.py:", args=(x, Y))


def test_numbers_of_numpy_are_numbers():
    def build(self, x, y, scale):
        return train(self, x * scale, y)

    graph = make(build, lr=0.0)
    assert graph(X, Y, np.float64(2)) == graph(X, Y, 2.0)


@pytest.mark.parametrize("args", [(X,), (X, Y, X)])
def test_a_wrong_number_of_arguments_is_pythons_own_error(args):
    with pytest.raises(TypeError, match="argument"):
        make()(*args)


def test_a_batch_that_does_not_divide_is_refused_with_sizes():
    refused(make(ranks=3), gz.CaptureError, "[8, 4]", "3 ranks", "8 = 2 x 3 + 2", "drop_last", "set_input('x'")


def test_an_empty_batch_gives_what_plain_pytorch_gives():
    graph = make(weight_decay=0.5)
    before = [p.detach().clone() for p in graph.model.parameters()]
    assert F.cross_entropy(graph.model(X[:0]), Y[:0]).isnan() and graph(X[:0], Y[:0]).isnan()
    for now, then in zip(graph.model.parameters(), before, strict=True):  # gradients of zero, and the decay
        torch.testing.assert_close(now.detach(), then * (1 - 0.1 * 0.5))


def test_an_input_of_another_dtype_is_refused_at_the_product_or_compiles_anew():
    def casts(self, x, y):
        return train(self, x.float(), y)

    refused(make(), gz.CaptureError, "float64[8, 4]", "wrong.py:", args=(X.double(), Y))
    graph = make(casts, lr=0.0)
    torch.testing.assert_close(graph(X.double(), Y), graph(X, Y))


def test_shapes_that_do_not_fit_show_both_and_the_line():
    refused(make(), gz.CaptureError, "[8, 3] X [4, 3]", "wrong.py:", args=(X[:, :3], Y))
    refused(make(), gz.CaptureError, "batch_size (8)", "(4)", args=(X, Y[:4]))


def test_what_only_values_can_show_is_torchs_error_with_the_line_in_a_note():
    with pytest.raises(IndexError, match="out of bounds") as caught:
        make()(X, Y + 100)
    notes = "\n".join(getattr(caught.value, "__notes__", ["wrong.py:"]))
    assert "wrong.py:" in notes


def test_set_input_is_checked_against_the_input():
    for name, sbp, words in (("z", gz.sbp.B, ("no such input", "x, y")), ("x", gz.sbp.S(5), ("no dim 5",))):
        graph = make()
        graph.config.set_input(name, sbp=sbp)
        refused(graph, gz.ConfigError, *words)
