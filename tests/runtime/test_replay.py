"""A replayed step is the step: whatever changes between calls, and whatever cannot be recorded.

On a recorder without a GPU (``tape``) that is as strict as CUDA's; tests/cuda has the same on a GPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from inside import executor_of
from tape import Tapes
from torch import Tensor, nn

import graphzero as gz
from graphzero.runtime.record import cuda_graph, replay
from graphzero.runtime.record.replay import Replayed
from graphzero.testing import fake_world, measure_step, trace_step

pytestmark = [
    pytest.mark.same_kernels,  # a replay runs the executor's ops outside of it
    pytest.mark.at_once,  # strict transfers move data where a tape does not see it
]
STEPS = 8


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    made = Tapes()
    monkeypatch.setattr(cuda_graph, "check", lambda placement: None)
    monkeypatch.setattr(cuda_graph, "recorder_of", lambda world: made)
    return made


def loss_and_output(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    predicted = model(x)
    return F.cross_entropy(predicted.float(), y), predicted


def adamw_graph(
    model: nn.Module, make: Callable[[Any], Any] = torch.optim.AdamW, recorded: bool = True, kind: type = TrainGraph,
    **options: Any,
) -> TrainGraph:  # fmt: skip
    options = {"placement": 1, "clip": 1.0, **options}
    graph = kind(model, loss_and_output, make(model.parameters()), **options)
    graph.config.set_cuda_graph(recorded)
    return graph


class Evaluate(gz.Graph):
    def __init__(self, model: nn.Module, ranks: int = 1, recorded: bool = True):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model = model
        self.config.set_cuda_graph(recorded)

    def build(self, x: Tensor) -> Tensor:
        return self.model(x)


def network(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)).to(dtype)


def batches(steps: int = STEPS, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(8, 6, generator=generator).to(dtype)  # noqa: E731
    return [(draw(), torch.randint(4, (8,), generator=generator)) for _ in range(steps)]


def executor(graph: gz.Graph) -> Replayed:
    assert graph._selection.last is not None
    found = executor_of(graph)
    assert isinstance(found, Replayed)
    return found


def both(make: Callable[[bool], gz.Graph], given: list[Any], rtol: float = 0.0, atol: float = 0.0) -> gz.Graph:
    """Run a Graph with and without recordings; outputs, parameters and states must agree in every step."""
    graph, plain = make(True), make(False)
    for arguments in given:
        torch.manual_seed(3)
        found = graph(*arguments)
        torch.manual_seed(3)
        torch.testing.assert_close(found, plain(*arguments), rtol=rtol, atol=atol)
        torch.testing.assert_close(graph.grad_norm, plain.grad_norm, rtol=rtol, atol=atol)
    found, wanted = graph.full_state_dict(), plain.full_state_dict()
    torch.testing.assert_close(found["modules"], wanted["modules"], rtol=rtol, atol=atol)
    for one, other in zip(found["optimizers"], wanted["optimizers"], strict=True):
        torch.testing.assert_close(one["state"], other["state"], rtol=rtol, atol=atol)
    return graph


# ---- what a replay does


@pytest.mark.parametrize("ranks, stage", [(1, 0), (4, 2), (4, 3)])
def test_replayed_steps_equal_steps_op_by_op(tapes: Tapes, ranks: int, stage: int) -> None:
    graph = both(lambda recorded: adamw_graph(network(), placement=ranks, stage=stage, recorded=recorded), batches())
    assert (tapes.warm_ups, tapes.records, tapes.replays) == (2, 1, STEPS - 2)
    assert executor(graph).about == "CUDA graph: recorded once, replayed 6 times since"
    assert executor(graph).about in repr(graph)


def test_dropout_draws_anew_in_each_replay_and_as_without(tapes: Tapes) -> None:
    x, y = batches(1)[0]
    graph, plain = adamw_graph(network(dropout=0.5)), adamw_graph(network(dropout=0.5), recorded=False)
    for one in (graph, plain):
        one.optimizer.param_groups[0]["lr"] = 0.0
    torch.manual_seed(4)
    found = [graph(x, y)[1] for _ in range(6)]
    torch.manual_seed(4)
    wanted = [plain(x, y)[1] for _ in range(6)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert tapes.replays == 4 and len({str(x) for x in found}) == 6


def test_what_a_caller_holds_does_not_change_with_the_next_replay(tapes: Tapes) -> None:
    graph = adamw_graph(network())
    held = [(graph(*given), graph.grad_norm) for given in batches()]
    kept = copy.deepcopy(held)
    for given in batches():
        graph(*given)
    torch.testing.assert_close(held, kept, rtol=0, atol=0)


def test_a_number_that_build_returns_is_this_calls(tapes: Tapes) -> None:
    class Scaled(Evaluate):
        def build(self, x: Tensor, factor: float) -> tuple[Tensor, float]:  # type: ignore[override]
            return self.model(x) * factor, factor * 2

    graph, plain = Scaled(network()), Scaled(network(), recorded=False)
    for step, (x, _) in enumerate(batches()):
        torch.testing.assert_close(graph(x, 0.5 + step), plain(x, 0.5 + step), rtol=1e-6, atol=0)
    assert tapes.records == 1 and tapes.replays >= 5


def test_inputs_of_any_strides_and_one_input_for_all_ranks_are_read(tapes: Tapes) -> None:
    class Weighted(Evaluate):
        def build(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return self.model(x) * weights

    graph = Weighted(network(), ranks=2)
    graph.config.set_input("weights", sbp=gz.sbp.B)
    for step in range(6):
        x, weights = torch.randn(6, 8).t(), torch.full((4,), float(step))
        x = x if step % 2 else x.contiguous()
        torch.testing.assert_close(graph(x, weights), graph.model(x).detach() * weights)
    assert tapes.replays == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_recorded_has_run_before_just_so(tapes: Tapes, dtype: torch.dtype) -> None:
    """Kernels are chosen, compiled and loaded in runs before: none is left to a recording."""
    graph = adamw_graph(network(dtype), scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    for x, y in batches(5, dtype):
        graph(x.t().contiguous().t(), y)
    assert tapes.records == 1 and "lr_0" in executor(graph).fed
    assert tapes.recorded and tapes.recorded == tapes.warmed


# ---- numbers that change


SCHEDULES = {
    "each step": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "now and then": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name, often", [*((name, "each step") for name in OPTIMIZERS), ("AdamW", "now and then")])
def test_a_scheduled_rate_is_read_from_memory(tapes: Tapes, name: str, often: str) -> None:
    graph = both(
        lambda recorded: adamw_graph(network(), OPTIMIZERS[name], recorded=recorded, scheduler=SCHEDULES[often]),
        batches(12), rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    assert executor(graph).fed and not executor(graph).refusal
    assert tapes.records == (1 if often == "each step" else 2)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_in_16_bits_a_number_from_memory_keeps_its_digits(tapes: Tapes, name: str) -> None:
    """1 - lr * weight_decay is 0.995 here, which bfloat16 rounds to 0.996."""
    dtype = torch.bfloat16
    graph = both(
        lambda recorded: adamw_graph(network(dtype), OPTIMIZERS[name], recorded, scheduler=SCHEDULES["each step"]),
        batches(dtype=dtype), rtol=2e-2 if name == "SGD" else 0, atol=2e-3 if name == "SGD" else 0,
    )  # fmt: skip
    assert executor(graph).fed and tapes.replays


def test_a_float_input_is_read_from_memory(tapes: Tapes) -> None:
    class Weighted(TrainGraph):
        def build(self, x: Tensor, y: Tensor, weight: float) -> Tensor:  # type: ignore[override]
            loss = F.cross_entropy(self.model(x), y) * weight
            loss.backward()
            return loss

    given = [(*pair, 1.0 + step) for step, pair in enumerate(batches())]
    graph = both(lambda recorded: adamw_graph(network(), recorded=recorded, kind=Weighted), given, rtol=1e-6, atol=1e-7)
    assert executor(graph).fed == ["weight"] and tapes.records == 1


def test_a_constant_that_changes_once_is_recorded_anew(tapes: Tapes) -> None:
    graph, plain = adamw_graph(network()), adamw_graph(network(), recorded=False)
    for step, given in enumerate(batches(12)):
        for one in (graph, plain):
            one.optimizer.param_groups[0]["betas"] = (0.9 if step < 6 else 0.8, 0.99)
        torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    assert tapes.records == 2 and not executor(graph).refusal


def test_a_constant_that_changes_in_each_step_ends_recording_with_a_warning(tapes: Tapes) -> None:
    graph, plain = adamw_graph(network()), adamw_graph(network(), recorded=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, given in enumerate(batches(20)):
            for one in (graph, plain):
                one.optimizer.param_groups[0]["betas"] = (0.9 - step // 2 / 100, 0.99)
            torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    assert tapes.records == replay.PATIENCE
    (text,) = [str(w.message) for w in caught if "CUDA graph" in str(w.message)]
    assert "betas_0_0" in text and "constant" in text and "op by op" in text and len(text) < 600
    assert executor(graph).about in repr(graph) and "none" in executor(graph).about


# ---- state


def test_an_evaluation_between_steps_throws_no_recording_away(tapes: Tapes) -> None:
    model, other = network(), network()
    graph, plain = adamw_graph(model), adamw_graph(other, recorded=False)
    evaluate, plainly = Evaluate(model), Evaluate(other, recorded=False)
    for x, y in batches():
        torch.testing.assert_close(graph(x, y), plain(x, y), rtol=0, atol=0)
        torch.testing.assert_close(evaluate(x), plainly(x), rtol=0, atol=0)
    assert tapes.records == 2 and tapes.replays == 2 * (STEPS - 2)


@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 3)])
def test_what_eager_code_writes_between_steps_is_read_and_throws_no_recording_away(
    tapes: Tapes, ranks: int, stage: int
) -> None:
    graph, plain = (
        adamw_graph(network(), placement=ranks, stage=stage, recorded=recorded) for recorded in (True, False)
    )
    for given in batches():
        torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
        for one in (graph, plain):
            with one.full_parameters(), torch.no_grad():
                one.model[0].weight.mul_(0.9)
                one.model[3].bias = nn.Parameter(one.model[3].bias + 1)
    assert tapes.records == 1 and tapes.replays == STEPS - 2


def test_two_batch_shapes_have_a_recording_each(tapes: Tapes) -> None:
    given = [(x[: 8 - 4 * (i % 2)], y[: 8 - 4 * (i % 2)]) for i, (x, y) in enumerate(batches(12))]
    both(lambda recorded: adamw_graph(network(), recorded=recorded), given)
    assert tapes.records == 2 and tapes.replays == 8


@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 2), (2, 3)])
def test_a_loaded_state_is_where_the_next_step_begins(tapes: Tapes, ranks: int, stage: int) -> None:
    graph, plain = (
        adamw_graph(network(), placement=ranks, stage=stage, recorded=recorded) for recorded in (True, False)
    )
    saved = {}
    for step, given in enumerate(batches(10)):
        if step == 4:
            saved = {one: copy.deepcopy(one.full_state_dict()) for one in (graph, plain)}
        if step == 7:
            for one in (graph, plain):
                one.load_state_dict(saved[one])
        torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    assert tapes.replays >= 5


def test_values_written_into_a_parameter_between_calls_are_read(tapes: Tapes) -> None:
    graph, plain = adamw_graph(network()), adamw_graph(network(), recorded=False)
    for step, given in enumerate(batches()):
        if step == 5:
            for one in (graph, plain):
                with torch.no_grad():
                    one.model[0].weight.mul_(0.5)
        torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    assert tapes.records == 1


@pytest.mark.parametrize("what", ["a parameter's data", "an optimizer state"])
def test_a_tensor_put_in_place_of_another_is_read(tapes: Tapes, what: str) -> None:
    graph, plain = adamw_graph(network()), adamw_graph(network(), recorded=False)
    for step, given in enumerate(batches()):
        if step == 5:
            for one in (graph, plain):
                weight = one.model[0].weight
                if what == "a parameter's data":
                    weight.data = weight.data.clone() * 0.5
                else:
                    one.optimizer.state[weight]["exp_avg"] = torch.ones_like(weight)
        torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    assert tapes.records == 2


def test_a_copy_of_a_graph_replays_nothing_of_the_other(tapes: Tapes) -> None:
    graph, given = adamw_graph(network()), batches()
    for pair in given[:4]:
        graph(*pair)
    twin = copy.deepcopy(graph)
    before = graph.model[0].weight.detach().clone()
    found = [twin(*pair) for pair in given[4:]]
    torch.testing.assert_close(graph.model[0].weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(found, [graph(*pair) for pair in given[4:]], rtol=0, atol=0)
    assert executor(twin).recorded == 1 and executor(graph).recorded == 1
    assert executor(twin) is not executor(graph)


# ---- runs that are watched, and failures


def test_a_measured_run_is_not_replayed_and_leaves_the_recording(tapes: Tapes) -> None:
    graph = adamw_graph(network(), placement=2, stage=2)
    given = batches()
    for pair in given[:4]:
        graph(*pair)
    measured = measure_step(graph, *given[4])
    assert measured.peak and trace_step(graph, *given[5])
    assert tapes.replays == 2
    graph(*given[6])
    assert tapes.replays == 3 and tapes.records == 1


def test_a_step_that_cannot_be_recorded_runs_op_by_op_and_says_why(tapes: Tapes) -> None:
    tapes.host_reads.append(torch.ops.replay_test.halved.default)
    graph, plain = adamw_graph(reading()), adamw_graph(reading(), recorded=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in batches():
            torch.testing.assert_close(graph(*given), plain(*given), rtol=0, atol=0)
    (text,) = [str(w.message) for w in caught if "CUDA graph" in str(w.message)]
    assert "not permitted when stream is capturing" in text and "halved" in text and "test_replay.py" in text
    assert tapes.records == 1 and tapes.replays == 0
    assert "op by op" in repr(graph)


@torch.library.custom_op("replay_test::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x * (0.5 if x.flatten()[0].item() < 1e9 else 0.0)


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad * 0.5)  # type: ignore[arg-type]


def reading() -> nn.Module:
    """A network with an op that reads on the host, of which nobody knows before it runs."""

    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halved(x)

    return nn.Sequential(*network(), Halved())


def test_after_a_replay_that_failed_nobody_trusts_the_state(tapes: Tapes) -> None:
    graph = adamw_graph(network())
    for given in batches(4):
        graph(*given)
    tapes.fails = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph(*batches(1)[0])
    with pytest.raises(gz.GraphZeroError, match="in the middle of its update"):
        graph(*batches(1)[0])


def test_a_step_to_be_recorded_compiles_without_a_gpu_and_not_for_several_processes() -> None:
    def compiled(placement: Any) -> gz.Graph:
        graph = adamw_graph(network(), placement=placement)
        return graph.compile(*(x.to("meta") for x in batches(1)[0]))

    assert "not recorded" not in repr(compiled(gz.placement("cuda", range(4), virtual=True)))
    with fake_world(2), pytest.raises(gz.ConfigError, match="several processes"):
        compiled(gz.placement("cuda", range(2)))


def test_cuda_graphs_are_refused_where_there_is_no_gpu_to_record() -> None:
    graph = adamw_graph(network())
    with pytest.raises(gz.ConfigError, match="not on GPUs"):
        graph.compile(*batches(1)[0])
    with pytest.raises(gz.ConfigError, match="not on GPUs"):
        graph(*batches(1)[0])
    graph.config.set_cuda_graph(False)
    graph(*batches(1)[0])
    with pytest.raises(gz.ConfigError, match="True or False"):
        graph.config.set_cuda_graph("yes")  # type: ignore[arg-type]


def test_a_check_is_read_after_each_replay_and_says_that_the_update_has_been_made(tapes: Tapes) -> None:
    class Checked(TrainGraph):
        def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            assert (x < 100).all(), "x is large"
            return super().build(x, y)

    graph, (x, y) = adamw_graph(nn.Linear(4, 3), kind=Checked), (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    for _ in range(STEPS):
        graph(x, y)
    executor = executor_of(graph)
    assert isinstance(executor, Replayed)
    assert executor.recorded == 1
    with pytest.raises(gz.CheckError, match="x is large[\\s\\S]*its update has been made"):
        graph(x * 1e4, y)
    with pytest.raises(gz.GraphZeroError, match="in the middle of its update"):
        graph(x, y)
