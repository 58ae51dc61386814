"""Batches and outputs of any form: dataclasses, named tuples, outputs of models; they come back as they are."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from user_steps import batch, mlp, virtual

import graphzero as gz


@dataclass
class Item:
    x: Tensor
    y: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Nested:
    item: Item
    more: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        assert self.more, "made by its own constructor only"


@dataclass
class Registered:
    x: Tensor
    y: Tensor


pytree.register_dataclass(Registered)
Pair = namedtuple("Pair", "x y")


class Forms(gz.Graph):
    """Gives back what it is given, as it is given."""

    def __init__(self):
        super().__init__(virtual())
        self.model = mlp()

    def build(self, given):
        loss = F.mse_loss(self.model(given.x), given.y) * getattr(given, "scale", 1.0)
        return type(given)(given.x * 2, given.y), loss


@pytest.mark.parametrize("kind", [Item, Registered, Pair])
def test_a_batch_and_an_output_may_be_a_dataclass_or_a_named_tuple(kind):
    graph, (x, y) = Forms(), batch(0)
    found, loss = graph(kind(x, y))
    assert type(found) is kind and torch.equal(found.x, x * 2) and type(found.x) is Tensor
    torch.testing.assert_close(loss, F.mse_loss(graph.model(x), y).detach())
    assert [n.meta["role"].of for n in graph.program.placeholders("batch")] == ["given.x", "given.y"]


def test_a_float_in_a_dataclass_is_read_anew_and_nothing_is_registered_behind_the_users_back():
    graph, (x, y) = Forms(), batch(0)
    _, first = graph(Item(x, y))
    program = graph.program
    found, second = graph(Item(x, y, scale=3.0))
    torch.testing.assert_close(second, first * 3)
    assert graph.program is program and found.scale == 1.0
    assert pytree.tree_leaves(found) == [found]


def test_dataclasses_may_hold_each_other_and_be_frozen():
    class Deep(gz.Graph):
        def build(self, given):
            return {"out": Nested(Item(given.item.x + given.more[0], given.item.y), [given.more[0] * 2])}

    x, y = batch(0)
    graph = Deep(virtual())
    graph.config.set_input("given.more.0", sbp=gz.sbp.B)
    found = graph(Nested(Item(x, y), [torch.ones(6, dtype=torch.float64)]))["out"]
    assert torch.equal(found.item.x, x + 1) and found.more[0].tolist() == [2.0] * 6
    with pytest.raises(FrozenInstanceError):
        found.more = []


def test_an_object_of_another_class_is_refused_with_the_next_step():
    class Bag:
        def __init__(self, x, y):
            self.x, self.y = x, y

    with pytest.raises(gz.CaptureError, match=r"given is a Bag.*dicts, lists, tuples and dataclasses.*register Bag"):
        Forms()(Bag(*batch(0)))


def test_a_model_output_of_transformers_comes_back_as_it_is_and_leaves_the_model_as_it_was():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)

    class Predict(gz.Graph):
        def __init__(self):
            super().__init__(virtual())
            self.model = model

        def build(self, **given):
            return self.model(**given, output_hidden_states=True)

    ids = torch.randint(16, (4, 8))
    given = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    found, wanted = Predict()(**given), model(**given, output_hidden_states=True)
    assert type(found) is type(wanted) and len(found.hidden_states) == len(wanted.hidden_states) == 3
    torch.testing.assert_close(found.loss, wanted.loss.detach())
    torch.testing.assert_close(found.hidden_states, tuple(h.detach() for h in wanted.hidden_states))
