"""What several gloo processes check of changes that one of them makes alone: ``bench/one_sided.py`` has the table."""

import random

import torch.distributed as dist
from one_sided import TABLE, trials


def check_what_one_rank_does_alone_is_refused_on_all_or_makes_no_difference():
    ranks = dist.get_world_size()
    chance = random.Random(ranks)
    table = TABLE if ranks == 2 else chance.sample(TABLE, 12)
    for found in trials(table, chance):
        assert not found["wrong"], found["wrong"]
