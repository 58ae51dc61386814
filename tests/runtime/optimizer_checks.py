"""What two gloo processes check of updates that exchange whole matrices, and of averages of a model."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils

import graphzero as gz


class MuonGraph(gz.Graph):
    def __init__(self, stage, averaged=False):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(64, 64, bias=i == 0) for i in range(5)))
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        self.add_optimizer(torch.optim.Muon(matrices, lr=0.01))
        self.add_optimizer(torch.optim.AdamW([self.model[0].bias]))
        if averaged:
            self.average = swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
            self.add_average(self.average, self.model)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


class Evaluate(gz.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)


def share(step):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def trained(stage, steps=2, averaged=False):
    graph = MuonGraph(stage, averaged)
    for step in range(steps):
        graph(share(step))
    return graph


def whole(module):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in module.state_dict().items()}


def check_stacks_of_matrices_send_and_hold_what_is_planned():
    wanted = whole(trained(0).model)
    for stage in (1, 2, 3):
        graph = trained(stage)
        torch.testing.assert_close(whole(graph.model), wanted)
        sent = gz.testing.trace_step(graph, share(2))
        assert [(one.kind, one.nbytes) for one in sent] == [(one.kind, one.bytes) for one in graph.plan.collectives]
        assert [one.kind for one in sent].count("all_to_all") % 2 == 0 < [one.kind for one in sent].count("all_to_all")
        measured = gz.testing.measure_step(graph, share(3))
        assert abs(measured.peak - graph.plan.memory.peak) <= 16


def check_averages_are_split_saved_and_evaluated():
    model = copy.deepcopy(MuonGraph(0).model)
    wanted = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    plain = trained(0, 0)
    for step in range(3):
        plain(share(step))
        wanted.update_parameters(plain.model)
    for stage in (1, 3):
        graph = trained(stage, 3, averaged=True)
        for param in graph.average.parameters():
            assert isinstance(param, DTensor) and param.to_local().numel() == param.numel() // 2
        torch.testing.assert_close(whole(graph.average), wanted.state_dict())
        torch.testing.assert_close(Evaluate(graph.average)(share(9)), wanted(share(9)))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        gz.save(graph, Path(folder[0], "checkpoint"))
        fresh = MuonGraph(2, averaged=True)
        gz.load(fresh, Path(folder[0], "checkpoint"))
        torch.testing.assert_close(whole(fresh.average), wanted.state_dict())
        graph(share(3))
        fresh(share(3))
        torch.testing.assert_close(whole(fresh.average), whole(graph.average))
