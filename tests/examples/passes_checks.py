"""What two gloo processes check of passes with ops of their own; ``test_passes_processes`` reports each check."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]
from pass_toys import assert_sends_what_is_planned, batch, clipped_graph  # noqa: E402
from passes.int8_gathers import Int8Gathers  # noqa: E402
from passes.narrow_sums import NarrowSums  # noqa: E402
from passes.offload import Offload  # noqa: E402

import graphzero as gz  # noqa: E402


def both(where):
    graph = clipped_graph(Int8Gathers(8), where=where)
    graph.config.add_pass(Offload(64, 4), after="fuse")
    return graph


def check_int8_gathers_and_offload_are_what_virtual_ranks_compute():
    graph, virtual = both(gz.placement("cpu", range(2))), both(gz.placement("cpu", range(2), virtual=True))
    for step in range(2):
        assert torch.equal(graph(batch(step).chunk(2)[dist.get_rank()]), virtual(batch(step)))
    told = graph.full_state_dict()["modules"]["model"]
    for name, whole in virtual.model.state_dict().items():
        assert torch.equal(told[name], whole), name
    share = batch().chunk(2)[dist.get_rank()]
    assert_sends_what_is_planned(graph, share)
    measured, memory = gz.testing.measure_step(graph, share), graph.plan.memory
    assert (measured.peak, measured.host) == (memory.peak, memory.host) and memory.host > 0


def check_narrow_sums_are_those_of_virtual_ranks_to_the_bit():
    graph, virtual = (
        clipped_graph(NarrowSums(), where=gz.placement("cpu", range(2), virtual=is_virtual), stage=2)
        for is_virtual in (False, True)
    )
    for step in range(2):
        assert torch.equal(graph(batch(step).chunk(2)[dist.get_rank()]), virtual(batch(step)))
    whole = graph.full_state_dict()["modules"]["model"]
    for name, expected in virtual.model.state_dict().items():
        assert torch.equal(whole[name], expected), name
    assert_sends_what_is_planned(graph, batch().chunk(2)[dist.get_rank()])
