"""The optimizers that DeepSpeed's JSON names, made of torch's, with the defaults that DeepSpeed has.

``FusedAdam`` decays weights by 0 where torch's AdamW has 0.01, and is AdamW under the name Adam too; torch's own
defaults count under ``torch_adam`` and for classes that DeepSpeed takes from torch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from graphzero.errors import ConfigError

ADAMS = ("adam", "adamw")
IGNORED = ("set_grad_none", "fp32_optimizer_states")  # of how it steps, not of what it computes
_OWN = "take the section out, and give optimizer_arguments your own: any whose step traces is taken"
_BITS = "write AdamW; gradients are not compressed, fp16 and bf16 send them in 16 bit"
INSTEAD = {  # of what torch has not
    "lamb": _OWN,
    "lion": _OWN,
    "muon": "take the section out; torch.optim.Muon has the matrices and AdamW the rest, each in an add_optimizer",
    "onebitadam": _BITS,
    "zerooneadam": _BITS,
    "onebitlamb": _BITS,
    "muadam": _OWN,
    "muadamw": _OWN,
    "musgd": _OWN,
}
FILLED = {  # what the Hugging Face Trainer fills in for "auto"
    "lr": "TrainingArguments.learning_rate, by default 5e-5",
    "betas": "TrainingArguments.adam_beta1 and adam_beta2, by default [0.9, 0.999]",
    "eps": "TrainingArguments.adam_epsilon, by default 1e-8",
    "weight_decay": "TrainingArguments.weight_decay, by default 0.0",
}


def optimizer_of(kind: str, given: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """torch's class and its arguments.  Raises ConfigError for what would step otherwise than DeepSpeed's."""
    name = kind.lower()
    if name in INSTEAD:
        raise ConfigError(f"optimizer.type: torch has no {kind} as DeepSpeed has it; {INSTEAD[name]}")
    if "max_grad_norm" in given:
        raise ConfigError("optimizer.params.max_grad_norm: DeepSpeed refuses it too; write gradient_clipping")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    optimizer_class, arguments = _adam(name, arguments) if name in ADAMS else (_torchs(kind), arguments)
    known = [key for key in inspect.signature(optimizer_class).parameters if key != "params"]
    for key in arguments:
        if key not in known:
            raise ConfigError(f"optimizer.params.{key}: {kind} has no such parameter; it has {', '.join(known)}")
    return optimizer_class, arguments


def _adam(name: str, parameters: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    is_torchs, is_decoupled = (
        parameters.pop("torch_adam", False),
        parameters.pop("adam_w_mode", True) or name == "adamw",
    )
    optimizer_class = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    if is_torchs:
        return optimizer_class, parameters
    if not parameters.pop("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction: false; torch's Adam corrects its moments, always")
    if parameters.pop("amsgrad", False):
        raise ConfigError("optimizer.params.amsgrad: DeepSpeed's Adam has none either; set torch_adam to true too")
    parameters = {key: value for key, value in parameters.items() if key not in IGNORED}
    return optimizer_class, {"weight_decay": 0.0, **parameters}


def _torchs(kind: str) -> type[Optimizer]:
    for name, attribute in vars(torch.optim).items():
        if name.lower() == kind.lower() and inspect.isclass(attribute) and issubclass(attribute, Optimizer):
            return attribute
    raise ConfigError(f"optimizer.type: {kind!r} is neither DeepSpeed's nor in torch.optim")
