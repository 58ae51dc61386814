"""GPT-2 of 124 million parameters, for the command ``graphzero``:

graphzero plan examples/plans/gpt2.py:make --ranks 8 --device a100
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import graphzero as gz

BATCH, CONTEXT = 8, 1024  # sequences of a rank, and their tokens


class Train(gz.Graph):
    def __init__(self, placement, stage):
        super().__init__(placement, name="GPT-2")
        self.model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=6e-4), clip_grad_norm=1.0)
        self.config.enable_amp()
        self.config.enable_zero(stage > 0, stage=stage or 2)

    def build(self, ids):
        loss = self.model(ids, labels=ids).loss
        loss.backward()
        return loss


def make(placement, stage):
    """The graph, and what one rank calls it with."""
    return Train(placement, stage), torch.zeros(BATCH, CONTEXT, dtype=torch.long)
