"""The Trainer of transformers with a Graph's steps does what the Trainer does: losses, norms, evaluation, resuming.

And the loops of Accelerate and of Lightning with a Graph do what those do.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _ranks import start_as_torchrun
from torch import Tensor
from torch.utils.data import IterableDataset

import graphzero as gz

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
pytest.importorskip("pytorch_lightning", reason="one of the loops is Lightning's")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4


def runs(rank: int, folder: Path) -> None:
    """On every rank: plain, with a Graph at stage 3, and at stage 2 from the checkpoint of that."""
    sys.path.insert(0, str(EXAMPLES))
    import trainer
    from transformers import BatchEncoding, default_data_collator

    class Stream(IterableDataset):
        def __init__(self, rows: list) -> None:
            self.rows = rows

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield from self.rows

    def run_uneven(name: str, kind: type, stream: bool, **more: object) -> None:
        """Rows of many lengths, padded to the longest of a batch; the last batch is smaller."""
        rows = [{key: x[: 4 + i % 13] for key, x in row.items()} for i, row in enumerate(trainer.windows(29, 16))]
        told = (
            {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}} if stream else {"num_train_epochs": 1}
        )
        made = kind(trainer.make_model(16, 16), trainer.arguments(str(folder / name), **told),
                    train_dataset=Stream(rows) if stream else rows, data_collator=to_longest, **more)  # fmt: skip
        made.train()
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(made.state.log_history))

    def padded(config: gz.GraphConfig) -> None:
        config.enable_zero(stage=3)
        trainer.pad_batches(config, 4, 20)

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
    for stream in (False, True):
        run_uneven(f"uneven {stream}, plain", trainer.Trainer, stream)
        run_uneven(f"uneven {stream}", trainer.GraphTrainer, stream, configure=padded)
    run("resumed", trainer.GraphTrainer, folder / "stage 3" / "checkpoint-2", **at(2))
    loops(rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def to_longest(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def pad(x: Tensor, number: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, max(len(row["labels"]) for row in rows) - len(x)), value=number)

    return {
        "input_ids": torch.stack([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(row["input_ids"]), 0) for row in rows]),
        "labels": torch.stack([pad(row["labels"], -100) for row in rows]),
    }


def loops(rank: int, folder: Path) -> None:
    """The loops of Accelerate and of Lightning, plain and with a Graph."""
    import accelerate_loop
    import lightning_loop

    losses = {
        "Accelerate": (accelerate_loop.train(16, 16, 16, 2), accelerate_loop.train_plainly(16, 16, 16)),
        "Lightning": tuple(
            lightning_loop.fit(module, 32, 16, 2, max_steps=3)
            for module in (lightning_loop.GraphModule(16, 16, 3), lightning_loop.PlainModule(16, 16))
        ),
    }
    if rank == 0:
        (folder / "loops.json").write_text(json.dumps(losses))


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
    for stream, steps in ((False, 2), (True, 3)):
        for key in ("loss", "grad_norm"):
            plain = found(tmp_path, f"uneven {stream}, plain", key)
            assert len(plain) == steps and found(tmp_path, f"uneven {stream}", key) == pytest.approx(plain, rel=1e-5)
    from transformers import LlamaForCausalLM

    weights = [
        LlamaForCausalLM.from_pretrained(tmp_path / name / f"checkpoint-{STEPS}") for name in ("plain", "stage 3")
    ]
    for ours, theirs in zip(*(model.parameters() for model in weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, (ours, theirs) in json.loads((tmp_path / "loops.json").read_text()).items():
        assert len(ours) == {"Accelerate": 2, "Lightning": 3}[name]
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert not os.path.exists(tmp_path / "stage 3" / "checkpoint-2" / "optimizer.pt")
