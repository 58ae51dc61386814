"""What two gloo processes check of steps in micro-batches."""

import torch
import torch.distributed as dist
from jobs_in_parts import Words, micro_batch_graph, plain, sentences, tokens
from processes import slow
from torch.distributed.tensor import DTensor

import graphzero as gz


def shares(steps=3):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [tuple(x.chunk(ranks)[rank] for x in batch) for batch in sentences(steps)]


def trained_here(parts, stage, **settings):
    graph = micro_batch_graph(Words, tokens, parts, stage, real=True)
    for name, given in settings.items():
        getattr(graph.config, f"set_{name}")(given)
    losses = [graph(*batch)[0] for batch in shares()]
    return graph, losses, graph.full_state_dict()["modules"]["model"]


def check_steps_are_those_of_plain_torch_on_the_whole_batch():
    are_those_of_plain_torch((2, {}), (3, {"memory_budget": 2**30}))


@slow
def check_so_they_are_at_every_stage_and_where_room_lets_gradients_be_summed_whole():
    are_those_of_plain_torch((0, {}), (1, {}), (3, {}), (2, {"memory_budget": 2**30}))


def are_those_of_plain_torch(*jobs):
    wanted = plain(Words, tokens, sentences())
    for stage, settings in jobs:
        graph, losses, full = trained_here(4, stage, **settings)
        for i, loss in enumerate(losses):
            torch.testing.assert_close(loss, wanted[f"loss {i}"])
        for name, x in full.items():
            torch.testing.assert_close(x, wanted[f"model {name}"], rtol=1e-9, atol=1e-9)
        sent = gz.testing.trace_step(graph, *shares(1)[0])
        planned = [(one.kind, one.axis, one.bytes) for one in graph.plan.collectives]
        assert [(one.kind, one.axis, one.nbytes) for one in sent] == planned
        if stage == 3:
            assert isinstance(graph.model.head.weight, DTensor)


def check_outputs_are_this_ranks_share_in_order():
    graph = micro_batch_graph(Words, tokens, 4, 2, real=True)
    whole = plain(Words, tokens, sentences(1))["scores 0"]
    _, scores = graph(*shares(1)[0])
    torch.testing.assert_close(scores, whole.chunk(2)[dist.get_rank()])
