"""Splits of weights that a configuration names, as transformers' do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from inside import check_ends
from torch import nn

import graphzero as gz
from graphzero.errors import SbpError
from graphzero.plugins.pretrained.planned_splits import planned_splits
from graphzero.sbp import B, S

GRID = gz.placement("cpu", [[0, 1], [2, 3]], names=("ep", "tp"), virtual=True)
TP = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.fused": "packed_colwise",
    "layers.*": "all_reduce",
}
EP = {"layers.*.experts.w": "grouped_gemm", "layers.*.experts": "ep_dispatch_experts"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.fused = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8, bias=False)
        self.experts = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, 3, 3))})


class Model(nn.Module):
    """A model after a head: both have the configuration, and paths in it are those of the model."""

    def __init__(self, **plans: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=TP, base_model_ep_plan=EP)
        vars(self.config).update(plans)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Block()])
        self.model.config = self.config  # type: ignore[assignment]


def test_styles_split_outputs_inputs_or_experts() -> None:
    assert planned_splits(Model(), GRID) == {
        "model.layers.0.up.weight": (B, S(0)),
        "model.layers.0.up.bias": (B, S(0)),
        "model.layers.0.down.weight": (B, S(1)),
        "model.layers.0.fused.weight": (B, S(0, 2)),
        "model.layers.0.experts.w": (S(0), B),
    }


def test_a_module_is_placed_by_its_plans() -> None:
    model = gz.to_global(Model(), GRID, sbp="auto")
    block: Any = model.model.layers[0]
    assert gz.sbp.of(block.experts["w"]) == (S(0), B) and gz.sbp.of(block.down.bias) == (B, B)


LINE = gz.placement("cpu", [0, 1], names=("dp",), virtual=True)
WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "no axis": (Model(), LINE, "auto", r"of the axes dp none is called tp or ep.*Name an axis so"),
    "no plan": (nn.Linear(2, 2), GRID, "auto", r"no configuration in this Linear has a base_model_ep_plan.*Give"),
    "style": (
        Model(base_model_tp_plan={"layers.*.up": "diagonal"}),
        GRID,
        "auto",
        r"has style 'diagonal' for lay.*Give",
    ),
    "tensor": (torch.ones(2), GRID, "auto", r'of a Tensor with sbp=.auto.*"auto" is for a module'),
    "word": (Model(), GRID, "automatic", r"needs sbp= with one SBP per axis .*not 'automatic'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_has_no_plan_is_refused_with_the_next_step(case: str) -> None:
    module, placement, sbp, message = WRONG[case]
    with pytest.raises(SbpError, match=rf"(?s){message}"):
        gz.to_global(module, placement, sbp)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Qwen3": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8,
                                 "output_router_logits": True}, ("ep", "tp")),
    "DeepSeek": ("DeepseekV3Config", {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
        "moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8}, ("ep", "tp")),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ("ep",)),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "head_dim": 8, "router_jitter_noise": 0.0}, ("ep", "tp")),
}  # fmt: skip


def model_of(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, sizes, _ = MODELS[name]
    config = getattr(transformers, kind)(**SIZES, **(sizes | more))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="grouped_mm", attn_implementation="eager"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_mixtures_of_transformers_equal_plain_pytorch(name: str) -> None:
    """Losses, balance losses in them, gradients and a step of AdamW, in float64 on the whole batch."""
    model, axes = model_of(name), MODELS[name][2]
    place = gz.placement("cpu", [[0, 1], [2, 3]] if len(axes) == 2 else [0, 1], names=axes, virtual=True)
    gz.to_global(model, place, sbp="auto")
    graph = TrainGraph(model, loss_of, torch.optim.AdamW(model.parameters()), placement=place)
    ids = torch.randint(0, 32, (4, 8))
    report = check_ends(graph, ids, dtype=torch.float64, rtol=1e-9)
    assert report, str(report)
    gathers = [c for c in graph.plan.collectives if c.kind == "all_gather" and c.axis == "ep" and c.bytes > 4096]
    assert not gathers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("Qwen3", 2), ("gpt-oss", 4)])
def test_mixtures_of_transformers_in_micro_batches_equal_plain_pytorch(name: str, count: int) -> None:
    """Each micro-batch of each data rank sorts its own tokens; a balance loss would be that of a micro-batch.

    Those of DeepSeek and Mixtral exchange rows: ``test_exchanged_experts``.
    """
    model = model_of(name, output_router_logits=False)
    optimizer = torch.optim.AdamW(model.parameters())
    graph = TrainGraph(model, loss_of, optimizer, micro_batches=count, stage=2)
    report = check_ends(graph, torch.randint(0, 32, (8, 8)), dtype=torch.float64, rtol=1e-9)
    assert report, str(report)
    assert all(c.what_for in ("parameters", "gradients") or c.bytes < 64 for c in graph.plan.collectives)
