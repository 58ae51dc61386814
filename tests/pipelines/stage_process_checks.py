"""What four gloo processes check of pipeline stages: the numbers are those of virtual ranks, to the bit."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import inside  # whose check_ends is none of the checks here
import torch
import torch.distributed as dist
from mixtures import TwoLayers
from processes import computed_once, slow
from staged import Net, adamw, batches, placement, staged_graph, stages_of, tensors_of
from storages import Storages
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphzero as gz
from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.runtime.execute.pipeline_messages import StepMessages
from graphzero.testing import strict_transfers
from graphzero.testing.strict_stages import is_poison

SHAPE, NAMES = (2, 2), ("pp", "dp")


def real(shape: tuple[int, ...] = SHAPE, names: tuple[str, ...] = NAMES) -> gz.Placement:
    return gz.placement("cpu", placement(*shape, names=names).ranks, names=names)


def virtual_of(where: gz.Placement) -> gz.Placement:
    """The same ranks as virtual ones of this process."""
    return gz.placement("cpu", where.ranks, names=where.names, virtual=True)


def assert_equal(results: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(results) == len(wanted) > 4
    assert all(map(torch.equal, results, wanted))


def share(x: Tensor, where: gz.Placement) -> Tensor:
    """This rank's rows of the whole batch."""
    at = where.coordinate(dist.get_rank())
    for axis, name in enumerate(where.names):
        if name.startswith("dp"):
            x = x.chunk(where.hierarchy[axis])[at[axis]]
    return x


def whole(x: Tensor, where: gz.Placement) -> Tensor:
    """All rows of an output of which each rank has its own."""
    if not x.dim() or not where.data_axes:
        return x
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x)
    firsts = where.without_pipeline().ranks.ravel().tolist()
    return torch.cat([everyone[rank] for rank in firsts])


def train(graph: Any, where: gz.Placement, steps: int = 2) -> list[Tensor]:
    """Outputs and states of some steps, whole on every rank."""
    torch.manual_seed(3)
    outputs: list[Tensor] = []
    for batch in batches(steps):
        mine = batch if where.virtual else [share(x, where) for x in batch]
        outputs += [x if where.virtual else whole(x, where) for x in graph(*mine)]
    norm = graph.grad_norm
    return [*outputs, *([norm] if norm is not None else []), *tensors_of(graph.full_state_dict())]


def graph_on(where: gz.Placement, model: nn.Module, marks: dict[str, int], **options: Any) -> Any:
    return staged_graph(copy.deepcopy(model), marks, where, **options)


def assert_same(
    where: gz.Placement, model: nn.Module, marks: dict[str, int], between: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Train a Graph as virtual ranks do, to the bit; returns it.

    between: what is done with the Graph before it trains on, if it shall.
    """

    def train_all(on: gz.Placement) -> tuple[Any, list[Tensor]]:
        graph = graph_on(on, model, marks, **options)
        results = train(graph, on)
        if between is not None:
            if on is where:
                between(graph)
            results += train(graph, on)
        return graph, results

    virtual = virtual_of(where)
    (wanted,) = computed_once([lambda: train_all(virtual)[1]])
    graph, results = train_all(where)
    assert len(results) == len(wanted) > 4
    for mine, other in zip(results, wanted, strict=True):
        assert torch.equal(mine, other), options
    return graph


def model_of(seed: int = 0, layers: int = 2, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(layers, **options)


def layer_on_each(stages: int, **options: Any) -> tuple[Net, dict[str, int]]:
    """A model with a layer for each stage, and the stages of its modules."""
    return model_of(layers=stages, **options), stages_of(stages, stages)


ADAM: dict[str, Any] = {"clip": 0.1, "optimizer": adamw}


def check_chosen_stages() -> None:
    graph = assert_same(real(), model_of(layers=4), {"auto": 4}, schedule="zbv", stage=3, micro_batches=4, **ADAM)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, graph.plan.decisions)
    assert len({*everyone}) == 1 and "set_stage" in everyone[0][0]


def split_layers(graph: Any, model: nn.Module) -> Any:
    b, s = gz.sbp.B, gz.sbp.S
    split = {"up.weight": (b, s(0)), "up.bias": (b, s(0)), "down.weight": (b, s(1))}
    for layer in model.layers:
        gz.to_global(layer, placement=graph.placement, sbp={**split, "*": (b, b)})
    return graph


def check_tensor_splits() -> None:
    where = real((2, 2), ("pp", "tp"))
    virtual = virtual_of(where)

    def graph(on: gz.Placement) -> Any:
        model = model_of(dist.get_rank() if on is where else 0)  # the first rank's values count
        return split_layers(staged_graph(model, stages_of(2, 2), on, micro_batches=4, **ADAM), model)

    (wanted,) = computed_once([lambda: train(graph(virtual), virtual)])
    found = train(graph(where), where)
    assert all(map(torch.equal, found, wanted))


@slow
def check_kinds_of_models_and_settings() -> None:
    marks, where = stages_of(2, 2), real()
    assert_same(where, model_of(dropout=0.3, batch_norm=True), marks, schedule="zb1p", stage=3, micro_batches=4)
    assert_same(where, model_of(tied=True), marks, stage=3, micro_batches=4, dtype=torch.float16, **ADAM)
    rms: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9), "scheduler": step_lr
    }  # fmt: skip
    assert_same(where, model_of(), marks, stage=1, micro_batches=2, dtype=torch.bfloat16, clip=0.1, **rms)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def check_a_rank_holds_what_is_of_its_stages() -> None:
    where, model = real(), model_of()
    graph = staged_graph(model, stages_of(2, 2), where, stage=1, micro_batches=2, optimizer=adamw)
    mine = [share(x, where) for x in batches(1)[0]]
    graph(*mine)
    member = where.pipeline_member(dist.get_rank())
    here = {name: local(p).numel() == p.numel() for name, p in model.named_parameters()}
    assert here == {name: (stages_of(2, 2)[stage_path(name)] == member) for name in here}
    for name, p in model.named_parameters():
        assert tuple(p.shape) == tuple(dict(model_of().named_parameters())[name].shape)
        states = graph.optimizer.state[p]
        assert states["step"] == 1
        held = [local(states[key]).numel() for key in ("exp_avg", "exp_avg_sq")]
        assert all(0 < n <= p.numel() // 2 + 8 if here[name] else n == 0 for n in held), (name, held)


def stage_path(name: str) -> str:
    parts = f"model.{name}".split(".")
    return ".".join(parts[:3] if parts[1] == "layers" else parts[:2])


@slow
def check_checkpoints_have_nothing_of_stages() -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    where, pipe = real(), real((4,), ("pp",))
    first = graph_on(where, model_of(layers=4), stages_of(4, 2), stage=3, micro_batches=4, **ADAM)
    train(first, where)
    gz.save(first, folder[0])
    wanted = tensors_of(first.full_state_dict())
    others = [
        graph_on(where, model_of(7, layers=4), stages_of(4, 2), stage=3, micro_batches=4, **ADAM),
        graph_on(pipe, model_of(7, layers=4), stages_of(4, 4), micro_batches=4, **ADAM),
    ]
    for other in others:
        gz.load(other, folder[0])
        assert all(map(torch.equal, tensors_of(other.full_state_dict()), wanted))
    assert all(map(torch.equal, train(first, where), train(others[0], where)))
    train(others[1], pipe)
    gz.load(others[1], folder[0])  # into a Graph that has run
    assert all(map(torch.equal, tensors_of(others[1].full_state_dict()), wanted))
    others[0].load_state_dict(first.state_dict())
    others[1].load_state_dict(first.full_state_dict())
    for other in others:
        assert all(map(torch.equal, tensors_of(other.full_state_dict()), tensors_of(first.full_state_dict())))
    assert all(map(torch.equal, train(first, where), train(others[0], where)))


def check_states_in_files_have_the_same_bits_and_are_those_of_the_own_stage() -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    where = real()

    def graph_of(on: gz.Placement) -> Any:
        return graph_on(on, model_of(tied=True), stages_of(2, 2), stage=2, micro_batches=4, **ADAM)

    virtual = virtual_of(where)
    (wanted,) = computed_once([lambda: train(graph_of(virtual), virtual)])
    graph = graph_of(where)
    graph.config.enable_offload(path=folder[0])
    graph.config.bucket_bytes = 400
    with strict_transfers():
        assert_equal(train(graph, where), wanted)
    (file,) = graph._source.world.host_copies.files
    states = [local(states[key]) for states in graph.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    memory = graph.plan.pipeline.members[where.pipeline_member(dist.get_rank())].memory
    held = sum(x.nbytes for x in states if x.numel())
    assert all(file.holds(x) for x in states if x.numel()) and 0 < held <= memory.host


@slow
def check_activations_wait_on_the_host_with_the_same_bits() -> None:
    """Between processes what arrives from another stage waits there too."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    where = real()

    def graph_of(on: gz.Placement) -> Any:
        return graph_on(on, *layer_on_each(4), schedule="zbv", stage=2, micro_batches=4, **ADAM)

    def train_virtual() -> tuple[list[Tensor], int]:
        graph = graph_of(virtual_of(where))
        results = train(graph, graph.placement)
        return results, max(member.memory.activations for member in graph.plan.pipeline.members) * 3 // 4

    ((wanted, nbytes),) = computed_once([train_virtual])
    graph = graph_of(where)
    graph.config.enable_offload(False, activations=nbytes, path=folder[0])
    with strict_transfers():
        assert_equal(train(graph, where), wanted)
    pipeline, own = graph._selection.last.pipeline, where.pipeline_member(dist.get_rank())
    sources = {pipeline.member_of(key.stage) == one.member for one in pipeline.round_trips for key, _ in one.slots}
    assert any(one.member == own for one in pipeline.round_trips) and sources == {True, False}, sources


def check_eager_code_sees_whole_parameters() -> None:
    where, model = real(), model_of()
    graph = staged_graph(model, stages_of(2, 2), where, stage=3, micro_batches=2)
    x = batches(1)[0][0]
    train(graph, where)
    full = dict(graph.full_state_dict()["modules"]["model"])
    copy_of = model_of(9)
    copy_of.load_state_dict(full)
    with graph.full_parameters():
        assert torch.equal(model(x), copy_of(x))
        with torch.no_grad():
            model.head.bias.add_(1)
            model.first.bias.add_(1)
    after = graph.full_state_dict()["modules"]["model"]
    for name in ("first.bias", "head.bias"):
        assert torch.equal(after[name], full[name] + 1)


@slow
def check_check_agrees_with_plain_pytorch() -> None:
    where = real()
    graph = graph_on(where, model_of(layers=1), stages_of(1, 2), stage=3, micro_batches=2, **ADAM)
    batch = [share(x, where) for x in batches(1)[0]]
    report = inside.check_ends(graph, *batch)
    assert report.agrees, report
    graph(*batch)
    assert inside.check_ends(graph, *batch).agrees


def check_messages_arrive_at_the_wait_and_writing_to_them_before_is_refused() -> None:
    where = real()
    graph = graph_on(where, model_of(), stages_of(2, 2), stage=2, micro_batches=4)
    train(graph, where)
    saved = copy.deepcopy(graph.full_state_dict())

    def results() -> list[Tensor]:
        graph.load_state_dict(saved)
        return train(graph, where)

    def look_and_wait(step: StepMessages, number: int) -> list[Tensor]:
        looks.append(is_poison(step._posted[number][1][0]))
        return wait(step, number)

    def send_and_write(step: StepMessages, number: int, tensors: list[Tensor]) -> None:
        send(step, number, tensors)
        if dist.get_rank() == 1:
            tensors[0].add_(1)

    def post_and_write(step: StepMessages, number: int) -> None:
        post(step, number)
        if dist.get_rank() == 1:
            step._posted[number][1][0].zero_()

    looks, send, post, wait = [], StepMessages.send, StepMessages.post, StepMessages.await_arrival
    expected = results()
    with strict_transfers(), patch.object(StepMessages, "await_arrival", look_and_wait):
        assert all(map(torch.equal, results(), expected))
    assert len(looks) >= 8 and all(looks)
    for name, function, text in (
        ("send", send_and_write, "while they were sent to another stage, something wrote to"),
        ("post", post_and_write, "before they arrived from another stage, something wrote to"),
    ):
        try:
            with strict_transfers(), patch.object(StepMessages, name, function):
                results()
        except GraphZeroError as error:  # of this rank, or what another one reports
            assert text in str(error), error
        else:
            raise AssertionError(f"nobody noticed what {function.__name__} did")


def check_two_graphs_share_a_model() -> None:
    where, model = real(), model_of()
    step = staged_graph(model, stages_of(2, 2), where, stage=3, micro_batches=4)
    train(step, where)
    evaluation = staged_graph(model, stages_of(2, 2), where, optimizer=lambda params: None, micro_batches=2)
    copy_of = model_of(9)
    copy_of.load_state_dict(step.full_state_dict()["modules"]["model"])
    x, y = batches(1)[0]
    loss, scores = evaluation(share(x, where), share(y, where))
    assert torch.allclose(whole(scores, where), copy_of(x), atol=1e-6)
    train(step, where)


@slow
def check_all_stages_make_a_step_without_room_for_rows_again() -> None:
    torch.manual_seed(0)
    model, marks = TwoLayers(shared=False), {"model.stem": 0, "model.first": 0, "model.second": 1, "model.head": 1}
    where, x = real(), torch.randn(16, 24)

    def results(on: gz.Placement) -> list[Tensor]:
        graph = graph_on(on, model, marks, loss_fn=lambda model, x: model(x), stage=3, micro_batches=2)
        losses = []
        for _ in range(2):
            graph.config.set_split_experts("exchange", capacity=1.2)
            losses.append(graph(x if on.virtual else share(x, where)))
            assert graph.config.expert_capacity > 1.2
        assert any("exchange" in line for line in graph.plan.decisions)
        return [*losses, *tensors_of(graph.full_state_dict())]

    virtual = virtual_of(where)
    (wanted,) = computed_once([lambda: results(virtual)])
    mine = results(where)
    assert len(wanted) > 4 and all(map(torch.equal, mine, wanted))


@contextmanager
def agreements_unseen(graph: Any) -> Iterator[None]:
    """Let dispatch modes not see what ranks agree with: gloo's thread may keep its numbers into the step."""
    ranks, agree = graph._source.ranks, graph._source.ranks.agree

    def agree_unseen(*args: Any, **options: Any) -> Any:
        with _compat.no_modes():
            return agree(*args, **options)

    with patch.object(ranks, "agree", agree_unseen):
        yield


def check_bytes_of_each_stage_are_the_plans() -> None:
    # at stages 0 and 1 a transport holds a copy of small buffers while it reduces them, which no plan counts
    for schedule, stages, zero in [("1f1b", 2, 0), ("gpipe", 2, 3), ("zbv", 4, 2)]:
        where = real() if zero else real(SHAPE, ("pp", "tp"))
        graph = graph_on(
            where, *layer_on_each(stages), loss_fn=loss_alone, schedule=schedule, stage=zero, micro_batches=4, **ADAM
        )
        mine = [share(x, where) for x in batches(1)[0]]
        graph(*mine)
        graph(*mine)
        gc.collect()
        executor = graph._selection.last._executor
        slots = {x for one in executor.executors.values() for some in one.slots.values() for x in some}
        bound = {x for one in executor.executors.values() for some in one.bound.values() for x in some}
        known = [local(x) for x in tensors_of(graph.state_dict())]
        transports = [one.transport for one in graph._source.world._collectives.values()]
        known += [x for one in transports if (x := getattr(one, "_scratch", None)) is not None]  # of no plan
        with Storages([*mine, *slots, *bound, *known]) as mode, agreements_unseen(graph):
            graph(*mine)
        member = graph.plan.pipeline.members[where.pipeline_member(dist.get_rank())]
        before = sum(member.memory.resident.values())
        beside = mode.peak + before - member.memory.peak
        smaller = where.coordinate(dist.get_rank())[1] * 8  # a second rank's pieces of 5 elements
        assert -smaller <= beside <= 0, (schedule, zero, beside, member)


def loss_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


@slow
def check_models_on_the_meta_device() -> None:
    where = real()
    virtual = virtual_of(where)

    def graph(on: gz.Placement) -> Any:
        with torch.device("meta"):
            model = Net(2)
        result = staged_graph(model, stages_of(2, 2), on, stage=2, micro_batches=2)
        torch.manual_seed(11)
        gz.materialize(result)
        return result

    (wanted,) = computed_once([lambda: train(graph(virtual), virtual)])
    step = graph(where)
    own = where.pipeline_member(dist.get_rank())
    for name, p in step.model.named_parameters():
        assert (local(p).numel() > 0) == (stages_of(2, 2)[stage_path(name)] == own)
    assert all(map(torch.equal, train(step, where), wanted))
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    gz.save(step, folder[0])
    with torch.device("meta"):
        other = staged_graph(Net(2), stages_of(2, 2), where, stage=2, micro_batches=2)
        chosen = staged_graph(Net(2), {"auto": 2}, where, stage=2, micro_batches=2)
    gz.load(other, folder[0])
    for p in other.model.parameters():
        assert all(local(x).numel() <= local(p).numel() for x in other.optimizer.state[p].values() if x.dim())
    assert all(map(torch.equal, train(other, where), train(step, where)))
    chosen.compile(*(share(x, where) for x in batches(1)[0]))  # which chooses the stages
    torch.manual_seed(11)
    with Storages([]) as mode, agreements_unseen(chosen):
        gz.materialize(chosen)
    gc.collect()
    whole_bytes = sum(p.nbytes for p in chosen.model.parameters())
    own_bytes = sum(local(p).untyped_storage().nbytes() for p in chosen.model.parameters())
    assert mode.live - whole_bytes == own_bytes < 0.7 * whole_bytes  # stand-ins are made whole, and emptied
    assert all(map(torch.equal, train(chosen, where), wanted))
