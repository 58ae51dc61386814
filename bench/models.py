"""The models, data and optimizers that the benchmarks and the parity tests share.

Every model's forward takes a batch and returns the mean loss, so that one Graph serves all.  None has dropout, and
none has a parameter whose exact gradient is zero and that shows in the loss (a convolution before a batch norm has
no bias): rounding noise there would be blown up by Adam, in plain PyTorch too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphzero as gz

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    make: a fresh model in the default dtype; its parameters depend on torch's seed alone.
    batch: (step, size, dtype) -> the whole batch, on the CPU.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.dtype], Batch]

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """A fresh model.  Drawn in float64 and rounded, so that both dtypes begin alike."""
        torch.manual_seed(seed)
        return self.make().double().to(dtype)


class WithLoss(nn.Module):
    """A classifier and its mean cross entropy as one module."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.body(x)
        scores = getattr(scores, "logits", scores)
        return F.cross_entropy(scores.flatten(0, -2), y.flatten())


VOCABULARY, WIDTH, CONTEXT = 96, 16, 16


class Tagger(nn.Module):
    """A recurrent network over embedded tokens, with a class for every token."""

    def __init__(self, layer_class: Callable[..., nn.RNNBase]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = layer_class(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrent(self.embedding(ids))[0])
        return scores


class Checkpointed(nn.Module):
    """An ``nn.TransformerEncoder`` whose layers are run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.positions
        for layer in self.encoder.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        scores: Tensor = self.head(hidden)
        return scores


def allow_split_groups() -> None:
    """Declare how transformers' own product of groups may be split: torch's takes no float64, this one stands in."""
    import transformers.integrations.moe  # noqa: F401, which registers the ops

    ops = torch.ops.transformers
    gz.sbp.rule(ops.grouped_mm_fallback.default, "_k,_kn,~_->_n")
    gz.sbp.rule(ops.grouped_mm_fallback_backward.default, "~_k,~_kn,~_,_n->_k:123,_kn:023")


class Routed(WithLoss):
    """A mixture of experts of the transformers package; in float64 it has the package's own product, eagerly too."""

    def __init__(self, body: nn.Module):
        super().__init__(body)
        allow_split_groups()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from transformers.integrations import moe

        kernel, is_wide = moe._can_use_grouped_mm, next(self.parameters()).dtype == torch.float64
        with patch.object(moe, "_can_use_grouped_mm", lambda *args: not is_wide and kernel(*args)):
            return super().forward(x, y)


class WithOwnLoss(nn.Module):
    """A model of the transformers package that computes its own loss."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=x, labels=y).loss
        return loss


def mlp(width: int = 64) -> nn.Module:
    return WithLoss(
        nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    )


def convnet(channels: int = 8) -> nn.Module:
    """Two convolutions with batch norm, whose statistics are those of the whole batch."""

    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, channels, 1), *block(channels, 2 * channels, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return WithLoss(nn.Sequential(*layers, nn.Linear(2 * channels, 10)))


def build_transformer(name: str, wrapper: Callable[[nn.Module], nn.Module] = WithLoss, **options: Any) -> nn.Module:
    """A model of the transformers package with a loss.  options: of its configuration."""
    import transformers

    model_class = getattr(transformers, name)
    return wrapper(model_class(model_class.config_class(**options)))


def gpt2(layers: int = 2, width: int = 32, heads: int = 2, vocabulary: int = 96, context: int = 16) -> nn.Module:
    """GPT-2; the head is tied to the token embedding."""
    return build_transformer(
        "GPT2LMHeadModel", vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=layers, n_head=heads,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def llama(layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 96, context: int = 16) -> nn.Module:
    """Llama, with grouped queries."""
    return build_transformer(
        "LlamaForCausalLM", vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=context, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip


def published_llama(layers: int) -> nn.Module:
    """Llama 7B with so many layers on the meta device."""
    with torch.device("meta"):
        return build_transformer(
            "LlamaForCausalLM", num_hidden_layers=layers, use_cache=False, bos_token_id=0, eos_token_id=0
        )


def qwen3moe() -> nn.Module:
    """Qwen3 with a mixture of experts in place of its MLP; two of four experts see a token."""
    return build_transformer(
        "Qwen3MoeForCausalLM", Routed, vocab_size=96, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=16, use_cache=False, bos_token_id=0, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip


def bert(heads: int = 2) -> nn.Module:
    """BERT with its head for masked tokens, which is tied to the embedding."""
    return build_transformer(
        "BertForMaskedLM", vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def vit(heads: int = 2) -> nn.Module:
    """A vision transformer on images of 8 x 8."""
    return build_transformer(
        "ViTForImageClassification", image_size=8, patch_size=4, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=heads, intermediate_size=64, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def t5(heads: int = 2) -> nn.Module:
    """T5: relative positions, encoder and decoder, one tied embedding."""
    return build_transformer(
        "T5ForConditionalGeneration", WithOwnLoss, vocab_size=96, d_model=32, d_kv=32 // heads, d_ff=64, num_layers=1,
        num_heads=heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def draw_vectors(step: int, size: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 32, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(10, (size,), generator=generator)


def draw_images(step: int, size: int, dtype: torch.dtype, side: int = 8, classes: int = 10) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (size,), generator=generator)


def draw_tokens(step: int, size: int, dtype: torch.dtype, vocabulary: int = 96, context: int = 16) -> Batch:
    del dtype
    ids = torch.randint(vocabulary, (size, context + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CASES = {
    "mlp": Case(mlp, draw_vectors),
    "convnet": Case(convnet, draw_images),
    "gpt2": Case(gpt2, draw_tokens),
    "llama": Case(llama, draw_tokens),
    "qwen3moe": Case(qwen3moe, draw_tokens),
    "lstm": Case(lambda: WithLoss(Tagger(nn.LSTM)), partial(draw_tokens, context=6)),
    "gru": Case(lambda: WithLoss(Tagger(nn.GRU)), partial(draw_tokens, context=6)),
    "encoder": Case(lambda: WithLoss(Checkpointed()), draw_tokens),
    "bert": Case(bert, draw_tokens),
    "vit": Case(vit, draw_images),
    "t5": Case(t5, draw_tokens),
}


def sgd(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    del steps
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9), None


def adamw(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}  # (parameters, steps) -> (optimizer, schedule or None)
