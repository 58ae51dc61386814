"""What processes check that share a GPU: a step computes what it does on virtual ranks of that GPU.

``processes.device_type`` says where they are; on CPUs the same code is run to see that it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import processes
import torch
import torch.distributed as dist
from processes import computed_once
from staged import Net, batches, staged_graph, stages_of, tensors_of
from torch import Tensor, nn

import graphzero as gz
from graphzero.errors import ConfigError
from graphzero.plugins.doctor import checks as doctor

EXACT, ROUNDED = (1e-4, 1e-5), (2e-2, 2e-2)  # relative and absolute: NCCL adds in an order of its own


def on_cpu_first(cases: Iterable[Any]) -> Iterator[Any]:
    """All of them, of which CPUs try the first one."""
    return islice(cases, 1 if processes.device_type == "cpu" else None)


def place(*shape: int, names: tuple[str, ...] = ("dp",), virtual: bool = False) -> gz.Placement:
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape).tolist()
    return gz.placement(processes.device_type, ranks, names=names, virtual=virtual)


def loss_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def momentum_sgd(params: Any) -> torch.optim.SGD:
    """Adam's steps are as large for gradients that are rounding noise."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(
    where: gz.Placement, tensor_split: bool = False, schedule: str = "1f1b", dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Losses and states of three steps; everything on the CPU at the end."""
    torch.manual_seed(0)
    model, marks = Net(2), stages_of(2, 2) if "pp" in where.names else None
    graph = staged_graph(model, marks, where, schedule, momentum_sgd, loss_alone, clip=0.5, **options)
    if dtype is not None:
        graph.config.enable_amp(dtype=dtype, init_scale=2.0**10)
    for layer in model.layers if tensor_split else ():
        split = {"up.*": gz.sbp.S(0), "down.weight": gz.sbp.S(1), "*": gz.sbp.B}
        others = (gz.sbp.B,) * (len(where.names) - 1)
        gz.to_global(layer, placement=where, sbp={name: (*others, sbp) for name, sbp in split.items()})
    rows, row = 1, 0
    if not where.virtual and "dp" in where.names:
        axis = where.axis("dp")
        rows, row = where.hierarchy[axis], where.coordinate(dist.get_rank())[axis]
    losses = [graph(*(x.chunk(rows)[row] for x in batch)) for batch in batches(3)]
    assert not graph.skipped
    return [x.cpu() for x in [*losses, *tensors_of(graph.full_state_dict())]]


def assert_same(shape: tuple[int, ...], names: tuple[str, ...], bounds: tuple[float, float] = EXACT, **kw: Any) -> None:
    (wanted,) = computed_once([lambda: train(place(*shape, names=names, virtual=True), **kw)])
    results = train(place(*shape, names=names), **kw)
    assert len(results) == len(wanted) > 10 and not torch.equal(wanted[0], wanted[2])
    for x, y in zip(results, wanted, strict=True):
        if processes.device_type == "cpu":
            assert torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=bounds[0], atol=bounds[1])


def check_every_collective_and_stage_of_zero() -> None:
    for one in on_cpu_first(doctor.check_ranks(place(dist.get_world_size()))):
        assert one.holds, one


def check_tensor_parallelism() -> None:
    assert_same((dist.get_world_size() // 2, 2), ("dp", "tp"), tensor_split=True, stage=1)


def check_micro_batches() -> None:
    assert_same((dist.get_world_size(),), ("dp",), stage=2, micro_batches=2)


def check_mixed_precision() -> None:
    for dtype, stage in on_cpu_first([(torch.float16, 2), (torch.bfloat16, 3)]):
        assert_same((dist.get_world_size(),), ("dp",), ROUNDED, stage=stage, dtype=dtype)


def check_a_recorded_step_of_each_rank_beside_those_of_others() -> None:
    """Each trains by itself; steps of several processes are not recorded."""
    on_gpu = processes.device_type == "cuda"
    for where in (place(dist.get_world_size()), place(1, virtual=True)):
        torch.manual_seed(0)
        graph, other = (staged_graph(Net(2), None, where, "", momentum_sgd, loss_alone) for _ in range(2))
        other.model.load_state_dict(graph.model.state_dict())
        graph.config.set_cuda_graph()
        if not where.virtual or not on_gpu:
            try:
                graph(*batches(1)[0])
            except ConfigError as error:
                assert ("has several processes" if on_gpu else "is not on GPUs") in str(error), error
            else:
                raise AssertionError(f"the step was recorded on {where}")
            continue
        for batch in batches(5):
            torch.testing.assert_close(graph(*batch), other(*batch), rtol=EXACT[0], atol=EXACT[1])
        assert "CUDA graph" in repr(graph)


def check_pipeline_stages() -> None:
    ranks = dist.get_world_size()
    if not processes.uses_nccl(ranks, "cuda") and processes.device_type == "cuda":
        return  # which the test says
    for schedule, stage in on_cpu_first([("1f1b", 2), ("zb1p", 3)]):
        assert_same((2, ranks // 2), ("pp", "dp"), stage=stage, micro_batches=4, schedule=schedule)
