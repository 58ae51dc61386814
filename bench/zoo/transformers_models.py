"""Every architecture of transformers' model mappings, tiny, with its loss; every adapter of peft over one of them."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import islice
from typing import Any

import torch
from models import build_transformer

from zoo.inputs import BATCH, LENGTH, Batch, Losses
from zoo.tiny_configs import LEVELS, shrink_config
from zoo.trial import Skip, Trial, ZooCase, judge, seed, try_export

FAMILIES = (  # an architecture is taken with the first head that it has here
    "IMAGE_TEXT_TO_TEXT", "TEXT_TO_WAVEFORM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM",
    "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "TIME_SERIES_PREDICTION", "MULTIMODAL_LM",
    "TEXT_TO_SPECTROGRAM", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "MASK_GENERATION",
    "RNNT", "TDT", "DECISION", "IMAGE_TO_IMAGE", "IMAGE_MATTING", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION",
    "POSE_ESTIMATION", "RETRIEVAL", "PRETRAINING", "TEXT_ENCODING", "BASE",
)  # fmt: skip
ALSO = (  # heads that many architectures share: a few of each
    "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION",
    "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR", "BACKBONE",
    "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING", "TEXT_RECOGNITION",
    "TABLE_RECOGNITION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION", "MASKED_LM", "PRETRAINING",
)  # fmt: skip
EACH = 8
TRIES = 6
LARGEST = 20_000_000  # parameters


def trial_case(family: str, *how: Any) -> ZooCase:
    """A case of a family.  how: a function that makes the trial, and its arguments."""
    build = partial(*how)
    return ZooCase(family, partial(judge, build), partial(try_export, build))


def list_architectures() -> dict[str, ZooCase]:
    from transformers.models.auto import modeling_auto

    cases: dict[str, ZooCase] = {}
    kinds: set[str] = set()
    for family, most in (*((family, None) for family in FAMILIES), *((family, EACH) for family in ALSO)):
        mapping = "MODEL_MAPPING_NAMES" if family == "BASE" else f"MODEL_FOR_{family}_MAPPING_NAMES"
        for kind, classes in islice(getattr(modeling_auto, mapping, {}).items(), most):
            if most is not None or kind not in kinds:
                name = classes if isinstance(classes, str) else classes[0]
                about = f"transformers: {family.lower().replace('_', ' ')}"
                kinds.add(kind)
                cases.setdefault(f"transformers/{kind}/{name}", trial_case(about, build_trial, kind, name))
    return cases


def build_trial(kind: str, name: str) -> Trial:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[kind]
        model_class = getattr(transformers, name)
    except Exception as error:
        raise Skip(f"the package has no {kind}: {error}") from error
    errors = []
    for level in range(len(LEVELS)):
        try:
            return fit_trial(model_class, name, shrink_config(config_class, level))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def fit_trial(model_class: Any, name: str, config: Any) -> Trial:
    """The model of this configuration, with inputs that it takes."""
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        try:
            size = model_class(config).num_parameters()
        except ValueError as error:
            if "scaled_dot_product" not in str(error):
                raise
            config._attn_implementation = "eager"
            size = model_class(config).num_parameters()
    if size > LARGEST:
        raise Skip(f"{size / 1e6:.0f} million parameters")
    model = model_class(config)
    batch = Batch(name, model, config)
    module = Losses(model, batch.constants)
    errors = []
    for _ in range(TRIES):
        seed(0)
        inputs = {name: x.to(torch.get_default_dtype()) if x.is_floating_point() else x for name, x in batch(0).items()}
        try:
            module.train()(**inputs)
            return Trial(module, batch)
        except Exception as error:
            errors.append(error)
        if not batch.fit(errors[-1]) and not batch.drop_images_and_sounds():
            break
    raise errors[0]


# ---- adapters of peft

ARGUMENTS: dict[str, Any] = {
    "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4,
    "token_dim": 32, "num_layers": 2, "num_attention_heads": 4, "num_transformer_submodules": 1,
    "encoder_hidden_size": 32, "adapter_len": 4, "adapter_layers": 1, "n_frequency": 16, "total_step": 100, "tinit": 10,
    "tfinal": 80, "token_indices": [1, 2, 3], "oft_block_size": 0, "block_size": 4, "num_vectors": 16,
    "vector_length": 8,
    "boft_block_size": 4, "group_size": 4,
}  # fmt: skip
LEFT_OUT = ("LORA", "XLORA", "CPT")
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


def list_adapters() -> dict[str, ZooCase]:
    """Every kind of adapter of peft over a small Llama."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS

    names = {str(getattr(kind, "value", kind)): config for kind, config in CONFIGS.items()}
    adapters = {name.lower(): (config, EXTRA.get(name, {})) for name, config in names.items() if name not in LEFT_OUT}
    adapters |= {name: (CONFIGS["LORA"], extra) for name, extra in LORA.items()}
    return {f"peft/{name}": trial_case("peft", build_adapter, *facts) for name, facts in adapters.items()}


def build_adapter(config_class: Any, extra: dict[str, Any]) -> Trial:
    import peft

    taken = inspect.signature(config_class).parameters
    config = config_class(**{k: v for k, v in ARGUMENTS.items() if k in taken} | extra)
    module = build_transformer(
        "LlamaForCausalLM", lambda model: Losses(peft.get_peft_model(model, config), {}),
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip

    def draw(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, 96, (BATCH, LENGTH))
        return {"input_ids": ids, "labels": ids}

    return Trial(module, draw)
