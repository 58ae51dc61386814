"""Values without elements, which models slice off where they have nothing to add, are joined and cut like others."""

import pytest
import torch
from torch import nn

import graphzero as gz

CASES = {
    "two joined": lambda x, e: torch.cat([e, e], 1),
    "joined to others": lambda x, e: torch.cat([e, x, e], 1),
    "joined along another dim": lambda x, e: torch.cat([e, e], 2),
    "joined along the batch": lambda x, e: torch.cat([e.transpose(0, 1), e.transpose(0, 1)], 0),
    "stacked": lambda x, e: torch.stack([e, e], 1),
    "split": lambda x, e: torch.cat(e.split(2, 2), 2),
    "split evenly": lambda x, e: torch.cat(e.chunk(2, 1), 1),
    "flat": lambda x, e: e.flatten(),
    "flat but for a dim": lambda x, e: e.flatten(1),
    "heads": lambda x, e: e.view(4, 0, 2, 4).transpose(1, 2),
    "heads together": lambda x, e: e.view(4, 0, 2, 4).transpose(1, 2).reshape(8, 0, 4),
    "repeated": lambda x, e: e.repeat(1, 2, 1),
    "repeated batches": lambda x, e: e.repeat_interleave(2, 0),
    "rolled": lambda x, e: e.roll(1, 2),
    "turned over": lambda x, e: e.flip(1),
    "padded": lambda x, e: nn.functional.pad(e, (0, 0, 1, 2)),
    "summed": lambda x, e: e.sum(1),
    "a product": lambda x, e: e @ x.transpose(1, 2),
    "a product over nothing": lambda x, e: e.transpose(1, 2) @ e,
    "a softmax": lambda x, e: e.softmax(2),
    "a layer norm": lambda x, e: nn.functional.layer_norm(e, (8,)),
    "looked up": lambda x, e: nn.functional.embedding(e.long()[:, :, 0], x[0]),
    "attention": lambda x, e: nn.functional.scaled_dot_product_attention(e, x, x),
    "sorted": lambda x, e: e.sort(2).values,
    "counted": lambda x, e: e.cumsum(1),
    "picked": lambda x, e: x.gather(1, e.long()),
    "windows": lambda x, e: x[:, :0].unfold(2, 4, 2),
}


class Step(gz.Graph):
    def __init__(self, ranks, case):
        super().__init__(gz.placement("cpu", ranks, virtual=True))
        self.model, self.case = nn.Linear(8, 8).double(), [case]
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.enable_zero(stage=2)

    def build(self, x):
        y = self.model(x)
        made = self.case[0](y, y[:, :0])
        loss = y.square().sum() + made.sin().sum()
        loss.backward()
        return loss, made


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 1], [2, 3]]], ids=["4", "2x2"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_with_values_without_elements(name, ranks):
    torch.manual_seed(0)
    graph, x = Step(ranks, CASES[name]), torch.randn(4, 3, 8, dtype=torch.float64)
    plain = nn.Linear(8, 8).double()
    plain.load_state_dict(graph.model.state_dict())
    y = plain(x)
    made = CASES[name](y, y[:, :0])
    loss = y.square().sum() + made.sin().sum()
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found = graph(x)
    torch.testing.assert_close(found, (loss.detach(), made.detach()))
    torch.testing.assert_close(dict(graph.model.state_dict()), dict(plain.state_dict()))
