"""What gloo processes check of placing what is placed already; ``test_placing`` reports each check."""

import itertools

import pytest
import torch
import torch.distributed as dist
from processes import slow
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphzero as gz
from graphzero.runtime.tensors.shards import piece, position_of
from graphzero.sbp import B, P, S

D = torch.float64


def model_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False)).to(D)
    model[0].weight.requires_grad_(False)
    return model


def places():
    """1-d, and as 2-d as ranks allow; by another name, so that only ranks and hierarchy tell them apart."""
    ranks = dist.get_world_size()
    grid = torch.arange(ranks).reshape(-1, 2).tolist()
    return [gz.placement("cpu", range(ranks)), gz.placement("cpu", grid), gz.placement("cpu", grid, ("tp", "dp"))]


def layouts(where):
    """What a module may be given: one SBP for all, or patterns."""
    if len(where.names) == 1:
        return [B, S(0), S(0, 2), {"0.*": S(0), "2.weight": S(1)}, {"0.bias": S(0)}]
    return [(B, B), (S(0), B), (B, S(0)), (S(0), S(0)), (S(0), S(0, 2)), {"0.weight": (B, S(1)), "2.*": (S(0), B)}]


def wanted(layout, name, tensor, where):
    count = len(where.names)
    nd = layout.get(name, layout.get(name.split(".")[0] + ".*", (B,) * count)) if isinstance(layout, dict) else layout
    nd = nd if isinstance(nd, tuple) else (nd,)
    return nd if tensor.dim() else (B,) * count


def assert_placed(model, where, layout):
    expected = model_of()
    tensors = dict(itertools.chain(expected.named_parameters(), expected.named_buffers()))
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        nd, whole = wanted(layout, name, tensor, where), tensors[name].detach()
        assert isinstance(tensor, DTensor) and gz.sbp.of(tensor) == nd, (name, gz.sbp.of(tensor), nd)
        mine = piece(whole, nd, where.hierarchy, position_of(where))
        assert torch.equal(gz.to_local(tensor), mine), (name, layout)
        assert gz.to_local(tensor).untyped_storage().nbytes() == mine.numel() * mine.element_size(), (name, layout)
        assert tensor.requires_grad == tensors[name].requires_grad
        assert tuple(tensor.device_mesh.shape) == where.hierarchy


def ways():
    """Every way within and between the first two places, and from each of these to its like and back under other names:
    names stand in no piece, so that they need no pairs of layouts of their own."""
    line, grid, renamed = places()
    options = [(where, layout) for where in (line, grid) for layout in layouts(where)]
    yield from itertools.product(options, repeat=2)
    for i, layout in enumerate(layouts(renamed)):
        for where in (line, grid, renamed):
            alike = (where, layouts(where)[i % len(layouts(where))])
            yield from (((renamed, layout), alike), (alike, (renamed, layout)))


@slow
def check_every_way_from_one_layout_to_another():
    for (first, one), (second, other) in ways():
        model = gz.to_global(model_of(), first, one)
        assert gz.to_global(model, second, other) is model
        assert_placed(model, second, other)


def check_a_part_that_is_placed_and_one_that_is_not():
    where = places()[0]
    model = model_of()
    gz.to_global(model[0], where, S(0))
    gz.to_global(model, where, {"2.weight": S(1), "0.weight": S(1)})
    assert_placed(model, where, {"2.weight": S(1), "0.weight": S(1)})


def check_a_tensor_goes_to_another_arrangement_of_its_ranks():
    line, grid, _ = places()
    whole = torch.arange(64.0).reshape(8, 8)
    for src, dst in itertools.product([B, S(0), S(1)], [(B, B), (S(0), S(1)), (S(0), S(0)), (S(1), B)]):
        x = gz.to_global(piece(whole, (src,), line.hierarchy, position_of(line)), line, src)
        y = gz.to_global(x, grid, dst)
        assert gz.sbp.of(y) == dst and torch.equal(y.full_tensor(), whole)
        assert torch.equal(gz.to_global(y, line, src).full_tensor(), whole)
    with pytest.raises(gz.SbpError, match="no summands"):
        gz.to_global(y, line, P)


def check_what_parallelize_module_has_placed_is_placed_anew():
    where = places()[1]
    mesh = where.mesh()
    model = model_of()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    layout = {"0.weight": (B, S(1)), "2.*": (S(0), B)}
    gz.to_global(model, where, layout)
    assert_placed(model, where, layout)


def check_a_graph_takes_the_layout_that_was_said_last():
    where = places()[0]

    class Forward(gz.Graph):
        def __init__(self, model):
            super().__init__(where)
            self.model = model.eval()

        def build(self, x):
            return self.model(x)

    x = torch.randn(4 * dist.get_world_size(), 8, dtype=D, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    model = gz.to_global(model_of(), where, B)
    graph = Forward(model)
    expected = model_of().eval()(mine).detach()
    torch.testing.assert_close(graph(mine), expected)
    assert gz.sbp.of(graph.program.node("model_0_weight")) == (B,)
    gz.to_global(model, where, S(0))
    torch.testing.assert_close(graph(mine), expected)
    assert gz.sbp.of(graph.program.node("model_0_weight")) == (S(0),)


def check_ranks_that_hold_it_otherwise_are_told_so_on_all_ranks():
    where = places()[0]
    model = model_of()
    if dist.get_rank() == 0:
        mesh = where.mesh()
        model[0].bias = nn.Parameter(DTensor.from_local(model[0].bias.detach(), mesh, [Replicate()], run_check=False))
    with pytest.raises(gz.CaptureError, match=r"0\.bias: rank 0: .* over dp to S\(0\); rank"):
        gz.to_global(model, where, S(0))


def check_a_tensor_on_other_ranks_is_refused():
    where, ranks = places()[0], dist.get_world_size()
    model = gz.to_global(model_of(), gz.placement("cpu", [dist.get_rank()]), S(0))
    with pytest.raises(gz.PlacementError, match=rf"on ranks \[{dist.get_rank()}\], the graph runs on"):
        gz.to_global(model, where, S(0))
    virtual = gz.placement("cpu", range(ranks), virtual=True)
    with pytest.raises(gz.PlacementError, match="virtual"):
        gz.to_global(model, virtual, S(0))


def check_a_module_on_the_meta_device_keeps_none_of_its_values():
    line, grid, _ = places()
    with torch.device("meta"):
        model = nn.Linear(8, 12, dtype=D)
    gz.to_global(model, line, S(0))
    gz.to_global(model, grid, {"weight": (B, S(1))})
    assert model.weight.is_meta and gz.to_local(model.weight).shape == (12, 8 // grid.hierarchy[1])
    assert [type(p) for p in model.weight.placements] == [Replicate, Shard]
