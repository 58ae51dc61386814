"""Checks on several gloo processes of changes that one rank makes alone: ``bench/stress/single_rank_changes.py``."""

import random

import torch.distributed as dist
from stress.single_rank_changes import TABLE, trials


def check_what_one_rank_does_alone_is_refused_on_all_or_makes_no_difference():
    ranks = dist.get_world_size()
    chance = random.Random(ranks)
    table = TABLE if ranks == 2 else chance.sample(TABLE, 12)
    for found in trials(table, chance):
        assert not found["wrong"], found["wrong"]
