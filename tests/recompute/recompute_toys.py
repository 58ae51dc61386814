"""The model that the tests of recomputation train: blocks with norms, an MLP, attention and dropout."""

import warnings

import torch
from graphs import TrainGraph
from torch import nn

VOCABULARY, WIDTH, CONTEXT = 48, 16, 16


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, context, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Blocks(nn.Module):
    def __init__(self, layers=2, p=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def next_token_loss(model, ids):
    logits = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def blocks_graph(memory=None, stage=0, placement=None, budget=None, early=False, layers=2, p=0.1, **zero) -> TrainGraph:
    """memory: as ``set_activation_memory`` takes it."""
    model = Blocks(layers, p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = TrainGraph(model, next_token_loss, optimizer, placement=placement or 2, stage=stage, **zero)
    graph.config.set_activation_memory(memory)
    graph.config.set_memory_budget(budget)
    graph.config.set_optimizer_in_backward(early)
    return graph


def batch(step=0, rows=8):
    return torch.randint(VOCABULARY, (rows, CONTEXT), generator=torch.Generator().manual_seed(step))


def trained(graph, steps=2, part=lambda ids: ids):
    """The losses of some steps, and the parameters after them."""
    torch.manual_seed(1)
    losses = [graph(part(batch(step))) for step in range(steps)]
    return losses, list(graph.full_state_dict()["modules"]["model"].values())


def same_bits(one, other):
    return all(map(torch.equal, one[0], other[0])) and all(map(torch.equal, one[1], other[1]))


class Captured:
    """Plans of one Graph under many settings, from one capture."""

    def __init__(self):
        self.graph = blocks_graph()

    def __call__(self, memory=None, stage=0, budget=None, **zero):
        self.graph.config.enable_zero(bool(stage), stage=stage or 1, **zero)
        self.graph.config.set_activation_memory(memory)
        self.graph.config.set_memory_budget(budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # so many programs
            return self.graph.compile(batch()).plan
