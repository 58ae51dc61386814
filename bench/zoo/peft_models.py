"""Every kind of adapter of peft over a small Llama."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from zoo.inputs import BATCH, LENGTH, Losses
from zoo.trial import Trial

ARGUMENTS: dict[str, Any] = {
    "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4,
    "token_dim": 32, "num_layers": 2, "num_attention_heads": 4, "num_transformer_submodules": 1,
    "encoder_hidden_size": 32, "adapter_len": 4, "adapter_layers": 1, "n_frequency": 16, "total_step": 100, "tinit": 10,
    "tfinal": 80, "token_indices": [1, 2, 3], "oft_block_size": 0, "block_size": 4, "num_vectors": 16,
    "vector_length": 8,
    "boft_block_size": 4, "group_size": 4,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "PREFIX_TUNING": {"prefix_projection": True},
    "OFT": {"r": 0, "oft_block_size": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"]},
    "C3A": {"block_size": 8},
}
LORA: dict[str, dict[str, Any]] = {
    "lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "lora-bias": {"bias": "all",
    "lora_bias": True},
    "lora-embedding": {"target_modules": ["q_proj", "embed_tokens"]}, "lora-all": {"target_modules": "all-linear"},
    "lora-head": {"modules_to_save": ["lm_head"]},
}  # fmt: skip


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    found: dict[str, tuple[str, Callable[[], Trial]]] = {}
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        name = str(getattr(kind, "value", kind))
        if name not in ("LORA", "XLORA", "CPT"):
            found[f"peft/{name.lower()}"] = (
                "peft",
                lambda config=config, name=name: trial(config, EXTRA.get(name, {})),
            )
    config = PEFT_TYPE_TO_CONFIG_MAPPING["LORA"]
    for name, extra in LORA.items():
        found[f"peft/{name}"] = ("peft", lambda config=config, extra=extra: trial(config, extra))
    return found


def trial(config_class: Any, extra: dict[str, Any]) -> Trial:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    taken = inspect.signature(config_class).parameters
    config = config_class(**{k: v for k, v in ARGUMENTS.items() if k in taken} | extra)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)

    def draw(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, 96, (BATCH, LENGTH))
        return {"input_ids": ids, "labels": ids}

    return Trial(Losses(adapted, {}), draw)
