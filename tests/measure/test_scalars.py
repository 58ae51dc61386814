"""What is written for TensorBoard."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from torch import Tensor, nn

import graphzero as gz

sys.path.insert(0, str(Path(__file__).parent))
from traced_steps import clipped_graph  # noqa: E402


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert type(value) is float
        self.rows.append((tag, value, step))

    def close(self) -> None:
        self.closed = True

    def at(self, step: int) -> dict[str, float]:
        return {tag: value for tag, value, of in self.rows if of == step}


def graph_of(stage: int = 2) -> TrainGraph:
    return clipped_graph(gz.placement("cpu", range(2), virtual=True), stage)


def test_a_step_has_its_loss_rate_norm_seconds_tokens_and_peak() -> None:
    graph, writer = graph_of(), Writer()
    x = torch.randn(8, 64)
    with gz.TensorBoard(graph, writer=writer) as board:
        for _ in range(2):
            loss = graph(x)
            board.step(loss, tokens=512, accuracy=0.5)
    first, second = writer.at(1), writer.at(2)
    assert set(second) == {
        "loss", "accuracy", "lr", "grad_norm", "step_seconds", "tokens_per_second", "peak_bytes",
    }  # fmt: skip
    assert second["loss"] == pytest.approx(float(loss)) and second["lr"] == 1e-3
    assert second["grad_norm"] == pytest.approx(float(graph.grad_norm))
    assert second["peak_bytes"] == graph.plan.memory.peak
    assert second["tokens_per_second"] == pytest.approx(512 / second["step_seconds"])
    assert set(second) - set(first) == {"step_seconds", "tokens_per_second"}  # the first step has compiled
    assert not writer.closed  # it is the user's


def test_of_every_so_many_steps_one_is_written_with_the_mean_seconds_and_all_tokens() -> None:
    graph, writer = graph_of(), Writer()
    x = torch.randn(8, 64)
    board = gz.TensorBoard(graph, writer=writer, every=2, first=10)
    for _ in range(5):
        graph(x)
        board.step(tokens=100)
    assert {step for _, _, step in writer.rows} == {12, 14}
    found = writer.at(14)
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(100)


def test_a_scaled_loss_has_its_scale_and_says_whether_the_step_was_skipped() -> None:
    graph, writer = graph_of(), Writer()
    graph.config.enable_amp(dtype=torch.float16, init_scale=2.0**10)
    board = gz.TensorBoard(graph, writer=writer)
    for x in (torch.randn(8, 64), torch.full((8, 64), float("inf"))):
        board.step(graph(x))
    assert [writer.at(step)["skipped"] for step in (1, 2)] == [0.0, 1.0]
    assert writer.at(2)["loss_scale"] == writer.at(1)["loss_scale"] / 2 == 2.0**9


class TwoOptimizers(gz.Graph):
    def __init__(self) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        groups = [{"params": [self.a.weight], "lr": 0.5}, {"params": [self.a.bias], "lr": 0.25}]
        self.add_optimizer(torch.optim.SGD(groups), clip_grad_norm=1.0)
        self.add_optimizer(torch.optim.SGD(self.b.parameters(), lr=0.125))

    def build(self, x: Tensor) -> Tensor:
        loss = self.b(self.a(x)).square().mean()
        loss.backward()
        return loss


def test_several_groups_and_optimizers_are_numbered() -> None:
    graph, writer = TwoOptimizers(), Writer()
    gz.TensorBoard(graph, writer=writer).step(graph(torch.randn(2, 4)))
    found = writer.at(1)
    assert [found[f"lr/{i}"] for i in range(3)] == [0.5, 0.25, 0.125] == graph.learning_rates
    assert "grad_norm" in found


def test_other_ranks_than_the_first_write_nothing() -> None:
    with gz.testing.fake_world(2, rank=1):
        graph, writer = clipped_graph(None, 1), Writer()
        gz.TensorBoard(graph, writer=writer).step("no number, and nobody looks")
    assert writer.rows == []


@pytest.mark.parametrize(
    ("x", "word"), [(torch.ones(3), r"shape \[3\].*x.mean"), ("high", "str, not a number"), ([1.0], "list, not")]
)
def test_what_is_no_number_is_refused(x: Any, word: str) -> None:
    with pytest.raises(gz.ConfigError, match=word):
        gz.TensorBoard(graph_of(), writer=Writer()).step(x)


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(gz.ConfigError, match="either"):
        gz.TensorBoard(graph_of())
    with pytest.raises(gz.ConfigError, match="every=0"):
        gz.TensorBoard(graph_of(), tmp_path, every=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(gz.ConfigError, match="pip install tensorboard"):
        gz.TensorBoard(graph_of(), tmp_path)


def test_torchs_own_writer_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    graph = graph_of()
    with gz.TensorBoard(graph, tmp_path) as board:
        for _ in range(2):
            board.step(graph(torch.randn(8, 64)))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert {"loss", "lr", "grad_norm", "step_seconds", "peak_bytes"} <= set(found.Tags()["scalars"])
    assert [one.step for one in found.Scalars("loss")] == [1, 2]
