"""Modules prepared by torch's own ``parallelize_module`` train under a Graph as torch's DTensor runs them eagerly."""

import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import graphzero as gz
from graphzero.ir import value
from graphzero.sbp import S

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
import processes  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a set of processes makes all checks
D = torch.float64
STEPS, ROWS, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 4, 6, 24, 16, 4
CHECKS = (Path(__file__).stem,)


class Block(nn.Module):
    """A block of a Llama as its own code base writes it: sizes of heads are written, numbers of heads are not."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (part(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, blocks=1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


EDGES = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
COLUMNS, ROWWISE = ("q", "k", "v", "gate", "up"), ("o", "down")


def tensor_plan():
    """Columns and rows, the vocabulary of both embeddings split."""
    parts = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWWISE}
    return EDGES | {f"blocks.*.{name}": style for name, style in parts.items()}


def sequence_plan():
    """As ``tensor_plan``, and between the blocks' products activations are split along the sequence."""
    along, whole = Shard(1), Replicate()
    columns = {f"blocks.*.{name}": ColwiseParallel(input_layouts=along) for name in COLUMNS}
    rows = {f"blocks.*.{name}": RowwiseParallel(output_layouts=along) for name in ROWWISE}
    norms = {f"blocks.*.{name}_norm": SequenceParallel(use_local_output=True) for name in ("attention", "mlp")}
    return columns | rows | norms | {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=along),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=along, output_layouts=whole),
    }  # fmt: skip


def llama_plan():
    parts = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    parts |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
    return {f"model.layers.*.{name}": style for name, style in parts.items()} | {
        "model.embed_tokens": EDGES["embedding"],
        "lm_head": EDGES["head"],
    }


def prepared(make, plan, mesh):
    torch.manual_seed(0)
    return parallelize_module(make().to(D), mesh["tp"] if mesh.ndim > 1 else mesh, plan())


def batch(step):
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(model, ids, labels):
    scores = model(ids)
    return F.cross_entropy(getattr(scores, "logits", scores).flatten(0, 1), labels.flatten())


def adamw_graph(model, mesh, stage=0) -> TrainGraph:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return TrainGraph(model, loss_of, optimizer, placement=mesh, stage=stage)


def eager(model):
    """The steps as DTensor runs them: every rank along the other axes has the whole batch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def mesh_of_all():
    if dist.get_world_size() == 2:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def share(step, mesh):
    return batch(step) if mesh.ndim == 1 else tuple(x.chunk(2)[mesh.get_local_rank("dp")] for x in batch(step))


def whole(state):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


def compare(make, plan, stages):
    """One Graph, which is captured once, takes each step at another of the stages; without a data axis there is one."""
    mesh = mesh_of_all()
    stages = stages if mesh.ndim > 1 else (0,) * STEPS
    twin, model = prepared(make, plan, mesh), prepared(make, plan, mesh)
    held = dict(model.named_parameters())
    graph = adamw_graph(model, mesh)
    for step, (stage, loss) in enumerate(zip(stages, eager(twin), strict=True)):
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        where = f"stage {stage} of {stages[: step + 1]}: "
        torch.testing.assert_close(graph(*share(step, mesh)), loss, rtol=1e-8, atol=1e-8, msg=lambda m, w=where: w + m)
        if 3 not in stages[: step + 1]:
            assert all(held[name] is p for name, p in model.named_parameters()), "a parameter has lost its identity"
    ours, theirs = graph.full_state_dict()["modules"]["model"], whole(twin.state_dict())
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    return graph


def check_columns_and_rows_with_a_split_vocabulary():
    compare(Model, tensor_plan, (0, 1, 2, 3))


def check_sequence_parallel_norms():
    graph = compare(partial(Model, 2), sequence_plan, (3, 3, 0, 0))
    moved = [(c.phase, c.kind) for c in graph.plan.collectives if c.axis == "tp" and c.what_for == "other"]
    # after the embedding and each row of both blocks; after each norm, however many read it, and of the scores
    assert moved.count(("forward", "reduce_scatter")) == 5 and moved.count(("forward", "all_gather")) == 6, moved
    assert any(
        gz.sbp.of(node)[-1] is S(1) for node in graph.program.nodes if "rsqrt" in node.name and value.is_tensor(node)
    ), "no norm works on its part of the sequence"


def check_llama_of_the_transformers_package():
    compare(llama, llama_plan, (1, 1, 3, 3))


def check_the_module_still_runs_eagerly_afterwards():
    mesh = mesh_of_all()
    model = prepared(Model, tensor_plan, mesh)
    graph = adamw_graph(model, mesh)
    graph(*share(0, mesh))
    after = loss_of(model, *batch(1)).detach()
    torch.testing.assert_close(after, graph(*share(1, mesh)))


def check_checkpoints_go_from_a_parallelised_module_to_a_plain_one_and_back():
    mesh = mesh_of_all()
    graph, plain = adamw_graph(prepared(Model, tensor_plan, mesh), mesh), adamw_graph(Model().to(D), mesh)
    graph(*share(0, mesh))
    plain.load_state_dict(graph.full_state_dict())
    losses = [g(*share(1, mesh)) for g in (graph, plain)]
    torch.testing.assert_close(*losses)
    graph.load_state_dict(plain.state_dict())
    torch.testing.assert_close(*(g(*share(2, mesh)) for g in (graph, plain)))


# A Llama's layers on a mesh without a data axis are those of the other models.
CASES = [
    (ranks, name) for ranks in (2, 4) for name in processes.checks_in(*CHECKS) if ranks == 4 or "llama" not in name
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = {n: [name for ranks, name in CASES if ranks == n] for n in (2, 4)}
    return cache(lambda ranks: processes.run(CHECKS, ranks, tmp_path_factory.mktemp("world"), names[ranks]))


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_processes(results, ranks, name):
    processes.assert_passed(results(ranks), name, ranks)
