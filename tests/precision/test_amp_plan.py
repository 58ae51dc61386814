"""What mixed precision costs: bytes a parameter, bytes sent, and that calls cost what plans say."""

import gc

import pytest
import torch
from inside import executor_of
from precision_toys import BF16, F16, amp_graph, batch_of, gpt, mlp, virtual

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.testing.measure import measure_step

PAPERS = {0: lambda n: 16, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n, 3: lambda n: 16 / n}


def wide(stage, ranks, dtype=BF16, **more):
    """A model whose sizes divide by the ranks, compiled."""
    model = mlp(width=64)
    graph = amp_graph(model, stage, virtual(ranks), dtype, **more)
    return graph.compile(*batch_of(model, 0, 8))


@pytest.mark.parametrize(
    "stage, ranks, dtype", [*((stage, 4, BF16) for stage in range(4)), (0, 1, F16), (1, 2, F16), (3, 2, F16)]
)
def test_model_state_is_within_the_papers_bytes_a_parameter(stage, ranks, dtype):
    plan = wide(stage, ranks, dtype).plan
    assert plan.memory.model_state / plan.parameters <= PAPERS[stage](ranks) + 1e-2


@pytest.mark.parametrize("stage", [2, 3])
def test_half_of_the_bytes_are_sent(stage):
    full, half = wide(stage, 4, None).plan, wide(stage, 4).plan
    of = [sum(c.bytes for c in plan.collectives if c.what_for != "other") for plan in (full, half)]
    assert of[1] == of[0] / 2
    assert half.comm_volume == full.comm_volume


def test_reductions_in_float32_are_asked_for_and_cost_twice_as_much():
    narrow, wide_ = wide(2, 4), wide(2, 4, reduce_dtype=torch.float32)
    sent = [sum(c.bytes for c in graph.plan.collectives if c.what_for == "gradients") for graph in (narrow, wide_)]
    assert sent[1] == 2 * sent[0]
    kinds = {str(graph.program.gradients()["model.body.0.weight"].meta["type"].dtype) for graph in (narrow, wide_)}
    assert kinds == {"torch.bfloat16", "torch.float32"}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_copy_that_forward_reads_is_gathered_once_and_not_held_between_calls(stage):
    plan = wide(stage, 4).plan
    names = [name for c in plan.collectives if c.kind == "all_gather" for name in c.names]
    assert len(names) == len(set(names)) == 6
    assert all(c.phase == "forward" for c in plan.collectives if c.kind == "all_gather")
    assert plan.memory["compute_parameters"] == 0


def test_the_copies_are_compute_parameters_in_the_plan():
    for stage in (0, 2, 3):
        spans = [span for span in liveness(wide(stage, 4).program).spans() if span.category == "compute_parameters"]
        assert 2 * 64 * 256 in [span.nbytes for span in spans]
        assert all(span.begin >= 0 for span in spans)


@pytest.mark.parametrize("dtype, clip, stages", [(BF16, None, (1, 3)), (F16, 1.0, (0, 2))])
def test_a_call_takes_and_sends_what_its_plan_says(dtype, clip, stages):
    for stage in stages:
        with gz.testing.fake_world(2):
            model = gpt()
            graph = amp_graph(model, stage, dtype=dtype, clip=clip)
            batch = batch_of(model, 0, 4)
            graph(*batch)
            check_measured(graph, batch, stage)


def check_measured(graph, batch, stage):
    gc.collect()
    plan, measured = graph.plan, measure_step(graph, *batch)
    assert measured.peak == plan.memory.peak, f"stage {stage}"
    assert measured.resident == {name: nbytes for name, nbytes in plan.memory.resident.items() if nbytes}
    world = executor_of(graph).world
    world.trace = []
    graph(*batch)
    assert [(s.kind, s.axis, s.nbytes) for s in world.trace] == [(c.kind, c.axis, c.bytes) for c in plan.collectives]
    world.trace = None


def test_the_text_of_a_program_is_read_back():
    for dtype in (BF16, F16):
        text = str(wide(2, 4, dtype, clip=1.0).program)
        assert str(gz.parse(text)) == text
