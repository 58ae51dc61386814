"""What two gloo processes check of ragged batches: each has its own number of rows and its own longest row."""

import copy
import multiprocessing
from collections import UserDict
from itertools import zip_longest

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

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
    """The global batch: one share below the other, filled up to the longest row."""
    shares = [each for each in shares if len(each["ids"])]
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
        assert scores.shape[:2] == (rows, tokens)
        if rows:
            torch.testing.assert_close(scores, wanted[above : above + rows, :tokens].detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(turned, wanted.transpose(0, 1).detach(), rtol=1e-9, atol=1e-9)
    for name, x in graph.full_state_dict()["modules"]["model"].items():
        torch.testing.assert_close(x, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
    assert len(graph._selection.programs.all) == 2
    assert gz.check(graph, **shares[rank], dtype=torch.float64)


class Stream(IterableDataset):
    """Rows of this rank, whose number nobody knows."""

    def __init__(self, rank, numbers):
        self.rows = [row for number in numbers for row in [share(1, 3 + number % 9, seeded(number))]][rank::2]

    def __iter__(self):
        worker = get_worker_info()
        yield from self.rows[worker.id :: worker.num_workers] if worker else self.rows


def seeded(number):
    return torch.Generator().manual_seed(number)


def check_ranks_whose_loaders_end_at_other_times_take_the_steps_of_what_is_left():
    """Of 13 rows rank 0 has 7, in 4 batches of workers, and rank 1 has 6, in 3 batches of one process."""
    rank, model = dist.get_rank(), model_of()
    plain, graph = copy.deepcopy(model), RaggedGraph(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    multiprocessing.set_forkserver_preload(["graphzero.graph"])  # else each worker imports torch again
    of_ranks = [DataLoader(Stream(r, range(13)), 2, collate_fn=whole, num_workers=2 * (r == 0)) for r in range(2)]
    steps = list(zip_longest(*of_ranks))
    assert len(steps) == 4 and steps[3][1] is None
    losses = [graph(**batch)[1] for batch in gz.until_all_end(of_ranks[rank], graph)]
    for loss, shares in zip(losses, steps, strict=True):
        optimizer.zero_grad()
        wanted = loss_of(plain, **whole([each for each in shares if each is not None]))[1]
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
    for name, x in graph.full_state_dict()["modules"]["model"].items():
        torch.testing.assert_close(x, plain.state_dict()[name], rtol=1e-9, atol=1e-9)


def check_a_rank_without_a_batch_of_its_own_is_given_the_structure_of_another():
    graph, batch = RaggedGraph(model_of()), share(2, 5, seeded(0))
    mine = [[UserDict(batch), (batch["ids"], 3)], []][dist.get_rank()]
    given = list(gz.until_all_end(mine, graph))
    assert len(given) == 2 and isinstance(given[0], UserDict) and given[1][1] == 3
    if dist.get_rank():
        assert given[0]["labels"].shape == (0, 5) and given[1][0].shape == (0, 5) and given[1][0].dtype == torch.int64
    assert list(gz.until_all_end([], graph)) == []


def check_an_error_of_a_loader_is_raised_on_all_ranks():
    def loader():
        yield share(2, 5, seeded(0))
        if dist.get_rank():
            raise ValueError("a broken row")

    graph = RaggedGraph(model_of())
    try:
        for batch in gz.until_all_end(loader(), graph):
            graph(**batch)
    except (gz.GraphZeroError, ValueError) as error:
        assert "a broken row" in str(error), error
    else:
        raise AssertionError("was not raised")
    graph.config.set_shapes(None)
    try:
        next(gz.until_all_end(loader(), graph))
    except gz.ConfigError as error:
        assert "batches without rows, which only config.set_shapes can pad" in str(error)
    else:
        raise AssertionError("was taken")


def check_a_rank_that_saves_where_the_other_calls_is_named_on_both():
    graph = RaggedGraph(model_of())
    given = share(2, 5, seeded(0))
    graph(**given)
    try:
        graph.full_state_dict() if dist.get_rank() else graph(**given)
    except gz.GraphZeroError as error:
        assert "called for different things" in str(error) and "gz.until_all_end" in str(error), error
    else:
        raise AssertionError("was taken")


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
