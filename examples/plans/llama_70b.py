"""Llama 3 of 70 billion parameters, for the command ``graphzero``; it needs no GPU and some GiB:

    graphzero plan examples/plans/llama_70b.py:make --hierarchy 64x8 --device h100 --memory 80GB

Along an axis tp weights are split as Megatron does, columns then rows (arXiv 1909.08053); without one all ranks are
data parallel.  With ``:make_checkpointed`` backward computes again what lies between the ends of layers; choosing that
takes minutes.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphzero as gz
from graphzero.sbp import B, S

CONFIG = LlamaConfig(  # of meta-llama/Meta-Llama-3-70B
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192, use_cache=False,
)  # fmt: skip
CONTEXT = 4096  # tokens of the one sequence that a rank reads
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


class Train(gz.Graph):
    def __init__(self, placement, stage):
        super().__init__(placement, name="Llama-70B")
        self.model = LlamaForCausalLM(CONFIG)
        if "tp" in placement.names:
            split_weights(self.model, placement)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1.5e-4), clip_grad_norm=1.0)
        self.config.enable_amp()
        self.config.enable_zero(stage > 0, stage=stage or 2)

    def build(self, ids):
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss


def split_weights(model: nn.Module, placement):
    """Over the axis tp, the second one; norms stay whole."""
    for name, module in model.named_modules():
        if name.endswith(COLUMNS + ROWS):
            gz.to_global(module, placement, (B, S(1) if name.endswith(ROWS) else S(0)))


def make(placement, stage):
    """The graph, and what one rank calls it with."""
    return Train(placement, stage), torch.zeros(1, CONTEXT, dtype=torch.long)


def make_checkpointed(placement, stage):
    graph, args = make(placement, stage)
    graph.config.set_activation_memory("checkpoint")
    return graph, args
