"""The Trainer of transformers with a Graph's steps does what the Trainer does: losses, norms, evaluation, resuming.

And the loops of Accelerate and of Lightning with a Graph do what those do.
"""

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from _ranks import start_as_torchrun
from torch import Tensor
from torch.utils.data import IterableDataset

import graphzero as gz

NEEDED = ("accelerate", "pytorch_lightning")  # imported by the ranks alone: it takes seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"it needs {' and '.join(NEEDED)}"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4


class Stream(IterableDataset):
    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self.rows


def runs(rank: int, folder: Path) -> None:
    """On every rank: plain, with a Graph at stage 3, and at stage 2 from the checkpoint of that."""
    sys.path.insert(0, str(EXAMPLES))
    import trainer
    from transformers import BatchEncoding, default_data_collator

    def run_uneven(name: str, kind: type, stream: bool, **more: object) -> None:
        """Rows of many lengths, padded to the longest of a batch; the last batch is smaller."""
        rows = [{key: x[: 4 + i % 13] for key, x in row.items()} for i, row in enumerate(trainer.windows(29, 16))]
        told = (
            {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}} if stream else {"num_train_epochs": 1}
        )
        made = kind(trainer.make_model(16, 16), trainer.arguments(str(folder / name), **told),
                    train_dataset=Stream(rows) if stream else rows, data_collator=to_longest, **more)  # fmt: skip
        made.train()
        unlabelled = [{"input_ids": row["input_ids"]} for row in rows[:11]]
        logits = made.predict(unlabelled).predictions
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(made.state.log_history))
            torch.save(torch.from_numpy(logits), folder / f"{name}.pt")

    def padded(config: gz.GraphConfig) -> None:
        config.enable_zero(stage=3)
        trainer.pad_batches(config, 4, 20)

    def run(name: str, kind: type, checkpoint: Path | None = None, **more: object) -> None:
        told = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "eval_strategy": "steps"}
        told |= {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        told |= {"greater_is_better": True}  # so that it is not the last one
        told |= {"eval_on_start": checkpoint is None}
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
        return torch.nn.functional.pad(x, (0, max(len(row["input_ids"]) for row in rows) - len(x)), value=number)

    batch = {
        "input_ids": torch.stack([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(row["input_ids"]), 0) for row in rows]),
    }
    if "labels" in rows[0]:
        batch["labels"] = torch.stack([pad(row["labels"], -100) for row in rows])
    return batch


def loops(rank: int, folder: Path) -> None:
    """The loops of Accelerate and of Lightning, plain and with a Graph."""
    import accelerate_loop
    import lightning_loop
    from pytorch_lightning.callbacks import ModelCheckpoint

    def fit(module: lightning_loop.PlainModule, *more: object, **options: object) -> list[float]:
        return lightning_loop.fit(module, accelerate_loop.make_loader(32, 16), 2, *more, max_epochs=2, **options)

    saves = ModelCheckpoint(folder / "lightning", every_n_train_steps=4, save_top_k=-1)  # an epoch has 4 steps
    told = {"max_steps": 6, "enable_checkpointing": True, "callbacks": [saves]}
    split = fit(lightning_loop.GraphModule(16, 16, 3), **told)
    plain = fit(lightning_loop.PlainModule(16, 16), max_steps=6)
    resumed = fit(lightning_loop.GraphModule(16, 16, 1), str(folder / "lightning" / "epoch=0-step=4.ckpt"), max_steps=6)
    losses = {
        "Accelerate": (accelerate_loop.train(16, 16, 16, 2), accelerate_loop.train_plainly(16, 16, 16)),
        "Lightning": (split, plain),
        "Lightning, resumed": (resumed, plain[4:]),
        "Lightning, a stream": fit_stream(rank),
    }
    if rank == 0:
        (folder / "loops.json").write_text(json.dumps(losses))


def fit_stream(rank: int) -> tuple[list[float], list[float]]:
    """Losses of a stream that ends a batch earlier on one rank, and those of one process that has all rows."""
    import lightning_loop
    import trainer
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    class Padding(lightning_loop.GraphModule):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            self.graph.config.set_shapes({"*": ("rows",)}, {"rows": 2}, fill={"batch.labels": -100})

    rows = trainer.windows(9, 16)
    module = Padding(16, 16, 2)
    loader = DataLoader(Stream(rows[rank::2]), 2, collate_fn=default_data_collator)
    losses = lightning_loop.fit(module, lightning_loop.UntilAllEnd(loader, module), 2)
    plain = lightning_loop.PlainModule(16, 16)
    optimizer, expected = plain.configure_optimizers(), []
    for first in (0, 4, 8):
        loss = plain.model(**default_data_collator(rows[first : first + 4])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    return losses, expected


def found(folder: Path, name: str, key: str) -> list[float]:
    return [one[key] for one in json.loads((folder / f"{name}.json").read_text()) if key in one]


def test_a_trainer_of_graphs_is_the_trainer_on_two_ranks(tmp_path):
    start_as_torchrun(runs, (tmp_path,), 2)
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        plain = found(tmp_path, "plain", key)
        assert len(plain) == (4 if key == "eval_loss" else STEPS)
        if key == "eval_loss":
            assert plain[3] == max(plain[1:3]) != plain[2]  # of the best model, which was loaded at the end
        for name in ("stage 3", "resumed"):
            assert found(tmp_path, name, key) == pytest.approx(plain, rel=1e-5), (name, key)
    for stream, steps in ((False, 2), (True, 3)):
        for key in ("loss", "grad_norm"):
            plain = found(tmp_path, f"uneven {stream}, plain", key)
            assert len(plain) == steps and found(tmp_path, f"uneven {stream}", key) == pytest.approx(plain, rel=1e-5)
        ours, theirs = (torch.load(tmp_path / f"uneven {stream}{name}.pt") for name in ("", ", plain"))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    from transformers import LlamaForCausalLM

    weights = [
        LlamaForCausalLM.from_pretrained(tmp_path / name / f"checkpoint-{STEPS}") for name in ("plain", "stage 3")
    ]
    for ours, theirs in zip(*(model.parameters() for model in weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, (ours, theirs) in json.loads((tmp_path / "loops.json").read_text()).items():
        assert len(ours) == {"Accelerate": 2, "Lightning": 6, "Lightning, a stream": 3}.get(name, 2)
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert not os.path.exists(tmp_path / "stage 3" / "checkpoint-2" / "optimizer.pt")
