"""Tiny configurations of transformers' architectures, made from each configuration's own defaults.

A configuration is its default as a dict, with every number that makes a model large made small by its name:
widths are all divided by one factor, so that sums, products and lists of widths go on fitting together; layers are cut
to a few, and kinds of layers are all kept.  What drops at random is set to 0.  ``OVERRIDES`` has what an architecture
needs beside that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

WIDTH, LAYERS, HEAD, VOCABULARY, IMAGE, POSITIONS = 32, 2, 8, 128, 32, 64
PLAIN_IDS = 96  # drawn tokens are below, and special ones from here on

Small = Callable[[int, float], int]


def at_most(limit: int) -> Small:
    return lambda value, factor: min(value, limit)


def width(value: int, factor: float) -> int:
    """``value`` divided by the factor, to a multiple of 8."""
    return value if value <= 8 else max(8, 8 * round(value / factor / 8))


def same(value: int, factor: float) -> int:
    return value


Rules = tuple[tuple[str, Small], ...]  # patterns of the whole name of a number; the first that matches counts

STAYS: Rules = (
    (r"((num|in|input|audio|mask_input|out)_)?channels|in_chans", same),
    (r"mel_dim|input_dim|type_vocab_size|num_feat_extract_layers|.*conv_kernel\w*|max_2d_position_embeddings", same),
)
WORDS: Rules = ((r".*vocab_size|vocab_size_per_layer_input|n_vocab|codebook_size|num_embeddings", at_most(VOCABULARY)),)
HEADS: Rules = (
    (r"(\w*_)?(num_key_value_heads|num_kv_heads|n_kv_heads?|kv_heads|multi_query_group_num|num_key_value_groups)",
     at_most(2)),
    (r"(\w*_)?((num|n)_)?(attention_|query_|self_attention_)?heads?(_per_stage)?|\w*n_heads?", at_most(4)),
    (r"(\w*_)?(head_dim|rotary_dim|dim_head|kv_channels|head_size|qk_dim)", at_most(HEAD)),
)  # fmt: skip
LAYERED: Rules = (
    (r"(\w*_)?(layers|n_layers?|depths?|num_blocks|n_blocks)|num_\w*(layers|blocks|stacks)", at_most(LAYERS)),
)
EXPERTS: Rules = (
    (r"(moe_)?(num|n)_((local|routed|moe)_)?experts", at_most(4)),
    (r"n_group|num_expert_groups?|topk_group|top_k_groups?", at_most(1)),
    (r"\w*(experts_per_tok(en)?|top_?k|topk)|moe_k", at_most(2)),
)
LENGTHS: Rules = (
    (r"(\w*_)?(image|crop|input|img)_size", at_most(IMAGE)),
    (r"patch_size", at_most(8)),
    (r"(\w*_)?(max_\w*positions?(_embeddings)?|n_positions|n_ctx|context_length|max_seq_len\w*|seq_length|seqlen"
     r"|sequence_length)", at_most(POSITIONS)),
    (r"\w*window(_size)?|attention_window|local_attention|block_size|chunk_size\w*", at_most(8)),
    (r"base_channels", at_most(32)),
    (r"num_queries\w*|num_query_tokens|num_latents", at_most(8)),
)  # fmt: skip
WIDTHS: Rules = (
    (r"(\w*_)?(hidden|embed\w*|embedding|intermediate|ffn?|mlp|inner|proj\w*|model|projector|bottleneck)"
     r"_(size|dim|dims|width|sizes)", width),
    (r"d_(model|ff|inner|kv)|n_(embd|inner)|ffn_dim|dim|width|hidden_sizes?|embed_dims?|embed_dim_per_stage", width),
    (r"\w*_(width|channels|dim|rank|hidden_size\w*|feature_size|channel_list)|n_embed|num_filters|lora_rank\w*", width),
)  # fmt: skip
LEVELS = (
    STAYS + WORDS + HEADS + LAYERED + EXPERTS + LENGTHS + WIDTHS,
    STAYS + WORDS + LAYERED + EXPERTS + LENGTHS,
    WORDS + LAYERED + EXPERTS,
)
_DROP = r"drop|jitter|^mask_(time|feature)_prob$|noise|mask_ratio"
_IDS = r"(token_ids?|token_index|_start_id|_end_id|_token|_pad_id|index_?id|_ids?)$"
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "embedding_size", "width")
_WIDTH_LISTS = (*_WIDTHS, "hidden_sizes", "embed_dims", "embedding_dims", "encoder_channels", "neck_hidden_sizes")
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_LEFT_OUT = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "id2label", "label2id")
_AS_THEY_ARE = ("rope_parameters", "rope_scaling", "attribute_map")


# Beside the general rules, by a pattern of the model type.
OVERRIDES: dict[str, dict[str, Any]] = {
    "t5|longt5|switch_transformers|udop|pop2piano": {"decoder_start_token_id": 0},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"n_groups": 1},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 16, "hybrid_layer_ids": [1]},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "gemma3n|gemma3n_text": {"num_kv_shared_layers": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "wav2vec2-bert|wav2vec2-conformer": {"vocab_size": 32},
    "granite_speech5_ctc|granite_speech5_encoder": {"context_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "glm46v|glm4v|glm_ocr|glmga": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    "glm4v_text|glm_ocr_text|glm_image_text": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "glm4v_moe_text": {"rope_parameters": {"mrope_section": [1, 1, 0]}},
    "hyperclovax_vision_v2": {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1], "hidden_size": 32}},
    "blip-2|instructblip|instructblipvideo": {"image_token_index": 100},
    "dinov3_vit": {"pos_embed_rescale": None},
}


def shrink_config(config_class: Any, level: int = 0) -> Any:
    """The architecture's configuration, small enough to train in a second on one core.

    level: 0 is smallest; 1 leaves widths and heads as they are, which not every architecture derives from one another;
        2 leaves sizes of images and windows too.
    """
    kind = config_class.model_type
    shrunk = _shrink_values(config_class().to_dict(), {}, LEVELS[level])
    for pattern, changes in OVERRIDES.items():
        if re.fullmatch(pattern, kind):
            _merge(shrunk, changes)
    return config_class.from_dict(shrunk)


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, change in changes.items():
        if isinstance(change, Mapping) and isinstance(values.get(key), dict):
            _merge(values[key], change)
        else:
            values[key] = change


def _shrink_values(values: Mapping[Any, Any], ids: dict[int, int], using: Rules) -> dict[str, Any]:
    """``values`` made small; ``ids`` maps special tokens of the default to those here, alike in all parts."""
    old = {str(key): value for key, value in values.items() if key not in _LEFT_OUT}
    factor = _find_factor(old)
    new = {key: _shrink_value(key, value, factor, ids, using) for key, value in old.items()}
    _cut_layer_lists(old, new)
    _fit_numbers(old, new)
    return new


def _find_factor(values: Mapping[str, Any]) -> float:
    widths = [values[key] for key in _WIDTHS if isinstance(values.get(key), int) and values[key] > WIDTH]
    if widths:
        return float(widths[0]) / WIDTH
    lists = [values[key] for key in _WIDTH_LISTS if isinstance(values.get(key), list | tuple) and values[key]]
    return next((sizes[0] / 16 for sizes in lists if isinstance(sizes[0], int) and sizes[0] > 16), 16)


def _shrink_value(key: str, value: Any, factor: float, ids: dict[int, int], using: Rules) -> Any:
    if isinstance(value, dict):
        if key.endswith("per_layer_config"):
            return {str(LAYERS - 1): next(iter(value.values()))} if value else value
        return value if key in _AS_THEY_ARE else _shrink_values(value, ids, using)
    if isinstance(value, list | tuple):
        return _shrink_list(key, list(value), factor, ids, using)
    if isinstance(value, bool):
        return value and key not in ("use_cache", "apply_spec_augment")
    if isinstance(value, int | float) and re.search(_DROP, key):
        return type(value)(0) if value <= 1 else value
    return _shrink_number(key, value, factor, ids, using) if isinstance(value, int) else value


def _shrink_list(key: str, values: list[Any], factor: float, ids: dict[int, int], using: Rules) -> list[Any]:
    if all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        if using is LEVELS[0] and re.fullmatch(HEADS[1][0], key):
            return [min(x, 2) for x in values]
        if re.fullmatch(LAYERED[0][0], key):
            return [1 for _ in values]
    return [_shrink_value(key, x, factor, ids, using) for x in values]


def _shrink_number(key: str, value: int, factor: float, ids: dict[int, int], using: Rules) -> int:
    if value < 0:
        return value
    if re.search(_IDS, key):
        return value if value < PLAIN_IDS else ids.setdefault(value, PLAIN_IDS + len(ids))
    small = next((small for pattern, small in using if re.fullmatch(pattern, key)), same)
    return small(value, factor)


def _cut_layer_lists(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """Lists with an entry for each layer: every kind stays, in its first order, and there are layers enough for it."""
    count = next((key for key in _COUNTS if isinstance(old.get(key), int) and old[key] > LAYERS), None)
    if count is None:
        return
    lists = [key for key, x in old.items() if isinstance(x, list | tuple) and len(x) == old[count]]
    kinds = {key: {str(x): x for x in reversed(new[key])} for key in lists}
    orders = {key: list(dict.fromkeys(map(str, new[key]))) for key in lists}
    new[count] = max([LAYERS, *(min(len(order), 4) for order in orders.values())])
    for key in lists:
        new[key] = [kinds[key][orders[key][i % len(orders[key])]] for i in range(new[count])]


def _fit_numbers(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    """Make numbers agree that have to fit each other."""
    heads = new.get("num_attention_heads")
    if isinstance(heads, int):
        is_same = old.get("num_key_value_heads") == old.get("num_attention_heads")
        if is_same or new.get("num_key_value_heads", 0) is None:
            new["num_key_value_heads"] = heads
        if new.get("head_dim", 0) is None and isinstance(new.get("hidden_size"), int):
            new["head_dim"] = new["hidden_size"] // heads
    if {"qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= new.keys():
        new["qk_head_dim"] = new["qk_nope_head_dim"] + new["qk_rope_head_dim"]
    for rope in ("rope_parameters", "rope_scaling"):
        _fit_sections(new.get(rope), new)
    if isinstance(new.get("d_head"), int) and isinstance(new.get("n_head"), int):
        new["d_head"] = new["d_model"] // new["n_head"]
    if "mamba_d_head" in new:
        new |= {"mamba_n_heads": 4, "mamba_d_head": 2 * new["hidden_size"] // 4, "mamba_expand": 2}
    if isinstance(new.get("vision_feature_layer"), list):
        new["vision_feature_layer"] = [-1 - i for i in range(len(new["vision_feature_layer"]))]
    if "mm_tokens_per_image" in new:
        new["mm_tokens_per_image"] = 4
    if isinstance(old.get("out_features"), list | tuple):
        _fit_stages(len(old["out_features"]), new)
    _fit_parts(new)


def _fit_stages(outputs: int, new: dict[str, Any]) -> None:
    """A backbone that hands out layers, each a stage, hands out its last ones."""
    count = next((key for key in _COUNTS if isinstance(new.get(key), int)), None)
    if count is not None and "depths" not in new:
        new[count] = max(new[count], outputs)
        new["out_indices"] = list(range(new[count] - outputs + 1, new[count] + 1))
        new.pop("out_features", None)
        new.pop("stage_names", None)


def _fit_sections(rope: Any, new: Mapping[str, Any]) -> None:
    """The pairs of a head's dims that turn by time, height and width are all that there are."""
    if not isinstance(rope, dict):
        return
    for part in rope.values():
        _fit_sections(part, new)
    if "mrope_section" in rope:
        head = new.get("head_dim") or new["hidden_size"] // new["num_attention_heads"]
        pairs = int(head * (rope.get("partial_rotary_factor") or new.get("partial_rotary_factor") or 1)) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def _fit_parts(new: dict[str, Any]) -> None:
    """Make what one part's configuration says of another's agree with it."""
    text = new.get("text_config")
    if not isinstance(text, dict) or not isinstance(text.get("hidden_size"), int):
        return
    for part in new.values():
        if isinstance(part, dict) and part is not text:
            said = ("out_hidden_size", "text_hidden_size", "text_dim", "llm_hidden_size")
            part.update({key: text["hidden_size"] for key in said if key in part})
