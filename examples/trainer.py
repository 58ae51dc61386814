"""transformers' Trainer with the training step of a Graph: its arguments, callbacks, logs and checkpoints stay.

    torchrun --standalone --nproc-per-node=2 examples/trainer.py

``GraphTrainer`` is the glue, to copy; it needs ``accelerate``, as the Trainer does.  docs/loops.md says what it is.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from text import VOCABULARY, standard_library
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import graphzero as gz

FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}  # what padded tokens are in a collator's batch


class TrainerGraph(gz.Graph):
    """One step of a Trainer: the loss that it computes, over the batch of all ranks and micro-batches."""

    def __init__(self, trainer: GraphTrainer, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.model = trainer.model
        self.add_optimizer(optimizer, clip_grad_norm=trainer.args.max_grad_norm or None)
        self.compute_loss = trainer.compute_loss

    def build(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.compute_loss(self.model, dict(inputs))
        loss.backward()
        return loss


class EvaluationGraph(gz.Graph):
    """The loss, if there are labels, and the logits of a batch of all ranks, by modules that a TrainerGraph trains."""

    def __init__(self, trainer: GraphTrainer):
        super().__init__()
        self.model, self.compute_loss = trainer.model, trainer.compute_loss
        self.config.enable_amp(trainer.args.bf16)
        trainer.configure(self.config)  # for its shapes
        self.config.enable_zero(False)  # what is split is split by the TrainerGraph, which has the optimizer

    def build(self, inputs: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
        if "labels" not in inputs:
            return None, self.model(**inputs)["logits"]
        loss, outputs = self.compute_loss(self.model, dict(inputs), return_outputs=True)
        return loss, outputs["logits"]


class GraphTrainer(Trainer):
    """A Trainer whose steps a Graph takes.  configure: is given the Graph's configuration, to choose a stage."""

    def __init__(self, *args: Any, configure: Callable[[gz.GraphConfig], None] = lambda config: None, **more: Any):
        super().__init__(*args, **more)
        if self.args.fp16:
            raise gz.ConfigError("GraphTrainer: fp16 has a scale of accelerate's; take bf16=True")
        self.configure, self.waiting = configure, []

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # which wraps in DDP what it trains
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    @functools.cached_property
    def graph(self) -> TrainerGraph:
        """The training step as a Graph, created at its first use: then there is an optimizer."""
        graph = TrainerGraph(self, self.optimizer.optimizer)  # the second is create_optimizer's
        graph.config.enable_amp(self.args.bf16)
        self.configure(graph.config)
        return graph

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Wait for all micro-batches of a step, then take it; the optimizer's own step finds no gradients."""
        model.train()
        self.waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self.waiting = self.waiting, []
        if len({tuple(x.shape for x in part.values()) for part in parts}) > 1 and self.graph.config.shapes is None:
            raise gz.ConfigError(
                "the micro-batches of a step have unequal shapes, as of a collator that pads to the longest row, or of "
                "a smaller last batch; let the Graph pad them: GraphTrainer(configure=pad_batches), or another "
                "function that calls config.set_shapes"
            )
        self.graph.config.set_gradient_accumulation_steps(len(parts))
        loss: Tensor = self.graph(
            {name: torch.cat(pad_rows([part[name] for part in parts], name)) for name in parts[0]}
        )
        return loss

    @functools.cached_property
    def evaluation(self) -> EvaluationGraph:
        return EvaluationGraph(self)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, ...]:
        """Loss, logits and labels; parameters may be split, so the model cannot be called by itself."""
        inputs = dict(self._prepare_inputs(inputs))  # collators of tokenizers give a BatchEncoding
        loss, logits = self.evaluation(inputs)
        return (loss, None, None) if prediction_loss_only else (loss, logits, inputs.get("labels"))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.graph.grad_norm  # the Graph has clipped

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.graph.grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        trained = self.graph.full_state_dict()["modules"]["model"] if self.optimizer else None  # every rank calls it
        self._save(output_dir, state_dict=trained)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        gz.save(self.graph, Path(output_dir) / "graphzero", extra={"schedule": self.lr_scheduler.state_dict()})

    def _load_best_model(self) -> None:
        gz.load(self.graph, Path(self.state.best_model_checkpoint or "") / "graphzero")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(gz.load(self.graph, Path(checkpoint) / "graphzero")["schedule"])


def pad_batches(config: gz.GraphConfig, rows: int = 8, tokens: int = 64) -> None:
    """Pad rows and tokens of all inputs to multiples, so that few programs serve batches of many shapes."""
    fill = {f"inputs.{name}": number for name, number in FILL.items()}
    config.set_shapes({"inputs.*": ("rows", "tokens")}, {"rows": rows, "tokens": tokens}, fill=fill)


def pad_rows(parts: list[Tensor], name: str) -> list[Tensor]:
    """The micro-batches of one input, with rows as long as the longest of them."""
    longest = max(part.shape[1] for part in parts)
    return [nn.functional.pad(part, (0, longest - part.shape[1]), value=FILL.get(name, 0)) for part in parts]


def make_model(context: int, width: int = 64) -> LlamaForCausalLM:
    """A tiny Llama over bytes.  Of a GPT2LMHeadModel the Trainer counts a target a row too many, whose loss is less."""
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=context, **shape, **ends))


def windows(count: int, context: int) -> list[dict[str, Tensor]]:
    """Samples of Python's standard library; every second one has a first half that is not predicted."""
    ids = torch.frombuffer(bytearray(standard_library(count * context)), dtype=torch.uint8).long().view(count, context)
    labels = ids.clone()
    labels[::2, : context // 2] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def arguments(folder: str, **more: Any) -> TrainingArguments:
    required = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
    }
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(output_dir=folder, **(required | quiet | more))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--plain", action="store_true", help="the Trainer itself, to compare")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keywords: dict[str, Any] = (
            {} if options.plain else {"configure": lambda config: config.enable_zero(stage=options.stage)}
        )
        kind, keywords["train_dataset"] = Trainer if options.plain else GraphTrainer, windows(2000, 64)
        trainer = kind(make_model(64), arguments(folder, max_steps=options.steps), **keywords)
        trainer.train()
        if int(os.environ.get("RANK", 0)) == 0:
            for one in trainer.state.log_history[:-1]:
                print(f"step {one['step']}: loss {one['loss']:.6f}, norm {one['grad_norm']:.5f}", flush=True)


if __name__ == "__main__":
    main()
