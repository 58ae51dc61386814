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

    name: str
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


class Tagger(nn.Module):
    """A recurrent network over embedded tokens, with a class for every token."""

    def __init__(self, kind: Callable[..., nn.RNNBase], vocabulary: int = 96, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = kind(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.recurrent(self.embedding(ids))[0]
        scores: Tensor = self.head(hidden)
        return scores


class Checkpointed(nn.Module):
    """An ``nn.TransformerEncoder`` whose layers are run again in backward."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 96, context: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.positions
        for layer in self.encoder.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        scores: Tensor = self.head(hidden)
        return scores


class Routed(WithLoss):
    """A mixture of experts of the transformers package.

    torch's own product of groups takes no float64; there the package's own op stands in, for plain PyTorch too.
    """

    def __init__(self, body: nn.Module):
        super().__init__(body)
        from transformers.integrations import moe

        forward, backward = (
            torch.ops.transformers.grouped_mm_fallback,
            torch.ops.transformers.grouped_mm_fallback_backward,
        )
        gz.sbp.rule(forward.default, "_k,_kn,~_->_n")
        gz.sbp.rule(backward.default, "~_k,~_kn,~_,_n->_k:123,_kn:023")
        self.package = moe

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kernel = self.package._can_use_grouped_mm
        has_kernel = next(self.parameters()).dtype != torch.float64
        with patch.object(self.package, "_can_use_grouped_mm", lambda *args: has_kernel and kernel(*args)):
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


def gpt2(layers: int = 2, width: int = 32, heads: int = 2, vocabulary: int = 96, context: int = 16) -> nn.Module:
    """GPT-2 of the transformers package; the head is tied to the token embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return WithLoss(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )
    )  # fmt: skip


def llama(layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 96, context: int = 16) -> nn.Module:
    """Llama of the transformers package, with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return WithLoss(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=context,
                use_cache=False, attention_dropout=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=None,
            )
        )
    )  # fmt: skip


def published_llama(layers: int) -> nn.Module:
    """Llama 7B with so many layers on the meta device, without a loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def qwen3moe(
    layers: int = 1, width: int = 32, heads: int = 4, vocabulary: int = 96, context: int = 16, experts: int = 4
) -> nn.Module:
    """Qwen3 of the transformers package with a mixture of experts in place of its MLP; two experts see a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Routed(
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=vocabulary, hidden_size=width, moe_intermediate_size=width, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=width // heads, num_experts=experts,
                num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=context, use_cache=False,
                attention_dropout=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=None,
            )
        )
    )  # fmt: skip


def lstm() -> nn.Module:
    return WithLoss(Tagger(nn.LSTM))


def gru() -> nn.Module:
    return WithLoss(Tagger(nn.GRU))


def encoder() -> nn.Module:
    return WithLoss(Checkpointed())


def bert(layers: int = 2, width: int = 32, heads: int = 2, vocabulary: int = 96, context: int = 16) -> nn.Module:
    """BERT of the transformers package with its head for masked tokens, which is tied to the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    return WithLoss(
        BertForMaskedLM(
            BertConfig(
                vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=2 * width, max_position_embeddings=context,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )
    )  # fmt: skip


def vit(layers: int = 2, width: int = 32, heads: int = 2) -> nn.Module:
    """A vision transformer of the transformers package, on images of 8 x 8."""
    from transformers import ViTConfig, ViTForImageClassification

    return WithLoss(
        ViTForImageClassification(
            ViTConfig(
                image_size=8, patch_size=4, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=2 * width, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )
    )  # fmt: skip


def t5(layers: int = 1, width: int = 32, heads: int = 2, vocabulary: int = 96) -> nn.Module:
    """T5 of the transformers package: relative positions, encoder and decoder, one tied embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    return WithOwnLoss(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=vocabulary, d_model=width, d_kv=width // heads, d_ff=2 * width, num_layers=layers,
                num_heads=heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
            )
        )
    )  # fmt: skip


def vectors(step: int, size: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 32, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(10, (size,), generator=generator)


def images(step: int, size: int, dtype: torch.dtype, side: int = 8, classes: int = 10) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(classes, (size,), generator=generator)


def tokens(step: int, size: int, dtype: torch.dtype, vocabulary: int = 96, context: int = 16) -> Batch:
    del dtype
    ids = torch.randint(vocabulary, (size, context + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CASES = {
    case.name: case
    for case in (
        Case("mlp", mlp, vectors),
        Case("convnet", convnet, images),
        Case("gpt2", gpt2, tokens),
        Case("llama", llama, tokens),
        Case("qwen3moe", qwen3moe, tokens),
        Case("lstm", lstm, partial(tokens, context=6)),
        Case("gru", gru, partial(tokens, context=6)),
        Case("encoder", encoder, tokens),
        Case("bert", bert, tokens),
        Case("vit", vit, images),
        Case("t5", t5, tokens),
    )
}


def sgd(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    del steps
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9), None


def adamw(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}  # (parameters, steps) -> (optimizer, schedule or None)
