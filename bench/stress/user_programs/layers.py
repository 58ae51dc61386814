"""Modules of torch and ways to write modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from stress.user_programs.program import (
    Program,
    built_by,
    by_step,
    classes,
    flags,
    floats,
    mlp,
    program,
    square,
    trained,
)


def module(name: str, make: Callable[[], nn.Module], *shape: int) -> None:
    """A program around a module of one input; each row counts differently."""

    def factory() -> Program:
        def step(model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            out = out[0] if isinstance(out, tuple) else out
            loss = square(out * weight.view(-1, *[1] * (out.dim() - 1))) + 0.01 * out.sum()
            return trained(loss), out

        return Program(make(), step)

    factory.__name__ = name
    program(floats(*shape), floats())(factory)


def tanh(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*(part for one in modules for part in (one, nn.Tanh())))


module("batch_norm", lambda: tanh(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), 5)
module("batch_norm_without_momentum", lambda: tanh(nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=None)), 5)
module("batch_norm_evaluating", lambda: tanh(nn.Linear(5, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)), 5)
module("sync_batch_norm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(tanh(nn.Linear(5, 8), nn.BatchNorm1d(8))), 5)
module("convolutions_and_pools", lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(4, 4, 3, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), 2, 8, 8)  # fmt: skip
module("convolution_of_channels_last", lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), 2, 6, 6)
module("transposed_convolution", lambda: tanh(nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1)), 3, 5)
module("lstm", lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True), 3, 5)
module("gru_both_ways", lambda: nn.GRU(5, 4, bidirectional=True, batch_first=True), 3, 5)
module("rnn_of_relu_sequence_last", lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True), 3, 5)
module("weight_norm", lambda: tanh(parametrizations.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("old_weight_norm", lambda: tanh(nn.utils.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("spectral_norm", lambda: tanh(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("old_spectral_norm", lambda: tanh(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 4)), 5)
module("orthogonal", lambda: tanh(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)), 4)
module("encoder_layer", lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 4, 8)
module("encoder_norm_first", lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2,
    enable_nested_tensor=False), 4, 8)  # fmt: skip
module("dropout_of_zero", lambda: tanh(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 4)), 5)
module("dropout_evaluating", lambda: tanh(nn.Linear(5, 8), nn.Dropout(0.5).eval(), nn.Linear(8, 4)), 5)
module("prelu_and_glu", lambda: nn.Sequential(nn.Linear(5, 8), nn.PReLU(8), nn.Linear(8, 8), nn.GLU()), 5)
module("instance_norm", lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), 3, 6)
module("unflatten_and_pixel_shuffle", lambda: nn.Sequential(
    nn.Linear(5, 32), nn.Unflatten(1, (8, 2, 2)), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1)), 5)  # fmt: skip
module("upsampling", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Upsample(scale_factor=2, mode="bilinear")), 2, 4, 4)
module("local_response_norm", lambda: nn.Sequential(nn.Conv2d(2, 6, 1), nn.LocalResponseNorm(2)), 2, 4, 4)
module("frozen_by_buffers", lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)), 5)


@program()
def own_parametrization() -> Program:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def cached_parametrization() -> Program:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x)

    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Positive())

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return trained(F.cross_entropy(m(x) + m(-x), y))

    return Program(model, step)


@program(floats(4, 8), flags(4))
def attention_with_padding() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            out, weights = self.attend(x, x, x, key_padding_mask=~keep)
            return (out * keep[..., None]).sum(1) / keep.sum(1, keepdim=True) + weights.mean((1, 2))[:, None]

    return Program(Model(), lambda m, x, keep: trained(square(m(x, keep))))


@program(floats(4, 8))
def causal_attention() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return Program(Model(), lambda m, x: trained(F.mse_loss(m(x)[:, :-1], x[:, 1:])))


@program(classes(10, 6), classes(10, 6))
def language_model_with_positions() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(10, 8, padding_idx=0), nn.Embedding(6, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
            return self.head(self.layer(x, src_mask=mask, is_causal=True))

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=0)))


@program(classes(10, 6), classes(4))
def bag_of_words() -> Program:
    model = nn.Sequential(nn.EmbeddingBag(10, 8, mode="mean", padding_idx=0), nn.Linear(8, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program(classes(10, 6), classes(4))
def sparse_embedding() -> Program:
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Flatten(), nn.Linear(48, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)), [optimizer])


@program(classes(10, 6), classes(4))
def embedding_with_a_largest_norm() -> Program:
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), nn.Flatten(), nn.Linear(48, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program(floats(6, 5), classes(4), flags(6))
def lstm_over_padded_sequences() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(5, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 6)
            for i in range(x.shape[1]):
                new_h, new_c = self.cell(x[:, i], (h, c))
                here = keep[:, i, None]
                h, c = torch.where(here, new_h, h), torch.where(here, new_c, c)
            return self.head(h)

    return Program(Model(), lambda m, x, y, keep: trained(F.cross_entropy(m(x, keep), y)))


@program(floats(6, 5), classes(4))
def packed_sequence() -> Program:
    model = nn.ModuleDict({"rnn": nn.GRU(5, 6, batch_first=True), "head": nn.Linear(6, 4)})

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 4)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return trained(F.cross_entropy(m["head"](m["rnn"](packed)[1][-1]), y))

    return Program(model, step)


@program(floats(6, 5))
def recurrent_state_carried_between_steps() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(5, 6, batch_first=True)
            self.register_buffer("h", torch.zeros(1, 1, 6))

        def forward(self, x: Tensor) -> Tensor:
            out, h = self.rnn(x, self.h.expand(1, len(x), 6).contiguous())
            self.h.copy_(h.detach().mean(1, keepdim=True))
            return out

    return Program(Model(), lambda m, x: trained(square(m(x))))


@program()
def mixture_of_experts() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(5, 4), nn.ModuleList(mlp() for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weight, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.stack([expert(x) for expert in self.experts], 1)
            picked = out.gather(1, chosen[..., None].expand(-1, -1, 4))
            share = F.one_hot(chosen, 4).sum(1).to(x.dtype).mean(0)
            return (picked * weight[..., None]).sum(1), 4 * (share * self.gate(x).softmax(-1).mean(0)).sum()

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, balance = m(x)
        return trained(F.cross_entropy(out, y) + 0.01 * balance)

    return Program(Model(), step)


@built_by(lambda step: Program(nn.ModuleDict({"gate": nn.Linear(5, 2), "a": mlp(), "b": mlp()}), step))
def expert_chosen_by_argmax(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first = m["gate"](x).argmax(-1, keepdim=True) == 0
    out = torch.where(first, m["a"](x), m["b"](x))
    return trained(F.cross_entropy(out, y))


@program()
def low_rank_adapter_over_frozen_weights() -> Program:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.t() @ self.b.t() * 2

    model = mlp()
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def lazy_layer_made_by_a_first_batch() -> Program:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))
    model(torch.zeros(1, 5))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weights_tied_after_initialising() -> Program:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
    nn.init.orthogonal_(model[0].weight)
    model[2].weight = model[0].weight
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def one_module_under_two_names() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 4)
            self.blocks = nn.ModuleList([self.first, self.first])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.last(x)

    return Program(Model(), lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def made_on_meta_then_reset() -> Program:
    with torch.device("meta"):
        model = mlp()
    model.to_empty(device="cpu")
    for part in model:
        if isinstance(part, nn.Linear):
            part.reset_parameters()
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weights_loaded_by_assignment() -> Program:
    model, other = mlp(), mlp()
    model.load_state_dict(other.state_dict(), assign=True)
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weights_of_numpy() -> Program:
    model = mlp()
    array = model[0].weight.detach().numpy().copy()
    model[0].weight = nn.Parameter(torch.from_numpy(array))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weight_that_is_not_contiguous() -> Program:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(5, 8).t())
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weights_that_are_views_of_one() -> Program:
    model, flat = mlp(), torch.randn(80) * 0.3
    model[0].weight = nn.Parameter(flat[:40].view(8, 5))
    model[2].weight = nn.Parameter(flat[40:72].view(4, 8))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def weight_of_no_elements() -> Program:
    model = nn.ModuleDict({"body": mlp(), "none": nn.Linear(5, 0)})
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m["body"](x), y) + m["none"](x).sum()))


@program()
def deep_copies_of_a_block() -> Program:
    import copy

    block = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.GELU())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)), nn.Linear(5, 4))
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)))


@program()
def method_other_than_forward() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def training_step(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.body(x), y)

        def forward(self, x: Tensor) -> Tensor:
            raise NotImplementedError

    return Program(Model(), lambda m, x, y: trained(m.training_step(x, y)))


@built_by(by_step)
def weights_read_without_the_module(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = dict(m.named_parameters())
    h = torch.tanh(torch.addmm(weights["0.bias"], x, weights["0.weight"].t()))
    decay = sum(p.pow(2).sum() for p in m.parameters())
    return trained(F.cross_entropy(h @ weights["2.weight"].t(), y) + 1e-2 * decay)


@program(floats(3, 8, 8))
def autoencoder_with_skip() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 6, 3, 2, 1), nn.ConvTranspose2d(6, 3, 4, 2, 1)
            self.mix = nn.Conv2d(6, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(torch.cat([x, self.up(F.relu(self.down(x)))], 1))

    return Program(Model(), lambda m, x: trained(F.smooth_l1_loss(m(x), x)))
