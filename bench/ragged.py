"""A run over text of all lengths: programs, padding, and the difference from plain PyTorch without padding.

``python bench/ragged.py --steps 200 --ranks 2``: a small GPT-2 learns the sources of Python's standard library.  A
batch is some lines of a file, as long as its longest; one in eight has fewer lines.  Plain PyTorch steps on the batches
as they are, in float64.  ``--gloo`` takes real processes, each with its share of the lines, cut to what these need.
"""

from __future__ import annotations

import argparse
import copy
import random
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from _run import markdown, on_gloo, options_of
from torch import Tensor, nn

import graphzero as gz

IGNORED = -100
FILLS = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """shapes: how many different ones came.  padding: the share of places that are padded.  difference: the largest
    relative one of losses from plain PyTorch's; of_parameters: of parameters, at the end."""

    shapes: int
    programs: int
    padding: float
    difference: float
    of_parameters: float
    seconds: float
    seconds_compiling: float


class Train(gz.Graph):
    def __init__(self, model: nn.Module, place: gz.Placement, rows: int, buckets: tuple[int, ...]) -> None:
        super().__init__(place)
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


def model_of(width: int, layers: int, longest: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=longest, n_embd=width, n_layer=layers, n_head=2, **no_dropout
    )
    return transformers.GPT2LMHeadModel(config).double()


def batches(steps: int, rows: int, longest: int) -> list[Batch]:
    """Lines of Python's own library, a byte a token."""
    files, draw = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), random.Random(0)
    found: list[Batch] = []
    while len(found) < steps:
        lines = [line[:longest] for line in draw.choice(files).read_bytes().splitlines() if len(line) > 2]
        count = rows if len(found) % 8 else draw.randint(2, rows)
        if len(lines) > count:
            at = draw.randrange(len(lines) - count)
            found.append(batch_of(lines[at : at + count]))
    return found


def batch_of(lines: list[bytes]) -> Batch:
    """As a collator makes it: as long as the longest line."""
    length = max(map(len, lines))
    ids = torch.tensor([list(line.ljust(length, b"\0")) for line in lines])
    mask = torch.arange(length) < torch.tensor([len(line) for line in lines])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, IGNORED)}


def share_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's rows, as long as the longest of these."""
    mine = {name: x.tensor_split(ranks)[rank] for name, x in batch.items()}
    length = int(mine["attention_mask"].sum(1).max())
    return {name: x[:, :length] for name, x in mine.items()}


def run(
    steps: int, ranks: int, rows: int, buckets: tuple[int, ...], width: int, layers: int, is_real: bool = False
) -> Found:
    """One run, beside plain PyTorch's."""
    model, given = model_of(width, layers, buckets[-1]), batches(steps, rows, buckets[-1])
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    place = gz.placement("cpu", range(ranks), virtual=not is_real)
    graph = Train(model, place, rows // ranks if is_real else rows, buckets)
    worst, seconds, compiling, places, padded = 0.0, 0.0, 0.0, 0, 0
    compiled = set()
    for batch in given:
        mine = share_of(batch, dist.get_rank(), ranks) if is_real else batch
        began = time.perf_counter()
        loss = graph(**mine)
        took = time.perf_counter() - began
        seconds += took
        compiling += took * (id(graph.program) not in compiled)
        compiled.add(id(graph.program))
        wanted = stepped(plain, optimizer, batch)
        worst = max(worst, abs(loss.item() - wanted) / abs(wanted))
        size = next(graph.program.placeholders("batch")).meta["type"].numel
        places, padded = places + size, padded + size - batch["input_ids"].numel()
    full = graph.full_state_dict()["modules"]["model"]
    pairs = [(full[name], x) for name, x in plain.state_dict().items() if x.is_floating_point()]
    apart = max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-3)) for x, y in pairs)
    shapes = len({batch["input_ids"].shape for batch in given})
    return Found(shapes, len(compiled), padded / places, worst, apart, seconds, compiling)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Plain PyTorch's step; the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def on_rank(rank: int, *args: int | tuple[int, ...]) -> Found:
    """A run on real processes."""
    return run(*args, is_real=True)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gloo", action="store_true")
    options = options_of(parser)
    warnings.simplefilter("ignore")
    work = (options.steps, options.ranks, options.rows, (32, 64, 96, 128), options.width, options.layers)
    found = on_gloo(options.ranks, on_rank, *work) if options.gloo else run(*work)
    head = ["steps", "shapes that came", "programs", "padding", "losses differ by", "parameters by", "s", "s compiling"]
    numbers = [options.steps, found.shapes, found.programs, f"{found.padding:.1%}", f"{found.difference:.1e}"]
    numbers += [f"{found.of_parameters:.1e}", f"{found.seconds:.1f}", f"{found.seconds_compiling:.1f}"]
    print(markdown(head, [numbers]))


if __name__ == "__main__":
    main()
