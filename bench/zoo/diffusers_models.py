"""Models of diffusers, each with a small configuration and the arguments that its pipeline gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.inputs import smooth
from zoo.trial import Trial

B, T, C = 4, 6, 32  # batch, words of the prompt, their width
_UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_DIT = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4}

# name: (class, configuration, inputs by shape; "t" a time, an integer "t:int", ids "ids:N")
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": ("UNet2DModel", {
        **_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D",
        "UpBlock2D"),
        "attention_head_dim": 8,
    }, {"sample": (B, 3, 16, 16), "timestep": "t"}),
    "UNet2DConditionModel": ("UNet2DConditionModel", {
        **_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": C, "attention_head_dim": 8,
    }, {"sample": (B, 4, 16, 16), "timestep": "t", "encoder_hidden_states": (B, T, C)}),
    "UNet2DConditionModel-sdxl": ("UNet2DConditionModel", {
        **_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": C, "attention_head_dim": (2, 4),
        "use_linear_projection": True, "transformer_layers_per_block": (1, 2), "class_embed_type": "projection",
        "projection_class_embeddings_input_dim": 16,
    }, {"sample": (B, 4, 16, 16), "timestep": "t", "encoder_hidden_states": (B, T, C), "class_labels": (B, 16)}),
    "UNet3DConditionModel": ("UNet3DConditionModel", {
        **_UNET, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": C, "attention_head_dim": 8,
    }, {"sample": (B, 4, 2, 16, 16), "timestep": "t", "encoder_hidden_states": (B, T, C)}),
    "UNet1DModel": ("UNet1DModel", {
        "block_out_channels": (16, 32), "extra_in_channels": 8, "time_embedding_type": "fourier", "sample_size": 64,
        "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"), "up_block_types": ("AttnUpBlock1D",
        "UpBlock1DNoSkip"),
    }, {"sample": (B, 2, 64), "timestep": "t"}),
    "UNetMotionModel": ("UNetMotionModel", {
        **_UNET, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "cross_attention_dim": C,
        "num_attention_heads": 2,
        "motion_num_attention_heads": 2,
    }, {"sample": (B, 4, 2, 16, 16), "timestep": "t", "encoder_hidden_states": (B, T, C)}),
    "ControlNetModel": ("ControlNetModel", {
        "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": C, "attention_head_dim": 8,
        "conditioning_embedding_out_channels": (8, 16),
    }, {"sample": (B, 4, 16, 16), "timestep": "t", "encoder_hidden_states": (B, T, C), "controlnet_cond": (B, 3, 32,
    32)}),
    "AutoencoderKL": ("AutoencoderKL", {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    }, {"sample": (B, 3, 16, 16)}),
    "AsymmetricAutoencoderKL": ("AsymmetricAutoencoderKL", {
        "down_block_types": ("DownEncoderBlock2D",) * 2, "down_block_out_channels": (16, 32),
        "layers_per_down_block": 1,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "up_block_out_channels": (16, 32), "layers_per_up_block": 1,
        "norm_num_groups": 8,
    }, {"sample": (B, 3, 16, 16)}),
    "AutoencoderTiny": ("AutoencoderTiny", {
        "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    }, {"sample": (B, 3, 16, 16)}),
    "AutoencoderDC": ("AutoencoderDC", {
        "latent_channels": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 16),
        "decoder_block_out_channels": (8, 16), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)), "attention_head_dim": 8,
    }, {"sample": (B, 3, 16, 16)}),
    "VQModel": ("VQModel", {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "num_vq_embeddings": 16,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    }, {"sample": (B, 3, 16, 16)}),
    "AutoencoderKLTemporalDecoder": ("AutoencoderKLTemporalDecoder", {
        "block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
    }, {"sample": (B, 3, 16, 16)}),
    "AutoencoderKLCogVideoX": ("AutoencoderKLCogVideoX", {
        "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2, "layers_per_block": 1, "latent_channels": 4,
    }, {"sample": (B, 3, 1, 16, 16)}),
    "AutoencoderKLLTXVideo": ("AutoencoderKLLTXVideo", {
        "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8), "layers_per_block": (1, 1, 1,
        1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1), "latent_channels": 8,
    }, {"sample": (B, 3, 9, 32, 32)}),
    "AutoencoderOobleck": ("AutoencoderOobleck", {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_channels": 8, "decoder_input_channels": 8,
        "audio_channels": 2, "channel_multiples": [1, 2],
    }, {"sample": (B, 2, 64)}),
    "DiTTransformer2DModel": ("DiTTransformer2DModel", {
        **_DIT, "sample_size": 8, "num_embeds_ada_norm": 8, "in_channels": 4, "out_channels": 8,
    }, {"hidden_states": (B, 4, 8, 8), "timestep": "t:int", "class_labels": "ids:8"}),
    "PixArtTransformer2DModel": ("PixArtTransformer2DModel", {
        **_DIT, "sample_size": 8, "caption_channels": C, "cross_attention_dim": 32, "in_channels": 4, "out_channels": 8,
    }, {"hidden_states": (B, 4, 8, 8), "timestep": "t:int", "encoder_hidden_states": (B, T, C)}),
    "Transformer2DModel": ("Transformer2DModel", {
        **_DIT, "in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": C,
    }, {"hidden_states": (B, 16, 8, 8), "encoder_hidden_states": (B, T, C)}),
    "SD3Transformer2DModel": ("SD3Transformer2DModel", {
        **_DIT, "sample_size": 8, "patch_size": 2, "in_channels": 4, "joint_attention_dim": C,
        "caption_projection_dim": 32, "pooled_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 8,
    }, {"hidden_states": (B, 4, 8, 8), "encoder_hidden_states": (B, T, C), "pooled_projections": (B, 16),
    "timestep": "t"}),
    "FluxTransformer2DModel": ("FluxTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": C, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    }, {
        "hidden_states": (B, 16, 4), "encoder_hidden_states": (B, T, C), "pooled_projections": (B, 16), "timestep": "t",
        "guidance": (B,), "img_ids": "zeros:16,3", "txt_ids": f"zeros:{T},3",
    }),
    "AuraFlowTransformer2DModel": ("AuraFlowTransformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": C,
        "out_channels": 4, "pos_embed_max_size": 16,
    }, {"hidden_states": (B, 4, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t"}),
    "CogVideoXTransformer3DModel": ("CogVideoXTransformer3DModel", {
        **_DIT, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": C, "sample_width": 8,
        "sample_height": 8, "sample_frames": 5, "max_text_seq_length": T,
    }, {"hidden_states": (B, 2, 4, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t:int"}),
    "LTXVideoTransformer3DModel": ("LTXVideoTransformer3DModel", {
        **_DIT, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": C,
    }, {
        "hidden_states": (B, 16, 4), "encoder_hidden_states": (B, T, C), "timestep": "t:int",
        "encoder_attention_mask": f"ones:{B},{T}", "num_frames": 1, "height": 4, "width": 4,
    }),
    "WanTransformer3DModel": ("WanTransformer3DModel", {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4,
        "text_dim": C, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    }, {"hidden_states": (B, 4, 2, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t:int"}),
    "SanaTransformer2DModel": ("SanaTransformer2DModel", {
        **_DIT, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
        "cross_attention_dim": 32, "caption_channels": C, "sample_size": 8,
    }, {"hidden_states": (B, 4, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t:int"}),
    "PriorTransformer": ("PriorTransformer", {
        **_DIT, "embedding_dim": 32, "num_embeddings": 7, "additional_embeddings": 4,
    }, {"hidden_states": (B, 32), "timestep": "t", "proj_embedding": (B, 32), "encoder_hidden_states": (B, 7, 32)}),
    "UVit2DModel": ("UVit2DModel", {
        "hidden_size": 32, "cond_embed_dim": 16, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
        "encoder_hidden_size": C,
        "vocab_size": 32, "codebook_size": 24, "in_channels": 32, "block_out_channels": 32, "num_res_blocks": 1,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "block_num_heads": 2,
        "sample_size": 8,
    }, {"input_ids": "ids:24,8,8", "encoder_hidden_states": (B, T, C), "pooled_text_emb": (B, 16), "micro_conds": (B,
    3)}),
    "StableAudioDiTModel": ("StableAudioDiTModel", {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "num_key_value_attention_heads": 2, "cross_attention_dim": C, "time_proj_dim": 8,
        "global_states_input_dim": 16, "cross_attention_input_dim": C,
    }, {
        "hidden_states": (B, 4, 8), "timestep": "t", "encoder_hidden_states": (B, T, C), "global_hidden_states": (B,
        1, 16),
        "rotary_embedding": None,
    }),
    "HunyuanDiT2DModel": ("HunyuanDiT2DModel", {
        **_DIT, "sample_size": 8, "patch_size": 2, "in_channels": 4, "mlp_ratio": 2.0, "hidden_size": 32,
        "cross_attention_dim": C, "cross_attention_dim_t5": C, "pooled_projection_dim": 4, "text_len": 4,
        "text_len_t5": 4,
        "activation_fn": "gelu-approximate",
    }, {
        "hidden_states": (B, 4, 8, 8), "timestep": "t", "encoder_hidden_states": (B, 4, C),
        "text_embedding_mask": f"ones:{B},4",
        "encoder_hidden_states_t5": (B, 4, C), "text_embedding_mask_t5": f"ones:{B},4", "image_meta_size": (B, 6),
        "style": "ids:1",
    }),
    "Lumina2Transformer2DModel": ("Lumina2Transformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "norm_eps": 1e-5, "axes_dim_rope": (4, 2, 2),
        "axes_lens": (32, 32, 32), "cap_feat_dim": C,
    }, {
        "hidden_states": (B, 4, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t",
        "encoder_attention_mask": f"mask:{B},{T}",
    }),
    "CogView4Transformer2DModel": ("CogView4Transformer2DModel", {
        "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "out_channels": 4, "text_embed_dim": C, "time_embed_dim": 8, "condition_dim": 4,
    }, {
        "hidden_states": (B, 4, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t:int",
        "original_size": (B, 2), "target_size": (B, 2), "crop_coords": (B, 2),
    }),
    "QwenImageTransformer2DModel": ("QwenImageTransformer2DModel", {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": C, "axes_dims_rope": (8, 4, 4),
    }, {
        "hidden_states": (B, 16, 16), "encoder_hidden_states": (B, T, C), "timestep": "t",
        "encoder_hidden_states_mask": f"ones:{B},{T}", "img_shapes": [(1, 4, 4)] * B,
    }),
    "ChromaTransformer2DModel": ("ChromaTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": C, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8,
        "approximator_hidden_dim": 32, "approximator_layers": 1,
    }, {
        "hidden_states": (B, 16, 4), "encoder_hidden_states": (B, T, C), "timestep": "t", "img_ids": "zeros:16,3",
        "txt_ids": f"zeros:{T},3",
    }),
    "MochiTransformer3DModel": ("MochiTransformer3DModel", {
        "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "pooled_projection_dim": 16,
        "in_channels": 4, "time_embed_dim": 4, "text_embed_dim": C, "max_sequence_length": T,
    }, {
        "hidden_states": (B, 4, 2, 8, 8), "encoder_hidden_states": (B, T, C), "timestep": "t:int",
        "encoder_attention_mask": f"mask:{B},{T}",
    }),
    "T2IAdapter": ("T2IAdapter", {"channels": [16, 16, 16, 16], "num_res_blocks": 1, "downscale_factor": 8},
    {"x": (B, 3, 32, 32)}),
}  # fmt: skip


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    import diffusers  # noqa: F401

    return {f"diffusers/{name}": ("diffusers", lambda name=name: trial(name)) for name in MODELS}


class Denoiser(nn.Module):
    def __init__(self, body: nn.Module, constants: dict[str, Any]) -> None:
        super().__init__()
        self.body = body
        self.constants = constants

    def forward(self, **batch: Tensor) -> Tensor:
        constants = {k: torch.zeros(*v.shape) if isinstance(v, Zeros) else v for k, v in self.constants.items()}
        return smooth(self.body(**batch, **constants))


class Zeros:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def trial(name: str) -> Trial:
    import diffusers

    kind, config, inputs = MODELS[name]
    model = getattr(diffusers, kind)(**config)
    drawn, constants = {}, {}
    for argument, what in inputs.items():
        if isinstance(what, tuple):
            drawn[argument] = lambda shape=what: torch.randn(shape)
        elif isinstance(what, str) and what.startswith("zeros:"):
            constants[argument] = Zeros(tuple(map(int, what[6:].split(","))))
        elif isinstance(what, str):
            drawn[argument] = lambda what=what: _special(what)
        else:
            constants[argument] = what
    return Trial(Denoiser(model, constants), lambda step: {name: draw() for name, draw in drawn.items()})


def _special(what: str) -> Tensor:
    kind, _, rest = what.partition(":")
    if kind == "t":
        return torch.randint(0, 1000, (B,)) if rest == "int" else torch.randint(0, 1000, (B,)).to(torch.float64)
    shape = tuple(map(int, rest.split(",")))
    if kind == "ids":
        return torch.randint(0, shape[0], (B, *shape[1:]))
    return torch.ones(shape, dtype=torch.bool) if kind == "mask" else torch.ones(shape)
