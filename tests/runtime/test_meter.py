"""The measurement: what a run holds, by storages that really exist."""

from __future__ import annotations

import torch
from toys import measure

from graphzero.ir.text.parser import parse
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld

KB = 1024  # bytes of f32[256]


def executor_of(text: str) -> Executor:
    graph = parse(text)
    return Executor(graph, VirtualWorld(graph.placement))


def test_a_chain_holds_two_values_at_a_time_however_long_it_is() -> None:
    lines = "\n".join(f"      a{i} = add(a{i - 1}, 1.0) : f32[256]  B" for i in range(1, 12))
    executor = executor_of(f"""
    graph step(dp=1) local
      a0 = batch() : f32[256]  B
    forward:
{lines}
      return a11
    """)
    measured = measure(executor, {"a0": [torch.zeros(256)]}, {}, {})
    assert measured.peak == 2 * KB and measured.at_peak == {"temporaries": 2 * KB}
    assert [nbytes for _, nbytes in measured.timeline] == [KB] * 11, "alive after each op: its result"


def test_storages_count_once_with_views_and_until_the_last_of_them_is_gone() -> None:
    executor = executor_of("""
    graph step(dp=1) local
      x = batch() : f32[256]  B
    forward:
      a = add(x, 1.0)        : f32[256]  B
      b = view(a, [16, 16])  : f32[16, 16]  B
      c = t(b)               : f32[16, 16]  B
      d = add(x, 2.0)        : f32[256]  B
      e = sum(d)             : f32[]  B
      f = sum(c)             : f32[]  B
      g = add(x, 3.0)        : f32[256]  B
      return g, e, f
    """)
    measured = measure(executor, {"x": [torch.zeros(256)]}, {"a": "activations"}, {})
    assert measured.peak == 2 * KB + 4 and measured.at_peak == {"activations": KB, "temporaries": KB + 4}
    assert measured.node == "e"
    assert dict(measured.timeline)["f"] == 8, "a dies with its last view"


def test_categories_state_and_results_of_several() -> None:
    executor = executor_of("""
    graph step(dp=1) local
      w = param() : f32[16, 16]  B!
      m = state(w, m) : f32[16, 16]  B!
    forward:
      u = use(w)                 : f32[16, 16]  B
      v = t(u)                   : f32[16, 16]  B
      k = topk(v, 16)            : (f32[16, 16]  B, i64[16, 16]  B)
      g = k[0]                   : f32[16, 16]  B
      m1 = add(m, g)             : f32[16, 16]  B
      am = assign(m, m1)         : f32[16, 16]  B
      return update(m=am)
    """)
    w, m = torch.randn(16, 16), torch.zeros(16, 16)
    executor.bind({"w": [w], "m": [m]})
    resident = {"parameters": [w], "optimizer_states": [m], "buffers": [w]}
    measured = measure(executor, {}, {"g": "gradients"}, resident)
    assert measured.resident == {"parameters": KB, "optimizer_states": KB}
    # the i64 result, which nobody reads, is there for a moment only
    assert measured.peak == 5 * KB
    assert measured.at_peak == {"parameters": KB, "optimizer_states": KB, "gradients": KB, "temporaries": 2 * KB}


def test_buffers_of_collectives_are_communication_transient_or_in_slots() -> None:
    single = executor_of("""
    graph step(dp=2) local
      x = batch() : f32[512]  S(0)
    forward:
      g = all_gather(x, 0, 'dp') : f32[512]  B
      return g
    """)
    x = [torch.randn(256), torch.randn(256)]
    measured = measure(single, {"x": x}, {"g": "temporaries"}, {})
    assert measured.at_peak == {"communication": 2 * KB, "temporaries": 2 * KB} and measured.resident == {}
    slots = executor_of("""
    graph step(dp=2) local
      x = batch() : f32[512]  S(0)
    forward:
      h = launch('bucket_all_gather', 3, [x], [0], 'dp') : (f32[512]  B)
      w = wait(h) : (f32[512]  B)
      g = w[0] : f32[512]  B
      return g
    """)
    slots.run_step({"x": x})
    measured = measure(slots, {"x": x}, {}, {})
    assert measured.resident == {"communication": 2 * KB}
    assert measured.at_peak == {"communication": 2 * KB, "temporaries": 2 * KB}


def test_measuring_does_not_change_results() -> None:
    executor = executor_of("""
    graph step(dp=2) local
      x = batch() : f32[6]  S(0)
      lr = scalar() : float
    forward:
      s = sum(x)                      : f32[]  P
      l = all_reduce(s, 'dp', 'sum')  : f32[]  B
      y = mul(l, lr)                  : f32[]  B
      return y
    """)
    given = {"x": [torch.ones(3), torch.ones(3)], "lr": [2.0, 2.0]}
    from graphzero.testing.meter import MemoryMeter

    assert (
        executor.run_step(given, MemoryMeter()).outputs[0][1].item()
        == executor.run_step(given).outputs[0][0].item()
        == 12
    )
