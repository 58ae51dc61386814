"""Every architecture of transformers' model mappings, tiny, with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.inputs import Batch, Losses
from zoo.tiny_configs import LEVELS, tiny
from zoo.trial import Skip, Trial, seed

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


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    """name -> family and how the trial is made."""
    from transformers.models.auto import modeling_auto

    def mapping(family: str) -> dict[str, Any]:
        name = "MODEL_MAPPING_NAMES" if family == "BASE" else f"MODEL_FOR_{family}_MAPPING_NAMES"
        return dict(getattr(modeling_auto, name, {}))

    found: dict[str, tuple[str, Callable[[], Trial]]] = {}
    seen: set[str] = set()

    def take(kind: str, classes: Any, family: str) -> None:
        name = classes if isinstance(classes, str) else classes[0]
        seen.add(kind)
        found.setdefault(
            f"transformers/{kind}/{name}",
            (f"transformers: {family.lower().replace('_', ' ')}", lambda: trial(kind, name)),
        )

    for family in FAMILIES:
        for kind, classes in mapping(family).items():
            if kind not in seen:
                take(kind, classes, family)
    for family in ALSO:
        for kind, classes in list(mapping(family).items())[:EACH]:
            take(kind, classes, family)
    return found


def trial(kind: str, name: str) -> Trial:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config_class = CONFIG_MAPPING[kind]
        model_class = getattr(transformers, name)
    except Exception as error:
        raise Skip(f"the package has no {kind}: {error}") from error
    first: Exception | None = None
    for level in range(len(LEVELS)):
        try:
            return fitted(model_class, name, tiny(config_class, level))
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def fitted(model_class: Any, name: str, config: Any) -> Trial:
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
    first: Exception | None = None
    for _ in range(TRIES):
        error = tried(module, batch)
        if error is None:
            return Trial(module, batch)
        first = first or error
        if not batch.fit(error) and not batch.words_only():
            break
    assert first is not None
    raise first


def tried(module: Losses, batch: Batch) -> Exception | None:
    """What the model says to the batch."""
    seed(0)
    drawn = {name: x.to(torch.get_default_dtype()) if x.is_floating_point() else x for name, x in batch(0).items()}
    try:
        module.train()(**drawn)
    except Exception as error:
        return error
    return None
