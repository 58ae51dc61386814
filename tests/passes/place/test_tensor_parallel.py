"""Megatron's pattern from the split of the weights alone: what a transformer block sends on the tensor axis, and what
its printed program looks like."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache

import pytest
import torch
from graphs import TrainGraph, loss_of_model
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.sbp import B, S

D = torch.float64
TOKENS, WIDTH, HEADS, DIM = (4, 8), 16, 4, 4


class Block(nn.Module):
    """Attention and MLP after norms; ``kv`` heads of keys and values, fused in one projection or not."""

    def __init__(self, kv: int = HEADS, fused: bool = False):
        super().__init__()
        self.kv, self.fused = kv, fused
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv * DIM), nn.Linear(WIDTH, kv * DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(WIDTH, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
        if k.shape[1] < q.shape[1]:
            k, v = (part.repeat_interleave(HEADS // self.kv, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Two blocks: the first, whose input needs no gradient, and one that others would be like."""

    def __init__(self, pins: tuple[gz.sbp.Sbp | None, ...] | None = None, **options: object):
        super().__init__()
        self.pins = pins
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.pins is not None:
                x = gz.to_global(x, sbp=self.pins)
            x = block(x)
        return (x if self.pins is None else gz.to_global(x, sbp=self.pins)).pow(2).mean()


COLUMN, ROW = ("qkv", "q", "k", "v", "up"), ("out", "down")


def split_weights(model: nn.Module, where: gz.Placement) -> None:
    """Columns then rows: all that a user says."""
    data = (B,) * (len(where.names) - 1)
    for path, module in model.named_modules():
        kind = path.rpartition(".")[2]
        if kind in COLUMN:
            for tensor in module.parameters():
                gz.to_global(tensor, placement=where, sbp=(*data, S(0, 3 if kind == "qkv" else 1)))
        elif kind in ROW:
            gz.to_global(module.weight, placement=where, sbp=(*data, S(1)))


def tensor_parallel_graph(where: gz.Placement, model: nn.Module, stage: int = 0) -> TrainGraph:
    split_weights(model, where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainGraph(model, loss_of_model, optimizer, placement=where, stage=stage)


def place(*shape: int) -> gz.Placement:
    names = ("dp_replicate", "dp_shard", "tp")[-len(shape) :] if len(shape) > 2 else ("dp", "tp")[-len(shape) :]
    return gz.placement("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist(), names, virtual=True)


def made(where: gz.Placement, stage: int = 0, pins: object = None, **options: object) -> TrainGraph:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no axis of")  # tp alone: every rank takes the whole batch
        return tensor_parallel_graph(where, Model(pins, **options).to(D), stage)  # type: ignore[arg-type]


def batch() -> Tensor:
    return torch.randn(*TOKENS, WIDTH, dtype=D, generator=torch.Generator().manual_seed(1))


def activations(graph: gz.Graph, axis: str = "tp") -> dict[str, Counter[str]]:
    """Collectives on ``axis`` of values with tokens in them, by phase: those of the size of an activation."""
    whole = torch.Size((*TOKENS, WIDTH)).numel() * D.itemsize
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    ranks = graph._source.world.placement.hierarchy[graph._source.world.placement.axis(axis)]
    for record in graph.plan.collectives:
        large = record.bytes >= whole * (ranks - 1) / ranks / 2
        if record.axis == axis and record.what_for == "other" and record.phase in found and large:
            found[record.phase][record.kind] += 1
    return found


OPTIONS = {"heads": {}, "grouped_heads": {"kv": 2}, "fused_qkv": {"fused": True}}


@cache
def compiled(kind: str, *shape: int) -> TrainGraph:
    """A Graph that is only looked at."""
    graph = made(place(*shape), **OPTIONS[kind])
    graph.compile(batch())
    return graph


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_block_costs_two_all_reduces_forward_and_two_backward(kind):
    graph = compiled(kind, 2)
    # of two blocks; the first needs no gradient of its input, so its attention has none to reduce
    assert activations(graph) == {"forward": Counter(all_reduce=4), "backward": Counter(all_reduce=3)}


@pytest.mark.parametrize("kind", OPTIONS)
def test_with_activations_split_along_the_sequence_they_are_gathers_and_reduce_scatters(kind):
    graph = made(place(2), pins=(S(1),), **OPTIONS[kind])
    graph.compile(batch())
    both = Counter(all_gather=4, reduce_scatter=4)  # of two blocks
    assert activations(graph) == {"forward": both, "backward": both}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(((2, 2), kind) for kind in OPTIONS),
        *(pytest.param((2, 1, 2), kind, marks=[] if kind == "heads" else [pytest.mark.slow]) for kind in OPTIONS),
    ],
    ids=str,
)
def test_the_data_axis_changes_nothing_on_the_tensor_axis(shape, kind):
    alone, beside = compiled(kind, 2), compiled(kind, *shape)
    assert {p: c.keys() for p, c in activations(beside).items()} == {p: c.keys() for p, c in activations(alone).items()}
    assert activations(beside)["forward"].total() == 4
    moved = [c for c in beside.plan.collectives if c.axis != "tp" and c.what_for == "other" and c.bytes > 64]
    assert not moved, "a batch stays where it is"


STAGES = (0, 1, 2, 3, 3)  # at which one Graph, which is captured once, takes its steps


def losses(graph: gz.Graph) -> list[float]:
    found = []
    for stage in STAGES:
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        found.append(graph(batch()).item())
    return found


def plain(**options: object) -> list[float]:
    torch.manual_seed(0)
    model = Model(**options).to(D)  # type: ignore[arg-type]
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in STAGES:
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("kind", "sequence"),
    [
        pytest.param(kind, how == "sequence", id=f"{kind}-{how}", marks=[] if how == quick else [pytest.mark.slow])
        for kind, quick in {"heads": "", "grouped_heads": "sequence", "fused_qkv": ""}.items()
        for how in ("", "sequence")
    ],
)
def test_the_step_is_that_of_one_device_at_every_stage(kind, sequence):
    pins = (None, S(1)) if sequence else None
    graph = made(place(2, 2), pins=pins, **OPTIONS[kind])
    assert losses(graph) == pytest.approx(plain(**OPTIONS[kind]), rel=1e-12)


def test_zero_splits_further_what_the_tensor_axis_has_split():
    graph = made(place(2, 2), 3, fused=True)
    graph.compile(batch())
    held = {value.name: str(value.meta["sbp"]) for value in graph.program.placeholders("param")}
    assert held["model_blocks_0_qkv_weight"] == "(S(1), S(0, 3))"  # the free dim over dp
    assert held["model_blocks_0_up_bias"] == "(S(0, 2), S(0))"  # within what tp has cut: it is gathered over dp alone
    assert held["model_blocks_0_qkv_bias"] == "(B, S(0, 3))"  # no DTensor would say it
    assert held["model_blocks_0_down_weight"] == "(S(0), S(1))"


class Pair(gz.Graph):
    """Column then row, and nothing else."""

    def __init__(self, where: gz.Placement, pins: gz.sbp.Nd | None = None):
        super().__init__(where)
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        gz.to_global(self.up.weight, placement=where, sbp=S(0))
        gz.to_global(self.down.weight, placement=where, sbp=S(1))
        self.pins = pins
        self.add_optimizer(torch.optim.SGD([*self.up.parameters(), *self.down.parameters()], lr=0.5))

    def build(self, x: Tensor) -> Tensor:
        h = x if self.pins is None else gz.to_global(x, sbp=self.pins)
        y = x + self.down(torch.tanh(self.up(torch.tanh(h))))
        y = y if self.pins is None else gz.to_global(y, sbp=self.pins)
        loss = (y * y).sum()
        loss.backward()
        return loss


def printed(graph: gz.Graph) -> gz.StepGraph:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no axis of")
        graph.compile(torch.zeros(2, 6, 4))
    return next(record.after for record in graph.history if record.name == "lower_boxing")


def pair(pins: gz.sbp.Nd | None = None) -> gz.StepGraph:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no axis of")
        return printed(Pair(place(2), pins))


def test_the_program_of_column_then_row():
    gz.testing.assert_graph(
        pair(),
        """
        graph Pair(tp=2) lowered
          x              = batch()                           : f32[2, 6, 4]  B!
          up_weight      = param(up.weight)                  : f32[8, 4]     S(0)!
          down_weight    = param(down.weight)                : f32[4, 8]     S(1)!
          lr_0           = hyper(optimizer0.group0, lr)      : float
        forward:
          tanh           = tanh(x)                           : f32[2, 6, 4]  B
          t              = t(up_weight)                      : f32[4, 8]     S(1)
          view           = view(tanh, [12, 4])               : f32[12, 4]    B
          mm             = mm(view, t)                       : f32[12, 8]    S(1)
          _unsafe_view   = view(mm, [2, 6, 8])               : f32[2, 6, 8]  S(2)
          tanh_1         = tanh(_unsafe_view)                : f32[2, 6, 8]  S(2)
          t_1            = t(down_weight)                    : f32[8, 4]     S(0)
          view_1         = view(tanh_1, [12, 8])             : f32[12, 8]    S(1)
          mm_1           = mm(view_1, t_1)                   : f32[12, 4]    P
          mm_1_b         = all_reduce(mm_1, 'tp', 'sum')     : f32[12, 4]    B
          _unsafe_view_1 = view(mm_1_b, [2, 6, 4])           : f32[2, 6, 4]  B
          add            = add(x, _unsafe_view_1)            : f32[2, 6, 4]  B
          mul            = mul(add, add)                     : f32[2, 6, 4]  B
          sum_1          = sum(mul)                          : f32[]         B  ; loss()
        backward:
          ones_like      = ones_like(sum_1)                  : f32[]         B
          expand         = expand(ones_like, [2, 6, 4])      : f32[2, 6, 4]  B
          mul_1          = mul(expand, add)                  : f32[2, 6, 4]  B
          mul_2          = mul(expand, add)                  : f32[2, 6, 4]  B
          add_1          = add(mul_2, mul_1)                 : f32[2, 6, 4]  B
          view_2         = view(add_1, [12, 4])              : f32[12, 4]    B
          t_2            = t(view_2)                         : f32[4, 12]    B
          mm_2           = mm(t_2, view_1)                   : f32[4, 8]     S(1)  ; gradient(down.weight)
          mm_3           = mm(view_2, down_weight)           : f32[12, 8]    S(1)
          view_3         = view(mm_3, [2, 6, 8])             : f32[2, 6, 8]  S(2)
          tanh_backward  = tanh_backward(view_3, tanh_1)     : f32[2, 6, 8]  S(2)
          view_4         = view(tanh_backward, [12, 8])      : f32[12, 8]    S(1)
          t_6            = t(view_4)                         : f32[8, 12]    S(0)
          mm_4           = mm(t_6, view)                     : f32[8, 4]     S(0)  ; gradient(up.weight)
        update:
          neg            = operator.neg(lr_0)                : float
          add_2          = add(up_weight, mm_4, alpha=neg)   : f32[8, 4]     S(0)
          add_3          = add(down_weight, mm_2, alpha=neg) : f32[4, 8]     S(1)
          return sum_1; update(up_weight=add_2, down_weight=add_3)
        """,
    )


def test_the_program_of_column_then_row_with_activations_split_along_the_sequence():
    gz.testing.assert_graph(
        pair((S(1),)),
        """
        graph Pair(tp=2) lowered
          x              = batch()                           : f32[2, 6, 4]  B!
          up_weight      = param(up.weight)                  : f32[8, 4]     S(0)!
          down_weight    = param(down.weight)                : f32[4, 8]     S(1)!
          lr_0           = hyper(optimizer0.group0, lr)      : float
        forward:
          x_s            = slice_shard(x, 1, 'tp')           : f32[2, 6, 4]  S(1)
          tanh           = tanh(x_s)                         : f32[2, 6, 4]  S(1)
          t              = t(up_weight)                      : f32[4, 8]     S(1)
          view           = view(tanh, [12, 4])               : f32[12, 4]    S(0, 2)
          tanh_b         = all_gather(tanh, 1, 'tp')         : f32[2, 6, 4]  B
          view_b         = view(tanh_b, [12, 4])             : f32[12, 4]    B
          mm             = mm(view_b, t)                     : f32[12, 8]    S(1)
          _unsafe_view   = view(mm, [2, 6, 8])               : f32[2, 6, 8]  S(2)
          tanh_1         = tanh(_unsafe_view)                : f32[2, 6, 8]  S(2)
          t_1            = t(down_weight)                    : f32[8, 4]     S(0)
          view_1         = view(tanh_1, [12, 8])             : f32[12, 8]    S(1)
          mm_1           = mm(view_1, t_1)                   : f32[12, 4]    P
          _unsafe_view_1 = view(mm_1, [2, 6, 4])             : f32[2, 6, 4]  P
          x_p            = keep_first(x, 'tp')               : f32[2, 6, 4]  P
          add            = add(x_p, _unsafe_view_1)          : f32[2, 6, 4]  P
          add_s          = reduce_scatter(add, 1, 'tp')      : f32[2, 6, 4]  S(1)
          mul            = mul(add_s, add_s)                 : f32[2, 6, 4]  S(1)
          sum_1          = sum(mul)                          : f32[]         P  ; loss()
          sum_1_b        = all_reduce(sum_1, 'tp', 'sum')    : f32[]         B
        backward:
          ones_like      = ones_like(sum_1)                  : f32[]         B
          expand         = expand(ones_like, [2, 6, 4])      : f32[2, 6, 4]  S(1)
          mul_1          = mul(expand, add_s)                : f32[2, 6, 4]  S(1)
          mul_2          = mul(expand, add_s)                : f32[2, 6, 4]  S(1)
          add_1          = add(mul_2, mul_1)                 : f32[2, 6, 4]  S(1)
          view_2         = view(add_1, [12, 4])              : f32[12, 4]    S(0, 2)
          t_2            = t(view_2)                         : f32[4, 12]    S(1, 2)
          add_1_b        = all_gather(add_1, 1, 'tp')        : f32[2, 6, 4]  B
          view_2_b       = view(add_1_b, [12, 4])            : f32[12, 4]    B
          t_2_b          = t(view_2_b)                       : f32[4, 12]    B
          mm_2           = mm(t_2_b, view_1)                 : f32[4, 8]     S(1)  ; gradient(down.weight)
          mm_3           = mm(view_2_b, down_weight)         : f32[12, 8]    S(1)
          view_3         = view(mm_3, [2, 6, 8])             : f32[2, 6, 8]  S(2)
          tanh_backward  = tanh_backward(view_3, tanh_1)     : f32[2, 6, 8]  S(2)
          view_4         = view(tanh_backward, [12, 8])      : f32[12, 8]    S(1)
          t_6            = t(view_4)                         : f32[8, 12]    S(0)
          mm_4           = mm(t_6, view_b)                   : f32[8, 4]     S(0)  ; gradient(up.weight)
        update:
          neg            = operator.neg(lr_0)                : float
          add_2          = add(up_weight, mm_4, alpha=neg)   : f32[8, 4]     S(0)
          add_3          = add(down_weight, mm_2, alpha=neg) : f32[4, 8]     S(1)
          return sum_1_b; update(up_weight=add_2, down_weight=add_3)
        """,
    )
