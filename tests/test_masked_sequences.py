"""Packed documents and sliding windows on a split sequence: exact, and a rank makes its rows of a mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from test_split_sequences import DIM, IGNORED, VOCABULARY, WIDTH, Gpt, placed, splits_of_attention, transfers
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir import value

B, S = gz.sbp.B, gz.sbp.S
LENGTH, WINDOW = 8, 3
DOCUMENTS = ([3, 1, 4], [8], [1, 6, 1], [5, 3])  # the lengths of those in each row

pytestmark = pytest.mark.filterwarnings("ignore:no axis of placement")  # of one without a data axis


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens; labels, of which the first of each document is ignored; the document and the place in it of each."""
    ids = torch.randint(0, VOCABULARY, (len(DOCUMENTS), LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS])
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    return ids, ids.masked_fill(places == 0, IGNORED), documents, places


class MaskedGpt(nn.Module):
    """A model with a mask of its own. mask: of documents, [rows, length], and of ``torch.arange(length)``."""

    def __init__(self, mask: Any, heads: tuple[int, int] = (8, 4)) -> None:
        super().__init__()
        self.gpt, self.mask = Gpt(heads), mask

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        mask = self.mask(documents, places) & (places <= places[:, None])
        x = self.gpt.tokens(ids) + self.gpt.places(places)
        for block in self.gpt.blocks:
            x = block(x, mask[:, None])
        return self.gpt.head(self.gpt.norm(x))


def of_documents(documents: Tensor, places: Tensor) -> Tensor:
    return documents[:, :, None] == documents[:, None, :]


def of_a_window(documents: Tensor, places: Tensor) -> Tensor:
    return (places[:, None] - places < WINDOW)[None]


def of_both(documents: Tensor, places: Tensor) -> Tensor:
    return of_documents(documents, places) & of_a_window(documents, places)


def next_token_loss(model: nn.Module, ids: Tensor, labels: Tensor, documents: Tensor) -> Tensor:
    ahead = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(model(ids, documents).flatten(0, 1), ahead.flatten(), ignore_index=IGNORED)


def graph_of(model: nn.Module, loss: Any, placement: gz.Placement, way: str, **options: Any) -> TrainGraph:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    graph = TrainGraph(model, loss, optimizer, placement=placement, **options)
    sbp = tuple({"d": S(0), "c": S(1)}[name[0]] for name in placement.names)
    for name in ("x", "y", "more.0"):
        graph.config.set_input(name, sbp=sbp)
    graph.config.set_split_attention(way)
    return graph


def assert_parity(graph: TrainGraph, third: Tensor, rtol: float = 1e-9) -> None:
    """Two steps are those of plain PyTorch.  third: what the model is given beside tokens and labels."""
    ids, labels, *_ = batch()
    plain = copy.deepcopy(graph.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        expected = graph.loss_fn(plain, ids, labels, third)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(graph(ids, labels, third), expected.detach(), rtol=rtol, atol=1e-12)
    new = graph.full_state_dict()["modules"]["model"]
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(new[name], x, rtol=rtol, atol=rtol * 0.1, msg=lambda text, name=name: name + text)


def splits_of_masks(graph: TrainGraph, axis: str = "cp") -> set[str]:
    """How values of a row for each query and a column for each key are split on an axis when data moves."""
    lowered = next(record.after for record in graph.history if record.name == "lower_boxing")
    at = lowered.placement.axis(axis)
    sbps = {value.nd_of(node)[at]: len(value.tensor_type(node).shape) for node in lowered.nodes if _is_mask(node)}
    assert sbps
    return {f"S({sbp.dim - ndim})" if sbp.is_split else str(sbp) for sbp, ndim in sbps.items()}


def _is_mask(node: torch.fx.Node) -> bool:
    shape = value.tensor_type(node).shape if value.is_tensor(node) else ()
    return len(shape) in (3, 4) and shape[-2:] == (LENGTH, LENGTH) and value.tensor_type(node).dtype is torch.bool


MASKS = {"documents": of_documents, "a window": of_a_window, "both": of_both}
FAST = [
    ("documents", {"cp": 4}, "exchange", {"stage": 3, "axis": "cp"}),
    ("documents", {"dp": 2, "cp": 2}, "gather", {"stage": 1, "micro_batches": 2}),
    ("a window", {"cp": 4}, "gather", {}),
]
SLOW = [
    ("documents", {"cp": 2}, "exchange", {}),
    ("documents", {"cp": 4}, "gather", {"stage": 3, "axis": "cp"}),
    ("documents", {"dp": 2, "cp": 2}, "exchange", {"stage": 2, "micro_batches": 2}),
    ("documents", {"dp": 2, "cp": 2}, "gather", {"stage": 3, "axis": ("dp", "cp")}),
    ("documents", {"dp": 1}, "auto", {}),
    ("a window", {"dp": 2, "cp": 2}, "exchange", {"stage": 2}),
    ("both", {"cp": 4}, "exchange", {}),
    ("both", {"cp": 4}, "gather", {"micro_batches": 4}),
]


@pytest.mark.parametrize(
    ("mask", "sizes", "way", "options"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_step_under_a_mask_is_that_of_plain_pytorch(mask, sizes, way, options) -> None:
    """Under a gather the mask is made in rows; under an exchange each rank needs all of it for its heads."""
    graph = graph_of(MaskedGpt(MASKS[mask]).double(), next_token_loss, placed(**sizes), way, **options)
    assert_parity(graph, batch()[2])
    if "cp" in sizes:
        assert splits_of_attention(graph) == {"S(2)" if way == "gather" else "S(1)"}
        assert splits_of_masks(graph) == {"S(-2)" if way == "gather" else "B"}


@pytest.mark.parametrize("mask", ["documents", pytest.param("both", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [pytest.param("exchange", marks=pytest.mark.slow), "gather"])
def test_no_mask_travels_and_what_it_is_made_of_is_small(mask, way) -> None:
    graph = graph_of(MaskedGpt(MASKS[mask]), next_token_loss, placed(cp=4), way)
    ids, labels, documents, _ = batch()
    sent = transfers(graph.compile(ids, labels, documents))
    of_queries, of_keys = (len(DOCUMENTS) * LENGTH * heads * DIM * 4 for heads in (8, 4))
    labels_and_documents = 2 * len(DOCUMENTS) * LENGTH * 8 * 3 / 4
    assert sent.pop("all_reduce") <= 24
    if way == "gather":
        of_all = 2 * of_keys * 3 / 4
        assert sent == {"all_gather": of_all + labels_and_documents, "reduce_scatter": of_all}
    else:
        assert sent == {"all_to_all": 4 * (of_queries + of_keys) * 3 / 4 / 4, "all_gather": labels_and_documents}


def test_a_rank_holds_its_rows_of_a_mask_where_keys_are_gathered() -> None:
    """[1, 1, length, length] numbers under an exchange, a quarter of them on each of four ranks under a gather."""

    class OneLayer(nn.Module):
        def forward(self, x: Tensor, documents: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            places = torch.arange(x.shape[1])
            mask = of_documents(documents, places) & (places <= places[:, None])
            return F.scaled_dot_product_attention(heads, heads, heads, mask[:, None])

    length, x = 512, torch.empty(1, 512, 4, device="meta")
    held = {}
    for way in ("exchange", "gather"):
        graph = TrainGraph(OneLayer(), lambda model, x, documents: model(x, documents).sum(), placement=placed(cp=4))
        for name in ("x", "y"):
            graph.config.set_input(name, sbp=S(1))
        graph.config.set_split_attention(way)
        graph.compile(x, torch.empty(1, length, dtype=torch.long, device="meta"))
        held[way] = graph.plan.memory.peak
    assert length**2 * 4 < held["exchange"] < length**2 * 7
    assert length**2 < held["gather"] < length**2 * 2


@pytest.mark.parametrize(("length", "way"), [(16, "S(1)"), (512, "S(2)")])
def test_what_is_made_of_a_mask_counts_as_what_is_sent(length, way) -> None:
    """Heads are fewer bytes than keys here, and their ranks make all rows of a mask: too many of a long sequence."""

    def loss(model: nn.Module, x: Tensor, documents: Tensor) -> Tensor:
        heads = x.unflatten(-1, (8, -1)).transpose(1, 2)
        mask = of_documents(documents, torch.arange(length))
        return F.scaled_dot_product_attention(heads, heads, heads, mask[:, None]).sum()

    graph = TrainGraph(nn.Linear(2, 2), loss, placement=placed(cp=4))
    for name in ("x", "y"):
        graph.config.set_input(name, sbp=S(1))
    graph.compile(torch.empty(1, length, 64, device="meta"), torch.empty(1, length, dtype=torch.long, device="meta"))
    assert splits_of_attention(graph) == {way}


# ---- documents by their lengths


def documents_of(ends: Tensor, places: Tensor) -> Tensor:
    return torch.bucketize(places, ends, right=True)


def test_lengths_of_documents_become_a_mask_by_bucketize() -> None:
    """As the errors for varlen_attn and flex_attention say."""

    def mask(ends: Tensor, places: Tensor) -> Tensor:
        return of_documents(documents_of(ends, places)[None], places)

    graph = graph_of(MaskedGpt(mask).double(), next_token_loss, placed(cp=4), "gather")
    graph.config.set_input("more.0", sbp=B)
    assert_parity(graph, torch.tensor([3, 4, 8], dtype=torch.int32))
    assert splits_of_masks(graph) == {"S(-2)"}


def test_attention_over_lengths_is_refused_with_what_to_write() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def loss(model: nn.Module, x: Tensor, ends: Tensor) -> Tensor:
        return varlen.varlen_attn(x, x, x, ends, ends, LENGTH, LENGTH).sum()

    graph = TrainGraph(nn.Linear(2, 2), loss, placement=placed(cp=2))
    graph.config.set_input("y", sbp=B)
    with pytest.raises(
        gz.CaptureError, match=r"varlen_attn.*\n\n  at .*test_masked_sequences.*in loss(.|\n)*bucketize"
    ):
        graph(torch.randn(LENGTH, 2, 4), torch.tensor([0, 3, 8], dtype=torch.int32))


@pytest.mark.parametrize("learns", [True, False])
def test_attention_with_a_function_as_mask_is_refused_with_what_to_write(learns) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def loss(model: nn.Module, x: Tensor, documents: Tensor) -> Tensor:
        mask = flex.create_block_mask(
            lambda b, h, q, k: documents[b, q] == documents[b, k], 4, None, LENGTH, LENGTH, device="cpu"
        )
        x = model(x) if learns else x
        return flex.flex_attention(x, x, x, block_mask=mask).sum()

    graph = TrainGraph(nn.Linear(2, 2), loss, placement=placed(cp=2))
    with pytest.raises(gz.CaptureError, match=r"flex_attention(.|\n)*in loss(.|\n)*scaled_dot_product_attention"):
        graph(torch.randn(4, 2, LENGTH, 2), batch()[2])


# ---- models of transformers


def test_the_places_of_a_long_sequence_are_known_while_a_step_is_traced() -> None:
    """transformers looks whether they begin again; taken for unknown it made a mask of all pairs of 131,072 tokens."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
        documents = (torch.diff(places, prepend=places[:, :1] - 1) != 1).cumsum(-1)
        if (documents[:, -1] == 0).all():
            return x.sum()
        return (documents[:, :, None] == documents[:, None, :]).sum()

    graph = TrainGraph(nn.Linear(2, 2), loss, placement=placed(cp=4)).compile(torch.empty(8, 2**17, device="meta"))
    assert max(value.tensor_type(node).numel for node in graph.program.nodes if value.is_tensor(node)) <= 2**20 + 8


def published(kind: str) -> nn.Module:
    """A tiny model; Mistral and Gemma 3 have windows of ``WINDOW`` keys, Gemma 3 in one of two layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "use_cache": False,
        "head_dim": DIM,
    }  # fmt: skip
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=WINDOW))
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=WINDOW, layer_types=layers)
        return transformers.Gemma3ForCausalLM(config)
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=8, n_positions=LENGTH, use_cache=False, **rates
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def own_loss(model: nn.Module, ids: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """The model's; places that begin again at 0 say where a document begins."""
    return model(input_ids=ids, labels=labels, position_ids=places).loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:build of Train asks whether it is being traced")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for kind in ("llama", "qwen3", "gpt2", "mistral", "gemma3") for way in ("exchange", "gather"))],
)
def test_models_of_transformers_take_documents_by_places_that_begin_again(kind, way) -> None:
    """To the rounding of float32, in which transformers computes the loss."""
    graph = graph_of(published(kind).double(), own_loss, placed(cp=4), way)
    assert_parity(graph, batch()[3], rtol=1e-5)
    assert splits_of_attention(graph) == {"S(2)" if way == "gather" else "S(1)"}
    assert splits_of_masks(graph) == {"S(-2)" if way == "gather" else "B"}


def test_documents_read_nothing_of_each_other() -> None:
    """The mask says something: another first document does not change what the second predicts."""
    ids, _, documents, _ = batch()
    model = MaskedGpt(of_documents).double()
    changed = torch.where(documents == 0, (ids + 1) % VOCABULARY, ids)
    before, after = model(ids, documents), model(changed, documents)
    assert torch.equal(before[documents > 0], after[documents > 0])
    assert not torch.equal(before[documents == 0], after[documents == 0])
