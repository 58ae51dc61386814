"""What gloo processes check of GPT-2 and Llama on data and tensor ranks; ``test_nd_processes`` reports each check."""

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
from layouts import CASES, HYBRID, PLANS, Layout, graph_of, reference, train  # noqa: E402
from models import gpt2, llama  # noqa: E402
from parity import difference  # noqa: E402

SMALL = {"gpt2, small": ("gpt2", partial(gpt2, layers=1)), "llama, small": ("llama", partial(llama, layers=1))}
for name, (model, make) in SMALL.items():
    CASES[name], PLANS[name] = replace(CASES[model], make=make), PLANS[model]
LAYOUTS = (Layout((2, 2), ("dp", "tp")), Layout((2, 2), HYBRID, "dp_shard"))


def trained(graph, model, layout, through=None):
    each = prod(layout.ranks) // layout.parts  # ranks that share a part of the batch, side by side
    return train(graph, model, layout.parts, dist.get_rank() // each, through)


def compare(model, *several):
    for layout in several:
        graph = graph_of(model, layout, 0, virtual=False)
        found = difference(trained(graph, model, layout, layout), reference(model))
        assert max(found.loss, found.tensor) <= layouts.LIMIT, f"{layout}, a step at each of its stages: {found}"


def check_gpt2_trains_as_plain_pytorch_does():
    compare("gpt2, small", *LAYOUTS)


def check_llama_trains_as_plain_pytorch_does():
    compare("llama, small", LAYOUTS[0])  # on more layouts: tests/test_layouts.py


def check_checkpoints_of_tensor_ranks_load_on_data_ranks_and_back():
    model, (first, second) = "gpt2, small", LAYOUTS
    given = graph_of(model, first, first.stages[-1], virtual=False)
    trained(given, model, first)
    for layout in (second, first):
        taken = graph_of(model, layout, layout.stages[-1], virtual=False)
        box = [tempfile.mkdtemp()]
        dist.broadcast_object_list(box)
        dcp.save(given.state_dict(), checkpoint_id=box[0])
        sd = taken.state_dict()
        dcp.load(sd, checkpoint_id=box[0])
        taken.load_state_dict(sd)
        ours, theirs = (graph.full_state_dict()["modules"]["model"] for graph in (taken, given))
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
        given = taken
