"""Batches for transformers' models, by the names and meanings of their forwards' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_shrink import PLAIN_IDS

BATCH, LENGTH, FRAMES = 4, 16, 4
Drawn = Callable[[], Tensor]


class Losses(nn.Module):
    """A model of transformers and its own loss, or where it has none a smooth mean over all that it returns."""

    def __init__(self, model: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.constants = constants

    def made(self) -> dict[str, Any]:
        """The inputs that are alike for every batch: numbers in lists as tensors."""
        return {
            name: torch.tensor(value) if isinstance(value, list) else value for name, value in self.constants.items()
        }

    def forward(self, **batch: Tensor) -> Tensor:
        output = self.model(**batch, **self.made())
        loss = getattr(output, "loss", None)
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else smooth(output)


def smooth(output: Any) -> Tensor:
    """The sum of mean sines of all floating tensors that hang on a parameter."""
    leaves = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    parts = [
        x.sin().mean()
        for x in leaves
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad and x.numel()
    ]
    if not parts:
        raise TypeError("nothing that the model returns hangs on a parameter")
    return torch.stack(parts).sum()


def tokens(*shape: int, high: int = PLAIN_IDS, low: int = 8) -> Drawn:
    return lambda: torch.randint(min(low, high - 1), high, shape)


def normal(*shape: int) -> Drawn:
    return lambda: torch.randn(shape)


_ONE_CLASS = (
    "SequenceClassification", "ImageClassification", "VideoClassification", "MultipleChoice", "NextSentencePrediction",
    "AudioClassification", "XVector",
)  # fmt: skip


def labels_of(name: str, config: Any, length: int) -> Drawn | None:
    """What a head of this name is trained on."""
    classes = max(int(getattr(config, "num_labels", 2) or 2), 2)
    if name.endswith(_ONE_CLASS):
        return tokens(BATCH, high=classes, low=0)
    if name.endswith("TokenClassification"):
        return tokens(BATCH, length, high=classes, low=0)
    if name.endswith("CTC"):
        return tokens(BATCH, 3, high=PLAIN_IDS, low=8)
    if name.endswith(
        (
            "CausalLM",
            "LMHeadModel",
            "ConditionalGeneration",
            "MaskedLM",
            "ForPreTraining",
            "LMHead",
            "Seq2Seq",
            "VisionEncoderDecoderModel",
        )
    ):
        return tokens(BATCH, length)
    return None


def filled(ids: Tensor, count: int, token: int) -> Tensor:
    """``ids`` [b, t] with ``token`` at the ``count`` places behind the first."""
    ids[:, 1 : 1 + count] = token
    return ids


class Batch:
    """The inputs of one model: what is drawn anew for every step, and what stays."""

    def __init__(self, name: str, model: nn.Module, config: Any) -> None:
        self.name, self.config = name, config
        self.arguments = inspect.signature(model.forward).parameters
        self.drawn: dict[str, Drawn] = {}
        self.constants: dict[str, Any] = {"return_dict": True} if "return_dict" in self.arguments else {}
        self.text, self.vision, self.audio = parts(config)
        self.placed = 0
        self._text()
        self._images()
        self._audio()

    def __call__(self, step: int) -> dict[str, Tensor]:
        del step
        return {name: draw() for name, draw in self.drawn.items()}

    def _text(self) -> None:
        if "input_ids" not in self.arguments:
            if "decoder_input_ids" in self.arguments:
                self.drawn["decoder_input_ids"] = tokens(BATCH, LENGTH, high=self.words())
            return
        shape = (BATCH, 2, LENGTH) if self.name.endswith("MultipleChoice") else (BATCH, LENGTH)
        self.drawn["input_ids"] = tokens(*shape, high=self.words())
        labels = labels_of(self.name, self.config, LENGTH)
        if "labels" in self.arguments and labels is not None:
            self.drawn["labels"] = labels
        elif "decoder_input_ids" in self.arguments:
            self.drawn["decoder_input_ids"] = tokens(BATCH, LENGTH, high=self.words())
        for position in ("start_positions", "end_positions"):
            if position in self.arguments:
                self.drawn[position] = tokens(BATCH, high=LENGTH, low=0)
        if "bbox" in self.arguments:
            self.drawn["bbox"] = lambda: torch.randint(0, 32, (BATCH, LENGTH, 4)).sort(-1).values

    def place_images(self, features: int) -> bool:
        """Let each row of words have its share of the places where images go; whether it can."""
        names = ("image_token_id", "image_token_index", "video_token_id", "media_placeholder_token_id", "image_token")
        image = next(
            (getattr(self.config, name) for name in names if isinstance(getattr(self.config, name, None), int)), None
        )
        if image is None or "input_ids" not in self.drawn or features % BATCH or self.placed:
            return False
        self.placed = features // BATCH
        length = max(LENGTH, self.placed + 8)
        for name in ("input_ids", "labels"):
            if name in self.drawn:
                draw = tokens(BATCH, length, high=self.words())
                self.drawn[name] = (
                    (lambda draw=draw: filled(draw(), self.placed, image)) if name == "input_ids" else draw
                )
        return True

    def words(self) -> int:
        return min(PLAIN_IDS, int(getattr(self.text, "vocab_size", PLAIN_IDS) or PLAIN_IDS))

    def _images(self) -> None:
        if "image_grid_thw" in self.arguments and "pixel_values" in self.arguments:
            self._patches()
        for argument in ("pixel_values", "pixel_values_videos"):
            if (
                argument in self.drawn
                or argument not in self.arguments
                or (argument != "pixel_values" and "pixel_values" in self.arguments)
            ):
                continue
            self.drawn[argument] = normal(*self.image_shape(argument))
            labels = labels_of(self.name, self.config, LENGTH)
            if "labels" in self.arguments and labels is not None and "labels" not in self.drawn:
                self.drawn["labels"] = labels
        if "image_sizes" in self.arguments and "pixel_values" in self.drawn:
            self.constants["image_sizes"] = [list(self.image_shape("pixel_values")[-2:])] * BATCH

    def _patches(self) -> None:
        """Images as rows of patches, and how many there are each way."""
        merge = int(getattr(self.vision, "spatial_merge_size", 2) or 2)
        channels = int(
            getattr(self.vision, "in_channels", 0)
            or getattr(self.vision, "in_chans", 0)
            or getattr(self.vision, "num_channels", 3)
        )
        patch = int(getattr(self.vision, "patch_size", 8))
        frames = int(getattr(self.vision, "temporal_patch_size", 1) or 1)
        across = 2 * merge
        self.constants["image_grid_thw"] = [[1, across, across]] * BATCH
        self.drawn["pixel_values"] = normal(BATCH * across * across, channels * frames * patch * patch)

    def image_shape(self, argument: str) -> tuple[int, ...]:
        config = self.vision
        size = next(
            (
                getattr(config, k)
                for k in ("image_size", "img_size", "input_size", "crop_size", "pretrain_image_size")
                if getattr(config, k, None)
            ),
            64,
        )
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = next(
            (
                getattr(config, k)
                for k in ("num_channels", "in_channels", "in_chans", "input_channels")
                if isinstance(getattr(config, k, None), int)
            ),
            3,
        )
        if "video" in self.name.lower() or argument == "pixel_values_videos" or hasattr(config, "num_frames"):
            return (BATCH, int(getattr(config, "num_frames", FRAMES)), channels, height, width)
        return (BATCH, channels, height, width)

    def _audio(self) -> None:
        if "input_features" in self.arguments:
            bins = next(
                (
                    getattr(self.audio, k)
                    for k in (
                        "num_mel_bins",
                        "feature_size",
                        "n_mels",
                        "input_feat_per_channel",
                        "mel_bins",
                        "input_dim",
                        "feature_projection_input_dim",
                    )
                    if isinstance(getattr(self.audio, k, None), int)
                ),
                80,
            )
            positions = getattr(self.audio, "max_source_positions", 32)
            first = getattr(self.audio, "model_type", "") in (
                "whisper",
                "voxtral_encoder",
                "qwen2_audio_encoder",
                "moonshine",
            )
            self.drawn["input_features"] = normal(BATCH, bins, 2 * positions) if first else normal(BATCH, 32, bins)
        elif "input_values" in self.arguments:
            self.drawn["input_values"] = normal(BATCH, 1200)
        labels = labels_of(self.name, self.config, LENGTH)
        if (
            ("input_features" in self.drawn or "input_values" in self.drawn)
            and "labels" in self.arguments
            and labels
            and "labels" not in self.drawn
        ):
            self.drawn["labels"] = labels


def parts(config: Any) -> tuple[Any, Any, Any]:
    """The configurations of text, images and sound within one."""

    def first(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), config)

    text = first("text_config", "language_config", "decoder", "llm_config")
    return (
        text,
        first("vision_config", "encoder", "backbone_config"),
        first("audio_config", "encoder", "audio_encoder", "speech_config"),
    )
