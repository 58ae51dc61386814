"""What single architectures of transformers need beside the general rules, by a pattern of the model type."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {
    "t5|longt5|switch_transformers|udop": {"decoder_start_token_id": 0},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "gemma3n|gemma3n_text": {"num_kv_shared_layers": 0},
    "bamba|falcon_h1|granitemoehybrid": {},
    "llama4|emu3": {"pad_token_id": 0},
}

# What a configuration's own default lacks, to be made at all.
STARTS: dict[str, dict[str, Any]] = {}
