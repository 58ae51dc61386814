"""The Trainer of transformers with a Graph's steps does what the Trainer does: losses, norms, evaluation, resuming.

And a Graph in a loop over Accelerate's loader, what Accelerate does.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from _ranks import start_as_torchrun

import graphzero as gz

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4


def runs(rank: int, folder: Path) -> None:
    """On every rank: plain, with a Graph at stage 3, and at stage 2 from the checkpoint of that."""
    sys.path.insert(0, str(EXAMPLES))
    import trainer
    from transformers import BatchEncoding, default_data_collator

    def run(name: str, kind: type, checkpoint: Path | None = None, **more: object) -> None:
        told = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "eval_strategy": "steps"}
        told |= {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        told |= {"greater_is_better": True}  # so that it is not the last one
        data = trainer.windows(90, 16)
        made = kind(
            trainer.make_model(16, 16), trainer.arguments(str(folder / name), **told), train_dataset=data[:80],
            eval_dataset=data[80:88:2], data_collator=lambda x: BatchEncoding(default_data_collator(x)), **more,
        )  # fmt: skip
        made.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        made.evaluate()
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(made.state.log_history))

    def at(stage: int):
        return {"configure": lambda config: config.enable_zero(stage=stage)}

    run("plain", trainer.Trainer)
    run("stage 3", trainer.GraphTrainer, **at(3))
    run("resumed", trainer.GraphTrainer, folder / "stage 3" / "checkpoint-2", **at(2))
    accelerated(rank, folder, trainer)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def accelerated(rank: int, folder: Path, trainer: object) -> None:
    """A loop over Accelerate's loader, all of it prepared and with a Graph."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    accelerator = Accelerator(cpu=True)
    samples = [{"input_ids": one["input_ids"], "labels": one["input_ids"]} for one in trainer.windows(16, 16)]
    loader = DataLoader(samples, batch_size=4, collate_fn=default_data_collator)

    class KeywordGraph(gz.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = trainer.make_model(16, 16)
            self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01), clip_grad_norm=1.0)
            self.config.enable_zero(stage=2)

        def build(self, **batch: torch.Tensor) -> torch.Tensor:
            loss = self.model(**batch).loss
            loss.backward()
            return loss

    graph, ours, theirs = KeywordGraph(), [], []
    for batch in accelerator.prepare(loader):
        ours.append(graph(**batch).item())
    model = trainer.make_model(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(accelerator.reduce(loss.detach(), "mean").item())
    if rank == 0:
        (folder / "accelerated.json").write_text(json.dumps([ours, theirs]))


def found(folder: Path, name: str, key: str) -> list[float]:
    return [one[key] for one in json.loads((folder / f"{name}.json").read_text()) if key in one]


def test_a_trainer_of_graphs_is_the_trainer_on_two_ranks(tmp_path):
    start_as_torchrun(runs, (tmp_path,), 2)
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        plain = found(tmp_path, "plain", key)
        assert len(plain) == (3 if key == "eval_loss" else STEPS)
        if key == "eval_loss":
            assert plain[2] == max(plain[:2]) != plain[1]  # of the best model, which was loaded at the end
        for name in ("stage 3", "resumed"):
            assert found(tmp_path, name, key) == pytest.approx(plain, rel=1e-5), (name, key)
    from transformers import LlamaForCausalLM

    weights = [
        LlamaForCausalLM.from_pretrained(tmp_path / name / f"checkpoint-{STEPS}") for name in ("plain", "stage 3")
    ]
    for ours, theirs in zip(*(model.parameters() for model in weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours, theirs = json.loads((tmp_path / "accelerated.json").read_text())
    assert len(ours) == 2 and ours == pytest.approx(theirs, rel=1e-5)
    assert not os.path.exists(tmp_path / "stage 3" / "checkpoint-2" / "optimizer.pt")
