"""What two gloo processes check of steps that compute values of forward again."""

import torch.distributed as dist
from recompute_toys import blocks_graph, same_bits, trained

import graphzero as gz


def share(ids):
    return ids.chunk(2)[dist.get_rank()]


def check_two_processes_train_to_the_same_bits():
    place = gz.placement("cpu", range(2))
    wanted = trained(blocks_graph(stage=3, placement=place), part=share)
    graph = blocks_graph("checkpoint", stage=3, placement=place)
    assert same_bits(trained(graph, part=share), wanted)
    assert graph.plan.recomputed
