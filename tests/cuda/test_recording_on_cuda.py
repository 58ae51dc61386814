"""A step in a CUDA graph is the step op by op: the same values, launched at once, in the memory that was planned."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from inside import executor_of
from steps import Language, RecordableGraph, adamw, batches, eager
from torch import Tensor, nn

import graphzero as gz
from graphzero.runtime.record.replay import Replayed

ONE, FOUR = (gz.placement("cuda", range(n), virtual=True) for n in (1, 4))
STEPS = 10


@pytest.fixture
def model() -> nn.Module:
    return Language()


class Scheduled(RecordableGraph):
    """With a rate that changes after every step, or every fourth."""

    def __init__(self, model: nn.Module, recorded: bool, every: int = 1, executor: str = "eager", rate: float = 1e-3):
        gz.Graph.__init__(self, ONE)
        self.model = model
        optimizer = adamw(model, lr=rate, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.7)
        self.add_optimizer(optimizer, lr_sch=schedule, clip_grad_norm=1.0)
        self.config.set_cuda_graph(recorded)
        self.config.set_executor(executor)


def executor(graph: gz.Graph) -> Replayed:
    found = executor_of(graph)
    assert isinstance(found, Replayed)
    return found


def together(graph: RecordableGraph, plain: RecordableGraph, given: list[Tensor], tolerance: float = 1e-5) -> None:
    """Both steps, on each batch; losses, norms and parameters agree."""
    for ids in given:
        torch.testing.assert_close(graph(ids), plain(ids), rtol=0, atol=tolerance)
        torch.testing.assert_close(graph.grad_norm, plain.grad_norm, rtol=tolerance * 10, atol=tolerance)
    parameters = [[*one.model.parameters()] for one in (graph, plain)]
    torch.testing.assert_close(*parameters, rtol=0, atol=tolerance)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", ["eager", "inductor"])
def test_ten_steps_with_a_scheduler_equal_steps_op_by_op(model, kind, every):
    graph = Scheduled(model, True, every, kind)
    together(graph, Scheduled(copy.deepcopy(model), False, every, kind), batches(STEPS))
    assert executor(graph).fed == ["lr_0"] and not executor(graph).refusal
    assert executor(graph).recorded == (1 if every == 1 else 2)


def test_in_bfloat16_a_scheduled_rate_keeps_its_digits(model):
    model = model.bfloat16()
    graph, plain = Scheduled(model, True, rate=0.03), Scheduled(copy.deepcopy(model), False, rate=0.03)
    together(graph, plain, batches(STEPS), tolerance=2e-2)
    assert executor(graph).fed and not executor(graph).refusal


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("placement", [ONE, FOUR], ids=["one rank", "four virtual ranks"])
def test_recorded_steps_equal_the_cpu(model, placement, stage):
    graph = RecordableGraph(copy.deepcopy(model), placement, stage, recorded=True)
    given = batches()
    for ids in given[:1] * 4:  # records, and replays, on a copy of the state
        before = copy.deepcopy(graph.full_state_dict())
        graph(ids)
        graph.load_state_dict(before)
    losses = [graph(ids).cpu() for ids in given]
    assert executor(graph).recorded and not executor(graph).refusal
    wanted, parameters = eager(model)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-5)
    full = graph.full_state_dict()["modules"]["model"]
    torch.testing.assert_close({name: full[name].cpu() for name in parameters}, parameters, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("nccl")
def test_a_world_of_one_over_nccl_is_recorded(model):
    alone = gz.placement("cuda", range(1))
    graph, plain = (RecordableGraph(copy.deepcopy(model), alone, 2, recorded=recorded) for recorded in (True, False))
    together(graph, plain, batches(6))
    assert executor(graph).recorded == 1


def test_a_loaded_state_and_an_evaluation_between_are_read(model):
    class Evaluate(gz.Graph):
        def __init__(self, model: nn.Module):
            super().__init__(ONE)
            self.model = model
            self.config.set_cuda_graph()

        def build(self, ids: Tensor) -> Tensor:
            return self.model(ids)

    other = copy.deepcopy(model)
    graph, plain = RecordableGraph(model, ONE, recorded=True), RecordableGraph(other, ONE)
    evaluate, given = Evaluate(model), batches(STEPS)
    saved: Any = None
    for step, ids in enumerate(given):
        if step == 5:
            saved = [copy.deepcopy(one.full_state_dict()) for one in (graph, plain)]
        if step == 8:
            for one, state in zip((graph, plain), saved, strict=True):
                one.load_state_dict(state)
        together(graph, plain, [ids])
        with torch.no_grad():
            torch.testing.assert_close(evaluate(ids), other(ids.cuda()), rtol=0, atol=1e-5)
    assert executor(graph).recorded and executor(evaluate).recorded == 1
    assert not executor(graph).refusal + executor(evaluate).refusal


def test_what_a_caller_holds_does_not_change_with_the_next_replay(model):
    graph, given = RecordableGraph(model, ONE, recorded=True), batches(STEPS)
    held = [(graph(ids), graph.grad_norm) for ids in given]
    kept = copy.deepcopy(held)
    for ids in given:
        graph(ids)
    torch.testing.assert_close(held, kept, rtol=0, atol=0)


def test_dropout_draws_in_a_replay_what_the_cpu_draws():
    class Draw(gz.Graph):
        def build(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.4)

    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(5)
        graph = Draw(gz.placement(device, range(2), virtual=True))
        graph.config.set_cuda_graph(device == "cuda")
        found.append([graph(torch.ones(6, 50)).cpu() for _ in range(6)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len({str(x) for x in found[0]}) == 6


def test_a_replay_does_not_wait_for_the_gpu(model):
    graph = RecordableGraph(model, ONE, stage=2, recorded=True)
    given = [ids.cuda() for ids in batches(6)]
    for ids in given[:4]:
        graph(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in given[4:]:
            graph(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert executor(graph).recorded == 1


def test_memory_of_the_recording_is_what_was_planned(record_property):
    model = Language(vocabulary=67, width=512, layers=6, heads=8, context=256)
    graph = RecordableGraph(model, ONE, recorded=True)
    ids = batches(1, size=16, length=256)[0].cuda()
    for _ in range(2):
        graph(ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    graph(ids)
    torch.cuda.synchronize()
    assert executor(graph).recorded == 1
    planned, measured = graph.plan.memory.peak, torch.cuda.max_memory_allocated()
    facts = {"planned": planned, "measured": measured, "reserved": torch.cuda.memory_reserved()}
    for name, nbytes in facts.items():
        record_property(name, nbytes)
    # Beside tensors there are workspaces of cuBLAS and cuDNN, and the allocator rounds up.
    assert 0.98 * planned <= measured <= 1.05 * planned + 96 * 2**20, facts
    # The pool of the graph keeps what a step needs at its peak, in blocks of the allocator's sizes.
    assert facts["reserved"] <= 1.15 * planned + 256 * 2**20, facts


def test_graphs_are_recorded_after_all_others_are_gone(model):
    graph, given = RecordableGraph(model, ONE, recorded=True), batches(6)
    for ids in given:
        graph(ids)
    executor(graph)._discard("this test wants another")
    for ids in given:
        graph(ids)
    assert executor(graph).recorded == 2 and not executor(graph).refusal


def test_a_recording_outlives_the_workspaces_of_others(model):
    graph, plain = (RecordableGraph(copy.deepcopy(model), ONE, recorded=recorded) for recorded in (True, False))
    together(graph, plain, batches(4))
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's reduce-overhead does
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    together(graph, plain, batches(4))
    assert executor(graph).recorded == 1 and all(x.isnan().all() for x in taken)


@torch.library.custom_op("cuda_graph_test::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x * (0.5 if x.flatten()[0].item() < 1e9 else 0.0)


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad * 0.5)  # type: ignore[arg-type]


def test_a_step_that_waits_for_the_gpu_runs_op_by_op_and_others_are_recorded_after_it(model):
    class Halved(RecordableGraph):
        def build(self, ids: Tensor) -> Tensor:
            loss = halved(self.model(ids))
            loss.backward()
            return loss

    graph, plain = (Halved(copy.deepcopy(model), ONE, recorded=recorded) for recorded in (True, False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together(graph, plain, batches(6))
    texts = [str(w.message) for w in caught if "without a CUDA graph" in str(w.message)]
    assert len(texts) == 1 and "captur" in texts[0] and "halved" in texts[0]
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # torch's allocator and its generator are in no capture any more
    assert torch.rand(8, device="cuda").unique().numel() > 1
    after, plain = (RecordableGraph(copy.deepcopy(model), ONE, recorded=recorded) for recorded in (True, False))
    together(after, plain, batches(6))
    assert executor(after).recorded == 1 and not executor(after).refusal
