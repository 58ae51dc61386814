"""What two gloo processes check of temporaries that lie in one buffer, out of which the other rank reads."""

import time
from unittest import mock

import torch.distributed as dist
from arena_toys import MODELS, adamw_graph, batch, equal, steps, stopped

from graphzero.ir import ops
from graphzero.ir.storage import arena
from graphzero.ir.transfer import is_transfer
from graphzero.runtime.execute.steps import Barrier
from graphzero.runtime.transport.shared_memory import SharedMemoryTransport

EVERYTHING = mock.patch.multiple(arena, LEAST=1, COST=1)


def share(x):
    return x.chunk(2)[dist.get_rank()]


@EVERYTHING
def check_results_are_those_without_to_the_bit_though_a_rank_reads_late_and_what_is_dead_is_spoiled():
    read = SharedMemoryTransport.read_piece

    def late(self, q, address, into):
        if dist.get_rank() == 1:
            time.sleep(0.002)
        read(self, q, address, into)

    for stage in range(4):
        plain = steps("gpt", adamw_graph(MODELS["gpt"](), stage, used=False), share=share)
        graph = adamw_graph(MODELS["gpt"](), stage)
        with mock.patch.object(SharedMemoryTransport, "read_piece", late):
            assert equal(steps("gpt", graph, spoiled=True, share=share), plain), stage
        assert any(is_transfer(node) for node, _ in graph._selection.last.arena.offsets) == (stage > 0)


@EVERYTHING
def check_what_a_stopped_step_has_under_way_does_not_arrive_in_the_next_one():
    def under_way(sequence, first):
        """After the last launch before anything is written."""
        launches = [i for i, one in enumerate(sequence) if isinstance(one, Barrier) and one.node.target is ops.launch]
        return max(i for i in launches if i < first) + 1

    found = []
    for used in (False, True):
        graph = adamw_graph(MODELS["gpt"](), 3, used=used)
        steps("gpt", graph, 1, share=share)
        stopped(graph, under_way, *map(share, batch("gpt", 5)), meet=dist.barrier)
        assert graph._source.world.pending
        found.append([x.clone() for x in graph(*map(share, batch("gpt", 6, rows=8)))])
    assert equal(*found)
