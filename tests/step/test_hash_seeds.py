"""Programs hang on no order of a set: each process draws another one, and ranks compare their texts."""

import os
import subprocess
import sys

import pytest

PROGRAMS = """
import torch
from torch import nn
import graphzero as gz
from graphzero.ir.text.printer import print_graph

class Train(gz.Graph):
    def __init__(self, stage, parts):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(16) for _ in range(3)]
        self.model = nn.Sequential(nn.Linear(8, 16), norms[0], nn.ReLU(), norms[1], nn.Dropout(0.1), norms[2])
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()), clip_grad_norm=1.0)
        self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(parts)
        if stage == 3:
            self.config.set_activation_memory("checkpoint")
        else:
            self.config.enable_amp(dtype=torch.float16)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

for stage, parts in ((2, 2), (3, 3)):
    graph = Train(stage, parts)
    graph(torch.randn(12, 8))
    print(print_graph(graph.program, align=False))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_the_same_in_processes_that_hash_words_otherwise() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAMS]
    one, other = (
        subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    )
    assert one.stdout.count("carry(") > 2 and one.stdout == other.stdout
