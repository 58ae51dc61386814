"""What gloo processes check of GPT-2 on data and tensor ranks; ``test_nd_processes`` reports each check."""

import sys
import tempfile
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "bench")]
import layouts  # noqa: E402
from layouts import CASES, HYBRID, PLANS, Layout, build_graph, train_eagerly, train_graph  # noqa: E402
from models import gpt2  # noqa: E402
from parity import compare_trainings  # noqa: E402

MODEL = "gpt2, small"  # a Llama's: tests/test_parallelized_modules.py
CASES[MODEL], PLANS[MODEL] = replace(CASES["gpt2"], make=partial(gpt2, layers=1)), PLANS["gpt2"]
LAYOUTS = (Layout((2, 2), ("dp", "tp")), Layout((2, 2), HYBRID, "dp_shard"))


def trained(graph, layout, through=None):
    each = prod(layout.ranks) // layout.parts  # ranks that share a part of the batch, side by side
    return train_graph(graph, MODEL, layout.parts, dist.get_rank() // each, through)


def check_gpt2_trains_as_plain_pytorch_does():
    for layout in LAYOUTS:  # on more of them: tests/test_layouts.py
        graph = build_graph(MODEL, layout, 0, virtual=False)
        found = compare_trainings(trained(graph, layout, layout), train_eagerly(MODEL))
        assert max(found.loss, found.tensor) <= layouts.LIMIT, f"{layout}, a step at each of its stages: {found}"


def check_checkpoints_of_tensor_ranks_load_on_data_ranks_and_back():
    first, second = LAYOUTS
    given = build_graph(MODEL, first, first.stages[-1], virtual=False)
    trained(given, first)
    for layout in (second, first):
        taken = build_graph(MODEL, layout, layout.stages[-1], virtual=False)
        box = [tempfile.mkdtemp()]
        dist.broadcast_object_list(box)
        dcp.save(given.state_dict(), checkpoint_id=box[0])
        sd = taken.state_dict()
        dcp.load(sd, checkpoint_id=box[0])
        taken.load_state_dict(sd)
        ours, theirs = (graph.full_state_dict()["modules"]["model"] for graph in (taken, given))
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
        given = taken
