"""What four gloo processes on 2 x 2 ranks check; ``test_nd_processes`` reports each check."""

import gc
import itertools
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from graphs import TrainGraph, mse
from processes import computed_once
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import graphzero as gz
from graphzero.ir.text.parser import parse
from graphzero.passes import LowerBoxing
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.tensors.shards import as_dtensor, join, piece, position_of
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp import B, P, S
from graphzero.sbp.dtensor import to_placements

GRID, HYBRID = [[0, 1], [2, 3]], ("dp_replicate", "dp_shard")
SPLITS = list(itertools.product((B, S(0), S(1)), repeat=2))


def grid(names=HYBRID, virtual=False):
    return gz.placement("cpu", GRID, names=names, virtual=virtual)


def line(virtual=False):
    return gz.placement("cpu", range(4), virtual=virtual)


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).double()


def batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


def share(seed, parts=4):
    return tuple(t.chunk(parts)[dist.get_rank() * parts // 4] for t in batch(seed))


def momentum_graph(model, placement, stage=0, axis=None, lr=0.1) -> TrainGraph:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainGraph(model, mse, optimizer, placement=placement, clip=0.5, stage=stage, axis=axis)


def equal(ours, theirs, what=""):
    after = dict(pytree.tree_flatten_with_path(ours)[0])
    for path, value in pytree.tree_flatten_with_path(theirs)[0]:
        same = torch.equal(after[path], value) if isinstance(value, torch.Tensor) else after[path] == value
        assert same, f"{what} {pytree.keystr(path)}: {after[path]} is not {value}"


def virtual_steps(names, axis, stage):
    """Losses of two steps, and the state after them."""
    graph = momentum_graph(make(), grid(names, virtual=True), stage, axis)
    return [graph(*batch(step)) for step in range(2)], graph.full_state_dict()


def check_steps_are_those_of_virtual_ranks_to_the_bit():
    hybrid, tensor = [(HYBRID, "dp_shard", stage) for stage in (2, 3)], [(("dp", "tp"), None, 3)]
    jobs = [*((HYBRID, None, stage) for stage in range(4)), *hybrid, *tensor]
    virtual = computed_once([partial(virtual_steps, *job) for job in jobs])
    for (names, axis, stage), (losses, state) in zip(jobs, virtual, strict=True):
        real = momentum_graph(make(dist.get_rank()), grid(names), stage, axis)  # rank 0's values count
        parts = 4 if names == HYBRID else 2
        for step, loss in enumerate(losses):
            assert torch.equal(real(*share(step, parts)), loss)
        equal(real.full_state_dict(), state, f"stage {stage} over {axis}:")
        traced = gz.testing.trace_step(real, *share(2, parts))
        assert [(t.kind, t.axis) for t in traced] == [(c.kind, c.axis) for c in real.plan.collectives]
        assert all(t.nbytes <= c.bytes for t, c in zip(traced, real.plan.collectives, strict=True))


def check_pieces_are_those_of_dtensor():
    mesh = grid().mesh()
    for shape, nd in itertools.product([(8, 4), (5, 3), (7, 2), (1, 3), (6, 6)], SPLITS):
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        theirs = distribute_tensor(whole, mesh, to_placements(nd))
        ours = piece(whole, nd, (2, 2), position_of(grid()))
        assert torch.equal(theirs.to_local(), ours), (shape, nd)
        made = gz.to_global(ours.clone(), grid(), nd)
        assert made.shape == shape and gz.sbp.of(made) == nd and torch.equal(gz.to_local(made), ours)
        assert torch.equal(made.full_tensor(), whole), (shape, nd)
        back = gz.to_global(distribute_tensor(whole, mesh, [Replicate(), Replicate()]), sbp=nd)
        assert torch.equal(gz.to_local(back), ours)


def check_boxes_move_values_as_virtual_ranks_do():
    for src, dst in [((S(0), S(0)), (B, B)), ((P, P), (S(0), S(0))), ((P, P), (B, S(1))), ((B, S(0)), (S(0), S(0))),
                     ((S(1), S(0)), (S(0), S(1))), ((P, S(0)), (B, B)), ((S(0), S(0)), (P, S(1)))]:  # fmt: skip
        for shape in ((8, 4), (5, 3), (64, 64)):
            type_ = f"f64{list(shape)}"
            text = f"graph g(dp_replicate=2, dp_shard=2) boxed\n  x = batch() : {type_}  {src}\nforward:\n"
            found = {}
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
            given = [piece(whole, src, (2, 2), i).clone() for i in range(4)]
            if P in src:  # every rank has its own
                given = [one + i for i, one in enumerate(given)]
            for world in (ProcessWorld(grid()), VirtualWorld(grid(virtual=True))):
                graph = parse(f"{text}  y = box(x) : {type_}  {dst}\n  return 0\n", world.placement)
                graph.set_output([graph.node("y")], {}, {})
                inputs = [given[i].clone() for i in world.local_ranks]
                (found[world],) = Executor(LowerBoxing()(graph), world).run_step({"x": inputs}).outputs
            real, virtual = found.values()
            assert torch.equal(real[0], virtual[dist.get_rank()]), (src, dst, shape)
            torch.testing.assert_close(join(virtual, dst, (2, 2)), join(given, src, (2, 2)))


def check_checkpoints_go_from_two_axes_to_one_and_back():
    start = momentum_graph(make(), grid(), 3)
    start(*share(0))
    for graph, other in (
        (start, momentum_graph(make(5), line(), 2)),
        (momentum_graph(make(6), line(), 3), momentum_graph(make(7), grid(), 1)),
    ):
        if graph is not start:
            graph(*share(1))
        other.compile(*share(0))
        box = [tempfile.mkdtemp()]
        dist.broadcast_object_list(box)
        dcp.save(graph.state_dict(), checkpoint_id=box[0])
        sd = other.state_dict()
        dcp.load(sd, checkpoint_id=box[0])
        other.load_state_dict(sd)
        equal(other.full_state_dict(), graph.full_state_dict())
        torch.testing.assert_close(other(*share(3)), graph(*share(3)))


def check_parameters_split_over_a_tensor_axis_keep_that():
    model, twin = make(), make()
    place = grid(("dp", "tp"))
    for name in ("weight", "bias"):
        split = distribute_tensor(getattr(model[0], name).detach(), place.mesh(), [Replicate(), Shard(0)])
        setattr(model[0], name, nn.Parameter(split))
    graph, virtual = momentum_graph(model, place, 3), momentum_graph(twin, grid(("dp", "tp"), virtual=True), 3)
    for step in range(2):
        torch.testing.assert_close(graph(*share(step, 2)), virtual(*batch(step)))
    assert gz.sbp.of(model[0].weight) == (S(1), S(0)) and gz.sbp.of(model[0].bias) == (B, S(0))
    assert isinstance(model[3].weight, DTensor) and gz.sbp.of(model[3].weight)[1] is B
    full = graph.full_state_dict()["modules"]["model"]
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(full[name], value)


def check_a_grid_of_some_ranks_needs_only_these():
    if dist.get_rank() in (1, 3):
        place = gz.placement("cpu", [[1], [3]], names=("dp", "tp"))
        made = as_dtensor(torch.arange(4.0), place, (S(0), B))
        assert made.to_local().tolist() == ([0.0, 1.0] if dist.get_rank() == 1 else [2.0, 3.0])
        assert made.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
        graph = momentum_graph(make(), place, 2)
        x, y = (t.chunk(2)[dist.get_rank() // 2] for t in batch(0))
        graph(x, y)
    dist.barrier()


class Local(nn.Module):
    """Rows centred within each rank of a data axis, with dropout of its own, after a layer of the region's."""

    def __init__(self, names):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 4), nn.Linear(4, 3)
        data = dict.fromkeys([name for name in names if name.startswith("dp")], S(0))
        self.region = gz.local_region(self.centred, data, data)

    def centred(self, x):
        h = nn.functional.dropout(self.inner(x).tanh(), 0.3)
        return h - h.mean(0)

    def forward(self, x):
        return self.outer(self.region(x))


def check_graphs_made_one_after_another_take_no_more_threads_or_files():
    taken = []
    for _ in range(5):
        graph = momentum_graph(make(), grid(("dp", "tp")))
        graph(*share(0, 2))
        del graph
        gc.collect()
        taken.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    assert taken[1:] == [taken[1]] * 4, taken


def local_steps(names, stage, virtual):
    torch.manual_seed(7)
    graph = momentum_graph(Local(names).double(), grid(names, virtual), stage)
    parts = 4 if names is HYBRID else 2
    losses = [graph(*(batch(seed) if virtual else share(seed, parts))) for seed in range(3)]
    return losses, graph.full_state_dict()["modules"]["model"]


def check_local_regions_train_as_on_virtual_ranks():
    jobs = ((HYBRID, 3), (("dp", "tp"), 2))
    for job, wanted in zip(jobs, computed_once([partial(local_steps, *job, True) for job in jobs]), strict=True):
        torch.testing.assert_close(local_steps(*job, False), wanted, rtol=1e-12, atol=1e-12)


def check_a_batch_is_the_same_on_the_ranks_of_an_axis_that_does_not_split_it():
    model = make()
    graph = momentum_graph(model, gz.placement("cpu", GRID, names=("dp", "tp")))
    x, y = batch(0)
    for mine in (share(0), (x.chunk(2)[dist.get_rank() // 2], share(0, 4)[1].repeat(2, 1))):  # a piece for every rank
        try:
            graph(*mine)
        except gz.CaptureError as error:
            assert "other values of input" in str(error) and "the same along tp" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("other batches along tp were taken for equal")
    graph(*share(0, 2))
