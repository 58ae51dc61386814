"""A model with ties, a padding row and running statistics; on the meta device, and as one process makes it."""

import torch
from graphs import TrainGraph
from torch import nn

import graphzero as gz


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(8, 24)
        self.narrow = nn.Linear(24, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return self.head(self.narrow(torch.relu(self.wide(h))))


def on_meta():
    with torch.device("meta"):
        return Model()


def init(module):
    """In the manner of language models: several writes to one tensor, and reads of it."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        module.weight.mul_(1 / (1 + module.weight.std()))
        if getattr(module, "padding_idx", None) is not None:
            module.weight[module.padding_idx].zero_()
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
    elif hasattr(module, "_reset_parameters"):
        module._reset_parameters()
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, Model):
        for name, x in module.named_parameters():
            if name.startswith("narrow"):
                nn.init.normal_(x, std=0.1)
        nn.init.orthogonal_(module.wide.weight)


def in_one_process(how, seed):
    model = on_meta().to_empty(device="cpu")
    model.head.weight = model.embed.weight
    torch.manual_seed(seed)
    with torch.no_grad():
        model.apply(how)
    return model


def tokens(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (rows, 5), generator=generator)


def next_token_loss(model, x):
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def adamw_graph(placement, stage, model=None, loss_fn=next_token_loss) -> TrainGraph:
    model = on_meta() if model is None else model
    if "tp" in placement.names:
        split = {"wide.*": (gz.sbp.B, gz.sbp.S(0)), "narrow.weight": (gz.sbp.B, gz.sbp.S(1))}
        gz.to_global(model, placement, split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainGraph(model, loss_fn, optimizer, placement=placement, stage=stage)
