"""What two gloo processes check of mixed precision."""

import torch
import torch.distributed as dist
from precision_toys import BF16, F16, amp_graph, batch_of, mlp, virtual
from torch.distributed.tensor import DTensor


def share(batch):
    return [x.chunk(2)[dist.get_rank()] for x in batch]


def check_steps_are_those_of_virtual_ranks_at_every_stage():
    for dtype, stages in ((BF16, (1, 3)), (F16, (2,))):
        for stage in stages:
            told = {"stage": stage, "dtype": dtype, "clip": 1.0, "init_scale": 2.0**10}
            graph, twin = amp_graph(mlp(), **told), amp_graph(mlp(), placement=virtual(2), **told)
            for step in range(3):
                batch = batch_of(twin.model, step)
                assert torch.equal(graph(*share(batch)), twin(*batch))
            full = graph.full_state_dict()
            for name, held in twin.model.state_dict().items():
                assert torch.equal(full["modules"]["model"][name], held), (stage, name)
            masters = {isinstance(p, DTensor) for p in graph.model.parameters()}
            assert masters == {stage > 0}
            assert all(p.dtype == torch.float32 for p in graph.model.parameters())
            stepped = graph.optimizer.param_groups[0]["params"]
            assert set(map(id, stepped)) == set(map(id, graph.model.parameters()))


def check_masters_in_bfloat16_are_rounded_as_on_virtual_ranks():
    for stage in (0, 3):
        told = {"stage": stage, "clip": 1.0, "stochastic_rounding": True}
        graph, twin = amp_graph(mlp().to(BF16), **told), amp_graph(mlp().to(BF16), placement=virtual(2), **told)
        for step in range(3):
            for one, batch in ((graph, share(batch_of(twin.model, step))), (twin, batch_of(twin.model, step))):
                if step == 0:
                    torch.manual_seed(stage)
                one(*batch)
        full, whole = graph.full_state_dict(), twin.full_state_dict()
        for name, held in whole["modules"]["model"].items():
            assert held.dtype == BF16 and torch.equal(full["modules"]["model"][name], held), (stage, name)
        for name, states in whole["optimizers"][0]["state"].items():
            for key, held in states.items():
                assert torch.equal(full["optimizers"][0]["state"][name][key], held), (stage, name, key)


def check_an_overflow_on_one_rank_skips_the_step_on_both_and_the_scale_is_loaded():
    graph = amp_graph(mlp(), 1, dtype=F16, init_scale=2.0**10)
    batch = share(batch_of(graph.model, 0))
    graph(*batch)
    before = graph.full_state_dict()
    x = torch.full_like(batch[0], 3e4) if dist.get_rank() == 1 else batch[0]
    graph(x, batch[1] - (6e4 if dist.get_rank() == 1 else 0))
    assert graph.skipped and graph.loss_scale == 2.0**9
    after = graph.full_state_dict()
    for name, held in before["modules"]["model"].items():
        assert torch.equal(after["modules"]["model"][name], held)
    graph.load_state_dict(before)
    assert graph.loss_scale == 2.0**10
    graph(*batch)
    assert not graph.skipped
