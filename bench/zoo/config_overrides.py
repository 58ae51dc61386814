"""Configurations of single architectures of transformers beside the general rules, by a pattern of the model type."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {
    "t5|longt5|switch_transformers|udop|pop2piano": {"decoder_start_token_id": 0},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "nemotron_h": {"n_groups": 1},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16, "hybrid_layer_ids": [1]},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "gemma3n|gemma3n_text": {"num_kv_shared_layers": 0},
    "llama4|emu3": {"pad_token_id": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "wav2vec2-bert|wav2vec2-conformer": {"vocab_size": 32},
    "granite_speech5_ctc|granite_speech5_encoder": {"context_size": 8},
    "esm": {"vocab_size": 32},
    "autoformer|informer|time_series_transformer": {"prediction_length": 4, "context_length": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "swin|donut-swin|maskformer-swin|swinv2": {"embed_dim": 16, "num_heads": [1, 1, 2, 2], "window_size": 4},
    "llava_next|llava_next_video|llava_onevision|granite4_vision": {"image_grid_pinpoints": [[64, 64]]},
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "hidden_size": 32}},
    "qwen2_5_vl|exaone4_5|hyperclovax_vision_v2": {
        "vision_config": {"window_size": 32, "fullatt_block_indexes": [1], "hidden_size": 32}
    },
    "glm46v|glm4v|glm_ocr|glmga": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    "glm4v_text|glm_ocr_text|glm_image_text": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "glm4v_moe_text": {"rope_parameters": {"mrope_section": [1, 1, 0]}},
    "blip-2|instructblip|instructblipvideo": {"image_token_index": 100},
    "dinov3_vit": {"pos_embed_shift": None, "pos_embed_jitter": None, "pos_embed_rescale": None},
    "bridgetower": {"num_attention_heads": 4},
}
