"""Batches for transformers' models, by the names of their forwards' arguments and by what a first try says of them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.tiny_configs import PLAIN_IDS

BATCH, LENGTH, FRAMES, SAMPLES = 4, 16, 4, 1920


@dataclass(frozen=True)
class Draw:
    """A tensor that is drawn again for every step: whole numbers from ``low`` up to ``high``, or normal numbers.

    marked: a number that stands at the ``count`` places after the first of each row.
    """

    shape: tuple[int, ...]
    low: int = 0
    high: int | None = None
    marked: int | None = None
    count: int = 0

    def __call__(self) -> Tensor:
        if self.high is None:
            return torch.randn(self.shape)
        drawn = torch.randint(min(self.low, self.high - 1), self.high, self.shape)
        if self.marked is not None:
            drawn[:, 1 : 1 + self.count] = self.marked
        return drawn


class Losses(nn.Module):
    """A model of transformers and its own loss, or where it has none a smooth mean over all that it returns."""

    def __init__(self, model: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.constants = constants

    def forward(self, **batch: Tensor) -> Tensor:
        constants = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in self.constants.items()}
        output = self.model(**batch, **constants)
        loss = getattr(output, "loss", None)
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else smooth_loss(output)


def smooth_loss(output: Any) -> Tensor:
    """The sum of mean sines of all floating tensors that depend on a parameter."""
    leaves = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad and x.numel()]
    if not tensors:
        raise TypeError("nothing that the model returns depends on a parameter")
    return torch.stack([x.sin().mean() for x in tensors]).sum()


_ONE_CLASS = (
    "SequenceClassification", "ImageClassification", "VideoClassification", "MultipleChoice", "NextSentencePrediction",
    "AudioClassification", "XVector",
)  # fmt: skip
_WORDS = (
    "CausalLM", "LMHeadModel", "ConditionalGeneration", "MaskedLM", "ForPreTraining", "LMHead", "Seq2Seq",
    "VisionEncoderDecoderModel", "ReformerModelWithLMHead",
)  # fmt: skip
_SIZES = ("image_size", "img_size", "input_size", "crop_size", "pretrain_image_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans", "input_channels")
_BINS = ("num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", "mel_bins", "input_dim",
         "feature_projection_input_dim", "num_mels")  # fmt: skip
_SOUNDS = ("audio_config", "audio_encoder_config", "encoder_config", "encoder", "audio_encoder", "speech_config")
_MARKS = ("image_token_id", "image_token_index", "video_token_id", "media_placeholder_token_id", "audio_token_id",
          "audio_token_index", "speech_token_id")  # fmt: skip


class Batch:
    """The inputs of one model: what is drawn again for every step, and what stays."""

    def __init__(self, name: str, model: nn.Module, config: Any) -> None:
        self.name, self.config = name, config
        self.arguments = inspect.signature(model.forward).parameters
        self.drawn: dict[str, Draw] = {}
        self.constants: dict[str, Any] = {"return_dict": True} if "return_dict" in self.arguments else {}
        self.text = find_part(config, "text_config", "language_config", "decoder", "llm_config")
        self.vision = find_part(config, "vision_config", "encoder", "backbone_config")
        self.audio = find_part(config, *_SOUNDS)
        self._add_text()
        self._add_images()
        self._add_sound()
        self._add_targets()

    def __call__(self, step: int) -> dict[str, Tensor]:
        del step
        batch = {name: draw() for name, draw in self.drawn.items()}
        if "mm_token_type_ids" in self.arguments and "input_ids" in batch:
            marked = self.drawn["input_ids"].marked
            batch["mm_token_type_ids"] = (batch["input_ids"] == (-1 if marked is None else marked)).long()
        return batch

    def draw_words(self, *shape: int) -> Draw:
        vocabulary = getattr(self.text, "vocab_size", None)
        return Draw(shape, 8, min(PLAIN_IDS, vocabulary) if isinstance(vocabulary, int) else PLAIN_IDS)

    def _add_text(self) -> None:
        if "input_ids" in self.arguments:
            choices = (2,) if self.name.endswith("MultipleChoice") else ()
            self.drawn["input_ids"] = self.draw_words(BATCH, *choices, LENGTH)
        if "bbox" in self.arguments:
            self.drawn["bbox"] = Draw((BATCH, LENGTH, 4), 0, 1)

    def _add_targets(self) -> None:
        if "start_positions" in self.arguments:
            self.drawn |= {name: Draw((BATCH,), 0, LENGTH) for name in ("start_positions", "end_positions")}
        labels = self._draw_labels()
        if "labels" in self.arguments and labels is not None:
            self.drawn["labels"] = labels
        elif "decoder_input_ids" in self.arguments:
            self.drawn["decoder_input_ids"] = self.draw_words(BATCH, LENGTH)

    def _draw_labels(self) -> Draw | None:
        classes = max(int(getattr(self.config, "num_labels", 2) or 2), 2)
        if self.name.endswith(_ONE_CLASS):
            return Draw((BATCH,), 0, classes)
        if self.name.endswith("TokenClassification"):
            return Draw((BATCH, LENGTH), 0, classes)
        if self.name.endswith("CTC"):
            return self.draw_words(BATCH, 3)
        return self.draw_words(BATCH, LENGTH) if self.name.endswith(_WORDS) else None

    def _add_images(self) -> None:
        if getattr(self.config, "vision_config", self) is None:
            return
        for argument in ("image_grid_thw", "grid_thw"):
            rows = "pixel_values" if "pixel_values" in self.arguments else "hidden_states"
            if argument in self.arguments and rows in self.arguments and rows not in self.drawn:
                self.add_patches(argument, rows)
        for argument in ("pixel_values", "pixel_values_videos"):
            both = argument == "pixel_values_videos" and "pixel_values" in self.arguments
            if argument in self.arguments and argument not in self.drawn and not both:
                self.drawn[argument] = Draw(self.image_shape(argument))

    def add_patches(self, argument: str, rows: str) -> None:
        """Images as rows of patches, and how many there are each way."""
        across = 2 * int(find_size(self.vision, ("spatial_merge_size",), 2))
        frames = int(find_size(self.vision, ("temporal_patch_size",), 1))
        patch = int(find_size(self.vision, ("patch_size",), 8))
        channels = int(find_size(self.vision, ("in_channels", "in_chans", "num_channels"), 3))
        self.constants[argument] = [[1, across, across]] * BATCH
        self.drawn[rows] = Draw((BATCH * across * across, channels * frames * patch * patch))

    def image_shape(self, argument: str) -> tuple[int, ...]:
        size = find_size(self.vision, _SIZES, 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = find_size(self.vision, _CHANNELS, 3)
        if "video" in self.name.lower() or argument == "pixel_values_videos" or hasattr(self.vision, "num_frames"):
            return (BATCH, int(getattr(self.vision, "num_frames", FRAMES)), channels, height, width)
        return (BATCH, channels, height, width)

    def _add_sound(self) -> None:
        if "input_features" in self.arguments:
            bins = find_size(self.audio, _BINS, 80)
            frames = 2 * int(getattr(self.audio, "max_source_positions", 16))
            turned = getattr(self.audio, "model_type", "") in ("whisper", "voxtral_encoder", "qwen2_audio_encoder")
            self.drawn["input_features"] = Draw((BATCH, bins, frames) if turned else (BATCH, 32, bins))
        elif "input_values" in self.arguments:
            self.drawn["input_values"] = Draw((BATCH, SAMPLES))

    def drop_images_and_sounds(self) -> bool:
        """Leave out images and sounds; whether there were any beside words."""
        if "input_ids" not in self.drawn or self.drawn.keys() <= {"input_ids", "labels", "decoder_input_ids"}:
            return False
        self.drawn = {"input_ids": self.draw_words(BATCH, LENGTH)}
        for name in self.constants.keys() - {"return_dict"}:  # of a dict that the model's module shares
            del self.constants[name]
        self._add_targets()
        return True

    def floating(self) -> list[tuple[str, Draw]]:
        return [(name, self.drawn[name]) for name in _FLOATING if name in self.drawn]

    def fit(self, error: Exception) -> bool:
        """Change what the error of a first try speaks of; whether anything was changed."""
        before = (dict(self.drawn), dict(self.constants))
        for pattern, change in FITS:
            match = re.search(pattern, str(error))
            if match:
                change(self, *match.groups())
                if (self.drawn, self.constants) != before:
                    return True
        return False


def find_size(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these that the configuration has."""
    sizes = (getattr(config, name, None) for name in names)
    return next((x for x in sizes if isinstance(x, int | list | tuple) and x), default)


def find_part(config: Any, *names: str) -> Any:
    """The first of these configurations within one, or itself."""
    return next((part for part in (getattr(config, name, None) for name in names) if part is not None), config)


# What an error says of the inputs, and how they are changed for it.

_FLOATING = ("input_features", "pixel_values", "hidden_states", "input_values", "pixel_values_videos")


def _widen(batch: Batch, got: str, expected: str) -> None:
    """The last dim of an input is another one; rows of pixels that are flattened may have come as images."""
    for name, draw in batch.floating():
        if draw.shape[-1] == int(got):
            batch.drawn[name] = replace(draw, shape=(*draw.shape[:-1], int(expected)))


def _product(batch: Batch, rows: str, got: str, expected: str) -> None:
    _widen(batch, got, expected)
    pixels = batch.drawn.get("pixel_values")
    side = math.isqrt(int(expected) // 3)
    if pixels is not None and len(pixels.shape) == 4 and 3 * side * side == int(expected):
        batch.drawn["pixel_values"] = replace(pixels, shape=(BATCH, 16, int(expected)))
        for mask in ("pixel_attention_mask", "pixel_mask"):
            if mask in batch.arguments:
                batch.constants[mask] = [[1] * 16] * BATCH
        if "spatial_shapes" in batch.arguments:
            batch.constants["spatial_shapes"] = [[4, 4]] * BATCH


def _channels(batch: Batch, expected: str, got: str) -> None:
    for name, draw in batch.floating():
        if len(draw.shape) == 3 and draw.shape[1] == int(got):
            frames = draw.shape[2] if draw.shape[2] != int(expected) else draw.shape[1]
            batch.drawn[name] = replace(draw, shape=(BATCH, int(expected), frames))
        elif len(draw.shape) == 2 and name == "input_values":
            batch.drawn[name] = replace(draw, shape=(BATCH, int(expected), draw.shape[1]))


def _more_dims(batch: Batch, expected: str, got: str) -> None:
    name = "pixel_values" if "pixel_values" in batch.drawn else "input_values"
    draw = batch.drawn.get(name)
    if draw is not None and int(expected) == int(got) + 1 == len(draw.shape) + 1:
        batch.drawn[name] = replace(draw, shape=(BATCH, 1, *draw.shape[1:]))


def _places(batch: Batch, features: str) -> None:
    """Let each row of words have its share of the places where images or sounds go."""
    marks = [mark for mark in (getattr(batch.config, name, None) for name in _MARKS) if isinstance(mark, int)]
    words = batch.drawn.get("input_ids")
    count = int(features) // BATCH
    if not marks or words is None or int(features) % BATCH or words.count == count or count > 600:
        return
    length = max(LENGTH, count + 8)
    batch.drawn["input_ids"] = replace(batch.draw_words(BATCH, length), marked=marks[0], count=count)
    if "labels" in batch.drawn:
        batch.drawn["labels"] = batch.draw_words(BATCH, length)


def _missing(batch: Batch, names: str) -> None:
    for name in re.findall(r"'(\w+)'", names):
        _add_input(batch, name)


def _add_input(batch: Batch, name: str) -> None:
    """An input that the model asks for by name."""
    draw = next((draw for _, draw in batch.floating()), None)
    if name.endswith("input_ids"):
        batch.drawn[name] = batch.draw_words(BATCH, LENGTH)
    elif name.endswith("mask") and draw is not None:
        batch.constants[name] = [[1] * draw.shape[1 if draw.shape[1] < draw.shape[-1] else -1]] * BATCH
    elif name == "past_values":
        context = int(find_size(batch.config, ("context_length",), 32))
        batch.drawn[name] = Draw((BATCH, context, int(find_size(batch.config, ("num_input_channels",), 1))))
    elif name in ("inputs_embeds", "query_embeds", "noise_embeds", "context_hidden_states", "hidden_states"):
        batch.drawn[name] = Draw((BATCH, LENGTH, int(find_size(batch.text, ("hidden_size", "d_model"), 32))))


def _mask(batch: Batch, *said: str) -> None:
    for name in ("input_features_mask", "feature_attention_mask", "padding_mask", "attention_mask"):
        if name in batch.arguments and name not in batch.constants and "input_features" in batch.drawn:
            shape = batch.drawn["input_features"].shape
            frames = shape[-1] if shape[1] in (80, 128) else shape[1]
            batch.constants[name] = [[1] * frames] * BATCH
            return


FITS: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"features: (\d+)$", _places),
    (r"tokens: \d+,? .*features:? (\d+)", _places),
    (r"missing \d+ required positional arguments?: (.*)", _missing),
    (r"cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", _product),
    (r"to have (\d+) channels, but got (\d+) channels", _channels),
    (r"not enough values to unpack \(expected (\d+), got (\d+)\)", _more_dims),
    (r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension 2", _widen),
    (r"to be of length (\d+), but found (\d+)", lambda batch, expected, got: _widen(batch, got, expected)),
    (r"'(?:NoneType|bool)' object has no attribute '(?:sum|to|device)'", _mask),
)
