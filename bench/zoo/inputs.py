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

    def made(self) -> dict[str, Any]:
        """The inputs that are alike for every batch: numbers in lists as tensors."""
        return {name: torch.tensor(x) if isinstance(x, list) else x for name, x in self.constants.items()}

    def forward(self, **batch: Tensor) -> Tensor:
        output = self.model(**batch, **self.made())
        loss = getattr(output, "loss", None)
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad else smooth(output)


def smooth(output: Any) -> Tensor:
    """The sum of mean sines of all floating tensors that depend on a parameter."""
    leaves = torch.utils._pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    parts = [
        x.sin().mean()
        for x in leaves
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad and x.numel()
    ]
    if not parts:
        raise TypeError("nothing that the model returns depends on a parameter")
    return torch.stack(parts).sum()


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
_MARKS = ("image_token_id", "image_token_index", "video_token_id", "media_placeholder_token_id", "audio_token_id",
          "audio_token_index", "speech_token_id")  # fmt: skip


class Batch:
    """The inputs of one model: what is drawn again for every step, and what stays."""

    def __init__(self, name: str, model: nn.Module, config: Any) -> None:
        self.name, self.config = name, config
        self.arguments = inspect.signature(model.forward).parameters
        self.drawn: dict[str, Draw] = {}
        self.constants: dict[str, Any] = {"return_dict": True} if "return_dict" in self.arguments else {}
        self.text, self.vision, self.audio = parts(config)
        self._text()
        self._images()
        self._sound()
        self._targets()

    def __call__(self, step: int) -> dict[str, Tensor]:
        del step
        batch = {name: draw() for name, draw in self.drawn.items()}
        if "mm_token_type_ids" in self.arguments and "input_ids" in batch:
            marked = self.drawn["input_ids"].marked
            batch["mm_token_type_ids"] = (batch["input_ids"] == (-1 if marked is None else marked)).long()
        return batch

    def words(self, *shape: int) -> Draw:
        vocabulary = getattr(self.text, "vocab_size", None)
        return Draw(shape, 8, min(PLAIN_IDS, vocabulary) if isinstance(vocabulary, int) else PLAIN_IDS)

    def _text(self) -> None:
        if "input_ids" in self.arguments:
            choices = (2,) if self.name.endswith("MultipleChoice") else ()
            self.drawn["input_ids"] = self.words(BATCH, *choices, LENGTH)
        if "bbox" in self.arguments:
            self.drawn["bbox"] = Draw((BATCH, LENGTH, 4), 0, 1)

    def _targets(self) -> None:
        if "start_positions" in self.arguments:
            self.drawn |= {name: Draw((BATCH,), 0, LENGTH) for name in ("start_positions", "end_positions")}
        labels = self._labels()
        if "labels" in self.arguments and labels is not None:
            self.drawn["labels"] = labels
        elif "decoder_input_ids" in self.arguments:
            self.drawn["decoder_input_ids"] = self.words(BATCH, LENGTH)

    def _labels(self) -> Draw | None:
        classes = max(int(getattr(self.config, "num_labels", 2) or 2), 2)
        if self.name.endswith(_ONE_CLASS):
            return Draw((BATCH,), 0, classes)
        if self.name.endswith("TokenClassification"):
            return Draw((BATCH, LENGTH), 0, classes)
        if self.name.endswith("CTC"):
            return self.words(BATCH, 3)
        return self.words(BATCH, LENGTH) if self.name.endswith(_WORDS) else None

    def _images(self) -> None:
        if getattr(self.config, "vision_config", self) is None:
            return
        for argument in ("image_grid_thw", "grid_thw"):
            rows = "pixel_values" if "pixel_values" in self.arguments else "hidden_states"
            if argument in self.arguments and rows in self.arguments and rows not in self.drawn:
                self.patches(argument, rows)
        for argument in ("pixel_values", "pixel_values_videos"):
            both = argument == "pixel_values_videos" and "pixel_values" in self.arguments
            if argument in self.arguments and argument not in self.drawn and not both:
                self.drawn[argument] = Draw(self.image_shape(argument))

    def patches(self, argument: str, rows: str) -> None:
        """Images as rows of patches, and how many there are each way."""
        across = 2 * int(_of(self.vision, ("spatial_merge_size",), 2))
        frames = int(_of(self.vision, ("temporal_patch_size",), 1))
        patch = int(_of(self.vision, ("patch_size",), 8))
        channels = int(_of(self.vision, ("in_channels", "in_chans", "num_channels"), 3))
        self.constants[argument] = [[1, across, across]] * BATCH
        self.drawn[rows] = Draw((BATCH * across * across, channels * frames * patch * patch))

    def image_shape(self, argument: str) -> tuple[int, ...]:
        size = _of(self.vision, _SIZES, 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = _of(self.vision, _CHANNELS, 3)
        if "video" in self.name.lower() or argument == "pixel_values_videos" or hasattr(self.vision, "num_frames"):
            return (BATCH, int(getattr(self.vision, "num_frames", FRAMES)), channels, height, width)
        return (BATCH, channels, height, width)

    def _sound(self) -> None:
        if "input_features" in self.arguments:
            bins = _of(self.audio, _BINS, 80)
            frames = 2 * int(getattr(self.audio, "max_source_positions", 16))
            turned = getattr(self.audio, "model_type", "") in ("whisper", "voxtral_encoder", "qwen2_audio_encoder")
            self.drawn["input_features"] = Draw((BATCH, bins, frames) if turned else (BATCH, 32, bins))
        elif "input_values" in self.arguments:
            self.drawn["input_values"] = Draw((BATCH, SAMPLES))

    def words_only(self) -> bool:
        """Leave out images and sounds; whether there were any beside words."""
        others = self.drawn.keys() - {"input_ids", "labels", "decoder_input_ids"}
        if "input_ids" not in self.drawn or not others:
            return False
        self.drawn = {"input_ids": self.words(BATCH, LENGTH)}
        for name in [name for name in self.constants if name != "return_dict"]:
            del self.constants[name]
        self._targets()
        return True

    def fit(self, error: Exception) -> bool:
        """Change what the error of a first try speaks of; whether anything was changed."""
        before = (dict(self.drawn), dict(self.constants))
        for pattern, change in FITS:
            found = re.search(pattern, str(error))
            if found:
                change(self, *found.groups())
                if (self.drawn, self.constants) != before:
                    return True
        return False


def _of(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these that the configuration has."""
    found = (getattr(config, name, None) for name in names)
    return next((x for x in found if isinstance(x, int | list | tuple) and x), default)


def parts(config: Any) -> tuple[Any, Any, Any]:
    """The configurations of text, images and sound within one."""

    def first(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), config)

    text = first("text_config", "language_config", "decoder", "llm_config")
    sound = first("audio_config", "audio_encoder_config", "encoder_config", "encoder", "audio_encoder", "speech_config")
    return text, first("vision_config", "encoder", "backbone_config"), sound


# What an error says of the inputs, and how they are changed for it.

_FLOATING = ("input_features", "pixel_values", "hidden_states", "input_values", "pixel_values_videos")


def _widen(batch: Batch, got: str, wanted: str) -> None:
    """The last dim of an input is another one; rows of pixels that are flattened may have come as images."""
    for name in _FLOATING:
        draw = batch.drawn.get(name)
        if draw is not None and draw.shape[-1] == int(got):
            batch.drawn[name] = replace(draw, shape=(*draw.shape[:-1], int(wanted)))


def _product(batch: Batch, rows: str, got: str, wanted: str) -> None:
    _widen(batch, got, wanted)
    pixels = batch.drawn.get("pixel_values")
    side = math.isqrt(int(wanted) // 3)
    if pixels is not None and len(pixels.shape) == 4 and 3 * side * side == int(wanted):
        batch.drawn["pixel_values"] = replace(pixels, shape=(BATCH, 16, int(wanted)))
        for mask in ("pixel_attention_mask", "pixel_mask"):
            if mask in batch.arguments:
                batch.constants[mask] = [[1] * 16] * BATCH
        if "spatial_shapes" in batch.arguments:
            batch.constants["spatial_shapes"] = [[4, 4]] * BATCH


def _channels(batch: Batch, wanted: str, got: str) -> None:
    for name in _FLOATING:
        draw = batch.drawn.get(name)
        if draw is None:
            continue
        if len(draw.shape) == 3 and draw.shape[1] == int(got):
            frames = draw.shape[2] if draw.shape[2] != int(wanted) else draw.shape[1]
            batch.drawn[name] = replace(draw, shape=(BATCH, int(wanted), frames))
        elif len(draw.shape) == 2 and name == "input_values":
            batch.drawn[name] = replace(draw, shape=(BATCH, int(wanted), draw.shape[1]))


def _more_dims(batch: Batch, wanted: str, got: str) -> None:
    draw = batch.drawn.get("pixel_values") or batch.drawn.get("input_values")
    name = "pixel_values" if "pixel_values" in batch.drawn else "input_values"
    if draw is not None and int(wanted) == int(got) + 1 == len(draw.shape) + 1:
        batch.drawn[name] = replace(draw, shape=(BATCH, 1, *draw.shape[1:]))


def _places(batch: Batch, features: str) -> None:
    """Let each row of words have its share of the places where images or sounds go."""
    mark = next(
        (getattr(batch.config, name) for name in _MARKS if isinstance(getattr(batch.config, name, None), int)), None
    )
    words = batch.drawn.get("input_ids")
    count = int(features) // BATCH
    if mark is None or words is None or int(features) % BATCH or words.count == count or count > 600:
        return
    length = max(LENGTH, count + 8)
    batch.drawn["input_ids"] = replace(batch.words(BATCH, length), marked=mark, count=count)
    if "labels" in batch.drawn:
        batch.drawn["labels"] = batch.words(BATCH, length)


def _missing(batch: Batch, names: str) -> None:
    for name in re.findall(r"'(\w+)'", names):
        _given(batch, name)


def _given(batch: Batch, name: str) -> None:
    """An input that the model asks for by name."""
    draw = next((batch.drawn[known] for known in _FLOATING if known in batch.drawn), None)
    if name.endswith("input_ids"):
        batch.drawn[name] = batch.words(BATCH, LENGTH)
    elif name.endswith("mask") and draw is not None:
        batch.constants[name] = [[1] * draw.shape[1 if draw.shape[1] < draw.shape[-1] else -1]] * BATCH
    elif name == "past_values":
        context = int(_of(batch.config, ("context_length",), 32))
        batch.drawn[name] = Draw((BATCH, context, int(_of(batch.config, ("num_input_channels",), 1))))
    elif name in ("inputs_embeds", "query_embeds", "noise_embeds", "context_hidden_states", "hidden_states"):
        batch.drawn[name] = Draw((BATCH, LENGTH, int(_of(batch.text, ("hidden_size", "d_model"), 32))))


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
    (r"to be of length (?P<wanted>\d+), but found (?P<got>\d+)", lambda batch, wanted, got: _widen(batch, got, wanted)),
    (r"'(?:NoneType|bool)' object has no attribute '(?:sum|to|device)'", _mask),
)
