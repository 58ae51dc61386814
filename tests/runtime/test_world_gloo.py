"""Three real processes over gloo compute, to the bit, what three virtual ranks compute."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import start

from graphzero.errors import PlacementError
from graphzero.ir.text.parser import parse
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.transport.shared_memory_connect import SWITCH
from graphzero.runtime.transport.transport import Transport
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import World
from graphzero.sbp.placement import placement
from graphzero.sbp.shards import chunk

N = 3
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.int64, torch.complex64)
HIERARCHY = [[0], [1], [2]]  # dp=3, tp=1: the second axis has nobody to send to

STEP = """
graph step(dp=3, tp=1) local
  x  = batch()      : f32[9, 7]  (S(0), B)
  w  = param()      : f32[7, 5]  (S(0), B)
  b  = param()      : f32[2, 5]  (S(0), B)
  k  = seed()       : i64[]  (B, B)
forward:
  h  = launch('bucket_all_gather', 0, [w, b], [0, 0], 'dp') : (f32[7, 5]  (B, B), f32[2, 5]  (B, B))
  u  = uniform_like(x, k, 0, [9@dp, 0], [9, 7])   : f32[9, 7]  (S(0), B)
  xd = mul(x, u)                                  : f32[9, 7]  (S(0), B)
  g  = wait(h)                                    : (f32[7, 5]  (B, B), f32[2, 5]  (B, B))
  wg = g[0]                                       : f32[7, 5]  (B, B)
  bg = g[1]                                       : f32[2, 5]  (B, B)
  b0 = sum.dim_IntList(bg, [0])                   : f32[5]  (B, B)
  y  = addmm(b0, xd, wg)                          : f32[9, 5]  (S(0), B)
  s  = sum(y)                                     : f32[]  (P, B)
  l  = all_reduce(s, 'dp', 'sum')                 : f32[]  (B, B)
  m  = all_reduce(l, 'tp', 'max')                 : f32[]  (B, B)
backward:
  xt = t(xd)                                      : f32[7, 9]  (S(1), B)
  gw = mm(xt, y)                                  : f32[7, 5]  (P, B)
  gb = slice.Tensor(y, 0, 0, 2)                   : f32[2, 5]  (P, B)
  j  = launch('bucket_reduce_scatter', 1, [gw, gb], [0, 0], 'dp') : (f32[7, 5]  (S(0), B), f32[2, 5]  (S(0), B))
  r  = wait(j)                                    : (f32[7, 5]  (S(0), B), f32[2, 5]  (S(0), B))
  rw = r[0]                                       : f32[7, 5]  (S(0), B)
  rb = r[1]                                       : f32[2, 5]  (S(0), B)
update:
  w1 = sub(w, rw)                                 : f32[7, 5]  (S(0), B)
  b1 = sub(b, rb)                                 : f32[2, 5]  (S(0), B)
  yc = all_to_all(y, 0, 1, 'dp')                  : f32[9, 5]  (S(1), B)
  aw = assign(w, w1)                              : f32[7, 5]  (S(0), B)
  ab = assign(b, b1)                              : f32[2, 5]  (S(0), B)
  return m, yc, y; update(w=aw, b=ab)
"""


def value(dtype: torch.dtype, size: int, rank: int) -> torch.Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)
    return made > 0 if dtype == torch.bool else (made * (1 + 2j) if dtype.is_complex else made * 50).to(dtype)


def exchange_everything(world: World) -> dict[Any, list[torch.Tensor]]:
    """Every collective at a few sizes and dtypes: results, one per local rank."""
    found: dict[Any, list[torch.Tensor]] = {}
    for dtype in DTYPES:
        for size in (1, int(Transport.one_round_bytes) // 4 + 7):  # one message, or pieces that do not divide
            found["all_reduce", dtype, size] = buffers = [value(dtype, size, r) for r in world.local_ranks]
            world.begin("all_reduce", buffers, buffers, "dp").wait()
        for kind, sent, received in (("all_gather", 5, 15), ("reduce_scatter", 15, 5), ("all_to_all", 15, 15)):
            ins = [value(dtype, sent, r) for r in world.local_ranks]
            outs = [torch.empty(received, dtype=dtype) for _ in ins]
            world.begin(kind, outs, ins, "dp").wait()
            found[kind, dtype] = outs
    for dtype in (torch.float32, torch.bfloat16):  # long pieces; lines that do not divide
        line = (2 << 20) // dtype.itemsize + 13
        ins = [value(dtype, N * line, r) for r in world.local_ranks]
        found["long", dtype] = outs = [torch.empty(line, dtype=dtype) for _ in ins]
        world.begin("reduce_scatter", outs, ins, "dp").wait()
        found["long all_reduce", dtype] = ins = [value(dtype, N * line - 1, r) for r in world.local_ranks]
        world.begin("all_reduce", ins, ins, "dp").wait()
    for reduction in ("max", "min"):
        ins = [value(torch.float32, 6, r) for r in world.local_ranks]
        found[reduction] = [torch.empty(2) for _ in ins]
        world.begin("reduce_scatter", found[reduction], ins, "dp", reduction).wait()
    return found


def overlapping(world: World) -> dict[str, list[torch.Tensor]]:
    """Three collectives under way at a time, waited for in another order; one gathers in place."""
    a, b = ([value(torch.float32, 30000 + i, r + i) for r in world.local_ranks] for i in (0, 1))
    c = [torch.zeros(12) for _ in a]
    lines = [x[4 * r : 4 * r + 4].fill_(r + 1) for x, r in zip(c, world.local_ranks, strict=True)]
    handles = [
        world.begin("all_reduce", a, a, "dp"),
        world.begin("all_gather", c, lines, "dp"),
        world.begin("all_reduce", b, b, "dp", "max"),
    ]
    for handle in reversed(handles):
        handle.wait()
    return {"a": a, "b": b, "c": c}


def steps(world: World) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(rows, columns, generator=generator) for name, rows, columns in
             (("x", 9, 7), ("w", 7, 5), ("b", 2, 5))}  # fmt: skip
    local = {
        name: [x.narrow(0, *chunk(x.shape[0], N, r)).clone() for r in world.local_ranks] for name, x in whole.items()
    }
    executor = Executor(parse(STEP, world.placement), world)
    executor.bind({"w": local["w"], "b": local["b"]})
    world.trace = []
    for step in range(2):
        results = executor.run_step({"x": local["x"], "k": [torch.tensor(step)] * len(world.local_ranks)})
    sent = [(s.kind, s.axis, s.nbytes) for s in world.trace]
    return {"outputs": results.outputs, "w": local["w"], "b": local["b"], "sent": sent}


def everything(world: World) -> dict[str, Any]:
    return {"each": exchange_everything(world), "overlapping": overlapping(world), "steps": steps(world)}


def process(rank: int, folder: str, switch: str) -> None:
    """One of them, which leaves its results in the folder."""
    os.environ[SWITCH] = switch
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=N)
    first = ProcessWorld(placement("cpu", HIERARCHY))
    found = {**everything(first), "link": type(first._collectives["dp"].transport).__name__}
    pair = placement("cpu", [0, 2])  # not all of them
    try:
        world = ProcessWorld(pair)
    except PlacementError:
        assert rank == 1
    else:
        gathered = torch.empty(2)
        world.begin("all_gather", [gathered], [torch.tensor([float(rank)])], "dp").wait()
        found["pair"] = gathered
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["memory", "gloo"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes found, which read each other's memory, or send."""
    folder = tmp_path_factory.mktemp("gloo")
    start(process, (str(folder), request.param), N)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(N)]


@pytest.fixture(scope="module")
def virtual() -> dict[str, Any]:
    return everything(VirtualWorld(placement("cpu", HIERARCHY, virtual=True)))


def test_each_collective_moves_and_sums_as_virtual_ranks_do(real: list[Any], virtual: dict[str, Any]) -> None:
    for key, wanted in virtual["each"].items():
        for rank in range(N):
            found = real[rank]["each"][key][0]
            assert found.equal(wanted[rank]), f"{key} on rank {rank}: {found[:4]} is not {wanted[rank][:4]}"


def test_collectives_under_way_at_once_do_not_cross(real: list[Any], virtual: dict[str, Any]) -> None:
    for key, wanted in virtual["overlapping"].items():
        assert all(real[rank]["overlapping"][key][0].equal(wanted[rank]) for rank in range(N)), key


def test_a_lowered_step_equals_virtual_ranks_in_results_state_and_transcript(
    real: list[Any], virtual: dict[str, Any]
) -> None:
    wanted = virtual["steps"]
    for rank in range(N):
        found = real[rank]["steps"]
        for mine, theirs in zip(found["outputs"], wanted["outputs"], strict=True):
            assert mine[0].equal(theirs[rank])
        assert found["w"][0].equal(wanted["w"][rank]) and found["b"][0].equal(wanted["b"][rank])
        assert found["sent"] == wanted["sent"]
    assert [kind for kind, *_ in wanted["sent"]] == ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"] * 2


def test_ranks_of_one_host_read_each_other_unless_gloo_is_asked_for(
    real: list[Any], request: pytest.FixtureRequest
) -> None:
    wanted = {"memory": "SharedMemoryTransport", "gloo": "GlooTransport"}[request.node.callspec.id]
    assert [one["link"] for one in real] == [wanted] * N


def test_a_placement_of_some_ranks_in_another_order_meets_in_its_own_order(real: list[Any]) -> None:
    assert real[0]["pair"].tolist() == real[2]["pair"].tolist() == [0, 2]
    assert "pair" not in real[1]
