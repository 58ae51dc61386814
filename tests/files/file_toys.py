"""A model with a tie, running statistics, dropout and a frozen part; its Graph at any stage and placement."""

import json

import torch
import torch.distributed as dist
from graphs import TrainGraph, mse
from torch import nn

import graphzero as gz

WORLDS = {"1 rank": [0], "2 ranks": [0, 1], "3 ranks": [0, 1, 2], "4 ranks": [0, 1, 2, 3], "2 x 2": [[0, 1], [2, 3]]}
STEPS = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.twin = nn.Linear(6, 10)
        self.twin.weight = self.first.weight
        self.norm = nn.BatchNorm1d(10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(10, 3)

    def forward(self, x):
        h = self.norm(torch.tanh(self.first(x)) + self.twin(x))
        return self.last(self.drop(self.frozen(h)))


def batch(step, rows=24):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


def clipped_graph(placement, stage=0, seed=0, make=torch.optim.AdamW, schedule=True, name="Train") -> TrainGraph:
    """seed: of its parameters and draws."""
    torch.manual_seed(seed)
    model = Model().double()
    if "tp" in placement.names and not placement.virtual:
        plan = {"first.*": (gz.sbp.B, gz.sbp.S(0)), "twin.*": (gz.sbp.B, gz.sbp.S(0))}
        gz.to_global(model, placement, plan)
    optimizer = make(model.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else None
    return TrainGraph(model, mse, optimizer, placement=placement, name=name, scheduler=decay, clip=1.0, stage=stage)


def train_in(world, seed):
    return clipped_graph(gz.placement("cpu", WORLDS[world], names=("dp", "tp") if world == "2 x 2" else None), 0, seed)


def at_stage(graph, stage):
    graph.config.enable_zero(bool(stage), stage=stage or 2)


def goes_on(folder, world, source):
    """A run at each stage, saved and loaded again, and one that goes on from what ``source`` has saved at another."""
    rank = dist.get_rank()
    graph = train_in(world, 10 + rank)
    for stage in range(4):
        at_stage(graph, stage)
        losses(graph, 0, STEPS)
        place = folder / world / str(stage)
        gz.save(graph, place, extra={"saved at": stage})
        wanted = losses(graph, STEPS, STEPS)
        assert gz.load(graph, place) == {"saved at": stage}
        assert losses(graph, STEPS, STEPS) == wanted, "to the bit"
        if rank == 0:
            (place / "losses.json").write_text(json.dumps(wanted))
        place = folder / source / str((stage + 1) % 4)
        gz.load(graph, place)
        expected = torch.tensor(json.loads((place / "losses.json").read_text()))
        torch.testing.assert_close(torch.tensor(losses(graph, STEPS, STEPS)), expected, atol=1e-9, rtol=0)


def go_on(rank, folder, ranks, pairs):
    """In processes of their own; pairs: (world, source)."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}.store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    for world, source in pairs:
        goes_on(folder, world, source)
    dist.destroy_process_group()


def virtual(ranks):
    return gz.placement("cpu", range(ranks), virtual=True)


class Lora(nn.Module):
    """``base`` is frozen; what is trained beside it is small."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class TrainLora(gz.Graph):
    def __init__(self, placement, stage=0, seed=0, base=None):
        super().__init__(placement, "TrainLora")
        torch.manual_seed(seed)
        self.model = nn.Sequential(Lora(nn.Linear(6, 600)), nn.Tanh(), Lora(nn.Linear(600, 3))).double()
        if base is not None:
            own = {name: x for name, x in base.model.state_dict().items() if ".base." in name}
            self.model.load_state_dict(own, strict=False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.add_optimizer(self.optimizer)
        at_stage(self, stage)

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def losses(graph, first, count=2):
    """Of the next steps, each rank with its rows."""
    placement = graph.placement
    if placement.virtual:
        return [float(graph(*batch(step))) for step in range(first, first + count)]
    rows, inner = placement.hierarchy[0], placement.size // placement.hierarchy[0]
    place = dist.get_rank() // inner
    shares = (tuple(x.chunk(rows)[place] for x in batch(step)) for step in range(first, first + count))
    return [float(graph(*share)) for share in shares]
