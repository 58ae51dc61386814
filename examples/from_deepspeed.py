"""A DeepSpeed script moved over: GPT-2 with ZeRO-2, float16 and accumulation, as articles on DeepSpeed have it.

    torchrun --standalone --nproc-per-node=2 examples/from_deepspeed.py

The JSON is DeepSpeed's and stays as it is.  docs/from_deepspeed.md shows the original lines beside these.
"""

from __future__ import annotations

import argparse
import os

import torch
from text import VOCABULARY, standard_library
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import graphzero as gz

DS_CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
SIZES = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2},
    "small": {"n_embd": 384, "n_layer": 6, "n_head": 6},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
}
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Train(gz.Graph):
    """The step; in the original it is deepspeed.initialize, engine(...), engine.backward and engine.step."""

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__(config=gz.GraphConfig.from_deepspeed(DS_CONFIG))
        self.model = model
        self.add_optimizer(**self.config.deepspeed.optimizer_arguments(model.parameters()))

    def build(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids).loss
        loss.backward()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_positions": options.context, "bos_token_id": 0, "eos_token_id": 0}
    graph = Train(GPT2LMHeadModel(GPT2Config(**shape, **SIZES[options.size], use_cache=False)))
    batches = loader(options.context, options.steps, graph.config.deepspeed)
    for step, (ids,) in enumerate(batches):
        loss = graph(ids.to(graph.placement.device_type))
        if RANK == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss:.3f}, scale {graph.loss_scale:.0f}", flush=True)


def loader(context: int, steps: int, said: gz.DeepSpeed) -> DataLoader[tuple[Tensor, ...]]:
    """Python's standard library, byte by byte: each rank's samples of a step, which are all its micro-batches."""
    raw = standard_library(steps * said.train_batch_size * context)
    data = TensorDataset(torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().view(-1, context))
    return DataLoader(data, batch_size=said.batch_per_rank, sampler=DistributedSampler(data, RANKS, RANK))


if __name__ == "__main__":
    main()
