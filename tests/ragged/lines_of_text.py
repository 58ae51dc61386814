"""A small GPT-2 that learns lines of text of all lengths, as a Graph with sizes of ``set_shapes`` and in plain PyTorch.

A batch is some lines of a file of Python's standard library, as long as its longest; one in eight has fewer lines.
Plain PyTorch steps on the batches as they are, in float64.
"""

from __future__ import annotations

import copy
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import graphzero as gz

IGNORED = -100
FILLS = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
Batch = dict[str, Tensor]


class Training(NamedTuple):
    """shapes: how many different ones came.  difference: the largest relative one of losses from plain PyTorch's."""

    shapes: int
    programs: int
    difference: float


class Train(gz.Graph):
    def __init__(self, model: nn.Module, ranks: int, rows: int, buckets: tuple[int, ...]) -> None:
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), 1e-3), clip_grad_norm=1.0)
        self.config.enable_zero(stage=2)
        self.config.set_shapes({"*": ("rows", "tokens")}, {"rows": [rows], "tokens": list(buckets)}, fill=FILLS)

    def build(self, **batch: Tensor) -> Tensor:
        loss = loss_of(self.model, batch)
        loss.backward()
        return loss


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """In the model's own dtype; transformers' would be in float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def model_of(longest: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=256, n_positions=longest, n_embd=16, n_layer=1, n_head=2, **no_dropout)
    return transformers.GPT2LMHeadModel(config).double()


def batches(steps: int, rows: int, longest: int) -> list[Batch]:
    """Lines of Python's own library, a byte a token."""
    files, draw = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), random.Random(0)
    drawn: list[Batch] = []
    while len(drawn) < steps:
        lines = [line[:longest] for line in draw.choice(files).read_bytes().splitlines() if len(line) > 2]
        count = rows if len(drawn) % 8 else draw.randint(2, rows)
        if len(lines) > count:
            at = draw.randrange(len(lines) - count)
            drawn.append(batch_of(lines[at : at + count]))
    return drawn


def batch_of(lines: list[bytes]) -> Batch:
    """As a collator makes it: as long as the longest line."""
    length = max(map(len, lines))
    ids = torch.tensor([list(line.ljust(length, b"\0")) for line in lines])
    mask = torch.arange(length) < torch.tensor([len(line) for line in lines])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, IGNORED)}


def train_on_lines(steps: int, ranks: int, rows: int, buckets: tuple[int, ...]) -> Training:
    """The Graph's run, beside plain PyTorch's."""
    model, given = model_of(buckets[-1]), batches(steps, rows, buckets[-1])
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    graph = Train(model, ranks, rows, buckets)
    worst, compiled = 0.0, set()
    for batch in given:
        loss = graph(**batch)
        compiled.add(id(graph.program))
        optimizer.zero_grad()
        wanted = loss_of(plain, batch)
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        worst = max(worst, float(abs(loss - wanted) / abs(wanted)))
    return Training(len({batch["input_ids"].shape for batch in given}), len(compiled), worst)
