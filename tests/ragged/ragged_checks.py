"""What two gloo processes check of ragged batches: each has its own number of rows and its own longest row."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

import graphzero as gz

IGNORED = -100
FILLS = {"ids": 0, "mask": False, "labels": IGNORED}
ROUNDS = (((4, 12), (4, 12)), ((4, 9), (3, 11)), ((1, 13), (3, 17)), ((2, 4), (0, 5)))  # of each rank: rows, tokens


class Words(nn.Module):
    """A little attention over words; its batch norm mixes all rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.table, self.places, self.norm, self.head = (
            nn.Embedding(20, 8), nn.Embedding(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 20),
        )  # fmt: skip

    def forward(self, ids, mask):
        h = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], attn_mask=mask[:, None, None])[:, 0]
        return self.head(self.norm(h.mT).mT)


def loss_of(model, ids, mask, labels):
    scores = model(ids, mask)
    return scores, F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + scores.square().mean()


class RaggedGraph(gz.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), 0.1))
        self.config.enable_zero(stage=3)
        self.config.set_shapes({"*": ("rows", "tokens")}, {"rows": 4, "tokens": [12, 20]}, fill=FILLS)

    def build(self, **batch):
        scores, loss = loss_of(self.model, **batch)
        loss.backward()
        return scores, loss, scores.transpose(0, 1)


def share(rows, tokens, made):
    mask = torch.arange(tokens) < torch.randint(2, tokens + 1, (rows, 1), generator=made)
    ids = torch.randint(0, 20, (rows, tokens), generator=made)
    return {"ids": ids, "mask": mask, "labels": torch.where(mask, ids, IGNORED)}


def whole(shares):
    """The global batch: one share below the other, filled up to the longest."""
    longest = max(each["ids"].shape[1] for each in shares)
    return {
        name: torch.cat([F.pad(each[name], (0, longest - each[name].shape[1]), value=FILLS[name]) for each in shares])
        for name in FILLS
    }


def model_of():
    torch.manual_seed(0)
    return Words().double()


def check_ranks_of_unlike_shares_take_the_step_of_the_whole_batch():
    rank, made = dist.get_rank(), torch.Generator().manual_seed(1)
    model = model_of()
    plain, graph = copy.deepcopy(model), RaggedGraph(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for sizes in ROUNDS:
        shares = [share(*each, made) for each in sizes]
        scores, loss, turned = graph(**shares[rank])
        optimizer.zero_grad()
        wanted, wanted_loss = loss_of(plain, **whole(shares))
        wanted_loss.backward()
        optimizer.step()
        above, (rows, tokens) = sum(each[0] for each in sizes[:rank]), sizes[rank]
        torch.testing.assert_close(loss, wanted_loss.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(scores, wanted[above : above + rows, :tokens].detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(turned, wanted.transpose(0, 1).detach(), rtol=1e-9, atol=1e-9)
    for name, x in graph.full_state_dict()["modules"]["model"].items():
        torch.testing.assert_close(x, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    assert len(graph._selection.programs.all) == 2
    assert gz.check(graph, **shares[rank], dtype=torch.float64)


def check_what_one_rank_cannot_pad_is_refused_on_all():
    graph, made = RaggedGraph(model_of()), torch.Generator().manual_seed(dist.get_rank())
    given = share(3, 21 if dist.get_rank() else 5, made)
    refused(graph, given, "room for 20 at most")
    good = share(3, 6, made)
    refused(graph, {**good, "mask": good["mask"][:, :3]} if dist.get_rank() else good, "but they have 6 and 3")
    graph.config.set_shapes({"*": ("rows", "tokens")}, {"rows": 4, "tokens": [12, 24]}, fill={"mask": 0, "ids": 0})
    refused(
        graph, share(3, 6 + dist.get_rank(), made), "ranks have 6, 7 places along 'tokens', so the global batch fills"
    )
    if dist.get_rank():
        graph.config.set_shapes({"*": ("rows", "tokens")}, {"rows": 4, "tokens": [12, 24]}, fill=FILLS)
    refused(graph, good, "what set_shapes pads")


def check_row_numbers_that_hang_on_other_ranks_are_refused():
    class Numbers(gz.Graph):
        def __init__(self):
            super().__init__()
            self.config.set_shapes({"x": {0: "rows"}}, {"rows": 4})

        def build(self, x):
            return (x * torch.arange(x.shape[0])).sum()

    try:
        Numbers()(torch.ones(3))
    except gz.CaptureError as error:
        assert "reads numbers of rows, which depend on how many rows the other ranks have" in str(error)
    else:
        raise AssertionError("was taken")


def refused(graph, given, message):
    try:
        graph(**given)
    except gz.GraphZeroError as error:
        assert message in str(error), error
    else:
        raise AssertionError("was taken")
