"""The model of ``file_toys`` without dropout, its Graphs on real processes, each rank's rows, and plain PyTorch."""

import torch
import torch.distributed as dist
from file_toys import Model, batch, clipped_graph

import graphzero as gz


def everyone():
    return gz.placement("cpu", range(dist.get_world_size()))


def grid():
    return gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"))


def steady_graph(placement, stage, seed=0, dtype=torch.float64):
    """A step without dropout.  stage: of ZeRO.  dtype: of parameters and batches."""
    graph = clipped_graph(placement, stage, seed, schedule=False)
    graph.model.to(dtype).drop.p = 0.0
    graph.stage, graph.dtype = stage, dtype
    return graph


class Evaluate(gz.Graph):
    def __init__(self, model, placement):
        super().__init__(placement)
        self.model = model

    def build(self, x):
        return self.model(x)


class Eager:
    """The same steps without a Graph."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Model().double()
        self.model.drop.p = 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def steps(self, first, count=1):
        for step in range(first, first + count):
            x, y = batch(step)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def row_of(placement):
    return 0 if placement.virtual else dist.get_rank() // (placement.size // placement.hierarchy[0])


def share(placement, step):
    """This rank's rows of a batch; all of them on a virtual placement."""
    if placement.virtual:
        return batch(step)
    return tuple(x.chunk(placement.hierarchy[0])[row_of(placement)] for x in batch(step))


def steps(graph, first, count=1):
    """Losses of the next steps."""
    shares = (share(graph.placement, step) for step in range(first, first + count))
    return [float(graph(*(x.to(graph.dtype) for x in one))) for one in shares]


def assert_same(graph, eager):
    """Whether a Graph's modules are as plain PyTorch leaves them."""
    ours, theirs = graph.full_state_dict()["modules"]["model"], eager.model.state_dict()
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-9, atol=1e-9)
