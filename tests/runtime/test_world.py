"""Worlds in one process: coordinates, sums in rank order, logs, and a fake process group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphzero.errors import PlacementError
from graphzero.ir.text.parser import parse
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.kernels import BINDINGS
from graphzero.runtime.state.seed import key_tensor, step_key
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import Sent
from graphzero.sbp.placement import placement
from graphzero.sbp.shards import LocalSize, LocalStart

aten = torch.ops.aten


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_every_rank_knows_where_it_stands_whom_it_meets_and_what_it_holds() -> None:
    world = VirtualWorld(placement("cpu", [[4, 5], [6, 7]], virtual=True))
    assert world.local_ranks == [0, 1, 2, 3] and world.rank_ids == [4, 5, 6, 7]
    assert world.coordinate(2) == (1, 0)
    assert world.peers(2, "dp") == [4, 6] and world.peers(2, "tp") == [6, 7]
    assert world.groups("dp") == [[0, 2], [1, 3]]
    assert [world.resolve(LocalSize(5, "tp"), local) for local in range(4)] == [3, 2, 3, 2]
    assert [world.resolve(LocalStart(5, "dp"), local) for local in range(4)] == [0, 0, 3, 3]


def test_sums_run_in_the_order_of_ranks_however_the_buffer_is_cut() -> None:
    world = VirtualWorld(placement("cpu", range(5), virtual=True))
    torch.manual_seed(0)
    given = [torch.randn(1000) * 10.0**r for r in range(5)]
    wanted = (((given[0] + given[1]) + given[2]) + given[3]) + given[4]
    whole = [x.clone() for x in given]
    world.begin("all_reduce", whole, whole, "dp").wait()
    assert all(x.equal(wanted) for x in whole)
    outs = [torch.empty(200) for _ in range(5)]
    world.begin("reduce_scatter", outs, [x.clone() for x in given], "dp").wait()
    assert torch.cat(outs).equal(wanted)


def test_the_trace_counts_calls_and_bytes_per_rank_and_ignores_an_axis_of_one() -> None:
    world = VirtualWorld(placement("cpu", [[0], [1], [2], [3]], virtual=True))
    world.trace = []
    ins, outs = [torch.ones(8) for _ in range(4)], [torch.empty(8) for _ in range(4)]
    world.begin("all_reduce", ins, ins, "dp")
    world.begin("reduce_scatter", [out[:2] for out in outs], ins, "dp")
    world.begin("all_gather", outs, [x[:2] for x in ins], "dp")
    world.begin("all_to_all", outs, ins, "dp")
    for kind in ("all_to_all", "reduce_scatter", "all_gather"):
        world.begin(kind, outs, ins, "tp").wait()
        assert all(out.equal(sent) for out, sent in zip(outs, ins, strict=True))
    world.begin("all_reduce", ins, ins, "tp")
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    assert world.trace == [Sent(kind, "dp", nbytes) for kind, nbytes in zip(kinds, (48, 24, 24, 24), strict=True)]


def test_a_virtual_world_sums_bools_and_takes_maxima() -> None:
    world = VirtualWorld(placement("cpu", range(2), virtual=True))
    flags = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    world.begin("all_reduce", flags, flags, "dp").wait()
    assert flags[1].tolist() == [True, True, False]
    values = [torch.tensor([1, 9]), torch.tensor([2, -3])]
    world.begin("all_reduce", values, values, "dp", "min").wait()
    assert values[0].tolist() == [1, -3]


def test_a_fake_group_runs_one_ranks_program_with_the_right_shapes(fake_group: None) -> None:
    text = """
    graph step(dp=4, tp=2) local
      x = batch() : f32[7, 3]  (S(0), B)
      p = batch() : bf16[7, 3]  (P, P)
      b = batch() : bool[7, 4]  (S(0), B)
    forward:
      g = all_gather(x, 0, 'dp')       : f32[7, 3]  (B, B)
      r = reduce_scatter(p, 0, 'dp')   : bf16[7, 3]  (S(0), P)
      s = all_reduce(r, 'tp', 'sum')   : bf16[7, 3]  (S(0), B)
      t = all_to_all(b, 0, 1, 'dp')    : bool[7, 4]  (S(1), B)
      h = launch('bucket_all_reduce', 0, [p], 'tp') : (bf16[7, 3]  (P, B))
      w = wait(h)                      : (bf16[7, 3]  (P, B))
      v = w[0]                         : bf16[7, 3]  (P, B)
      return g, s, t, v
    """
    place = placement("cpu", numpy.arange(8).reshape(4, 2))
    world = ProcessWorld(place)
    assert world.coordinate(0) == (2, 1) and world.peers(0, "dp") == [1, 3, 5, 7]
    world.trace = []
    given = {"x": [torch.zeros(2, 3)], "p": [torch.zeros(7, 3, dtype=torch.bfloat16)]}
    given["b"] = [torch.zeros(2, 4, dtype=torch.bool)]
    outputs = Executor(parse(text, place), world).run_step(given).outputs
    assert [tuple(out[0].shape) for out in outputs] == [(7, 3), (2, 3), (7, 1), (7, 3)]
    assert [sent.kind for sent in world.trace] == [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "all_reduce",
    ]


def test_a_process_outside_its_placement_is_told_so(fake_group: None) -> None:
    with pytest.raises(PlacementError, match="this process is rank 5, which is not in"):
        ProcessWorld(placement("cpu", range(4)))


def test_step_keys_are_int64_repeatable_and_unlike_their_neighbours() -> None:
    keys = [step_key(seed, step) for seed in (0, 1, 2**63, -1) for step in range(200)]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    assert step_key(7, 3) == step_key(7, 3) == key_tensor(7, 3).item()
    bits = torch.tensor([[(key >> i) & 1 for i in range(64)] for key in keys], dtype=torch.float32)
    assert (bits.mean(0) - 0.5).abs().max() < 0.1, "every bit is set in about half of the keys"


@pytest.mark.parametrize("overload", BINDINGS, ids=str)
def test_a_binding_computes_what_its_overload_computes(overload: torch._ops.OpOverload) -> None:
    x = torch.rand(4, 4) + 0.1
    arguments = {
        "view": (x, [2, 8]), "_unsafe_view": (x, [2, 8]), "reshape": (x, [2, 8]), "t": (x,), "transpose": (x, 0, 1),
        "neg": (x,), "sqrt": (x,), "mm": (x, x), "bmm": (x[None], x[None]), "addcmul": (x, x, x), "addcdiv": (x, x, x),
    }.get(overload.overloadpacket.__name__, (x, x))  # fmt: skip
    assert BINDINGS[overload](*arguments).equal(overload(*arguments))
    if overload.overloadpacket.__name__ in ("add", "sub"):
        assert BINDINGS[overload](x, 2.0, alpha=3).equal(overload(x, 2.0, alpha=3))
    if overload.overloadpacket.__name__.startswith("addc"):
        assert BINDINGS[overload](x, x, x, value=0.5).equal(overload(x, x, x, value=0.5))
