"""A few models of the zoo train as in plain PyTorch, and its harness tells outcomes apart."""

import json

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from zoo import run
from zoo.run import list_cases
from zoo.trial import Trial, judge, load_packages

MODELS = (
    "transformers/llama/LlamaForCausalLM",
    "transformers/t5/T5ForConditionalGeneration",
    "transformers/vit/ViTForImageClassification",
)


def trial(train):
    return Trial(nn.Linear(4, 4), lambda step: {"x": torch.randn(8, 4)}, train)


def square(module, batch):
    loss = module(batch["x"]).square().mean()
    loss.backward()
    return loss


@pytest.fixture(scope="module", autouse=True)
def packages():
    before = torch.get_default_dtype()
    load_packages()
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_trains_as_in_plain_pytorch(name):
    record = run.try_case(name, ["graph"], {})
    assert record["outcome"] == "equal", record


def test_a_loss_that_differs_is_wrong():
    def train(module, batch):
        captured = type(batch["x"]) is not torch.Tensor
        loss = (1 + 1e-6 * captured) * module(batch["x"]).square().mean()
        loss.backward()
        return loss

    assert judge(lambda: trial(train))["outcome"] == "wrong"


def test_a_step_that_draws_random_numbers_is_not_compared():
    def train(module, batch):
        loss = (module(batch["x"]) * torch.rand(8, 4)).square().mean()
        loss.backward()
        return loss

    record = judge(lambda: trial(train))
    assert record["outcome"] == "skipped" and "random" in record["cause"]


def test_a_step_that_plain_pytorch_does_not_run_is_skipped():
    record = judge(lambda: trial(lambda module, batch: module(batch["absent"])))
    assert record["outcome"] == "skipped" and record["cause"].startswith("KeyError")


def test_an_error_of_graphzeros_own_is_a_refusal_and_any_other_is_a_crash():
    def reads(module, batch):
        return square(module, batch) if float(batch["x"].sum()) < 1e9 else None

    assert judge(lambda: trial(reads))["outcome"] == "refused"


def test_a_process_that_dies_is_a_crash():
    record = run.run_in_child(lambda: torch.ops.aten._no_such_op())
    assert record["outcome"] == "crashed"


def test_every_architecture_of_transformers_is_in_the_zoo():
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    kinds = {name.split("/")[1] for name in list_cases() if name.startswith("transformers/")}
    assert kinds >= set(MODEL_MAPPING_NAMES)


def test_results_continue_where_they_were(tmp_path):
    path = tmp_path / "zoo.jsonl"
    lines = [{"name": "a", "family": "f", "outcome": "wrong"}, {"name": "a", "family": "f", "outcome": "equal"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run.read_records(path)
    assert found["a"]["outcome"] == "equal"
    assert run.is_done(found["a"], "graph") and not run.is_done(found["a"], "export")


def test_the_tables_count_by_family_and_by_cause():
    records = [
        {"name": "a/b", "family": "f", "outcome": "refused", "cause": "CaptureError: x", "export": "taken"},
        {"name": "a/c", "family": "f", "outcome": "equal", "export": "taken"},
    ]
    text = run.format_summary(records)
    assert "50.0 %" in text and "CaptureError: x" in text
