"""No two accesses to one memory race: the law of streams, beside torch's sanitizer for CUDA.

Both are given the events of ``ir/streams``, and of each mutation of these: a record or a wait that is dropped, or that
stands elsewhere, memory that is given back elsewhere, a transfer in another slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from graphs import TrainGraph as Train
from graphs import mean_square
from test_experts import batch as tokens
from test_split_routing import model_of
from torch import Tensor, nn
from torch_sanitizer import find_race_by_torch

import graphzero as gz
from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.streams.events import (
    COMPUTE,
    SLOT,
    TO_DEVICE,
    TO_HOST,
    EventWait,
    StreamEvent,
    StreamEvents,
    StreamKernel,
)  # fmt: skip
from graphzero.ir.streams.instructions import InstructionKind, InstructionList
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.stream_order import check_streams, find_race
from graphzero.runtime.execute import program
from graphzero.testing import strict_transfers

Events = Sequence[StreamEvent]


def mutations(events: Events) -> Iterator[tuple[str, list[StreamEvent]]]:
    """Each with its kind."""
    slots = {region for event in events if isinstance(event, StreamKernel) for region in event.writes}
    slots = {region for region in slots if region[0] == SLOT}
    for i, event in enumerate(events):
        rest = [*events[:i], *events[i + 1 :]]
        kind = type(event).__name__
        if isinstance(event, StreamKernel) and event.does not in ("free", "begin"):
            continue
        if isinstance(event, StreamKernel) and event.does == "begin":
            for slot in slots - event.writes if event.writes & slots else ():
                writes = event.writes - slots | {slot}
                yield "slot", [*events[:i], event._replace(writes=writes), *events[i + 1 :]]
            continue
        kind = event.does if isinstance(event, StreamKernel) else kind
        if kind != "free":
            yield f"{kind} dropped", rest
        for way in (-6, -3, -2, -1, 1, 2, 3, 6):
            if 0 <= i + way <= len(rest):
                yield f"{kind} moved", [*rest[: i + way], event, *rest[i + way :]]


class TrainGraph(gz.Graph):
    def __init__(
        self, stage: int, micro_batches: int = 1, axes: tuple[str, ...] = ("dp",), checkpoint: bool = False
    ) -> None:
        grid = torch.arange(4).reshape((4,) if len(axes) == 1 else (2, 2)).tolist()
        super().__init__(gz.placement("cpu", grid, names=axes, virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        if "tp" in axes:
            first, second = (gz.sbp.B, gz.sbp.S(0)), (gz.sbp.B, gz.sbp.S(1))
            gz.to_global(self.model, self.placement, {"0.*": first, "2.weight": second})
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1), clip_grad_norm=0.5)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(micro_batches)
        self.config.set_activation_memory("checkpoint" if checkpoint else None)
        self.config.bucket_bytes = 600

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4


def with_states_on_host() -> StepGraph:
    graph = TrainGraph(1, 4, checkpoint=True)
    graph.config.enable_offload()
    return graph.compile(*BATCH).program


def with_activations_on_host() -> StepGraph:
    graph = TrainGraph(3, 2)
    graph.config.bucket_bytes = 1
    memory = graph.compile(*BATCH).plan.memory
    graph.config.enable_offload(False, activations=memory.activations - 1)
    return graph.compile(*BATCH).program


def with_exchanged_rows() -> StepGraph:
    model, place = model_of(), gz.placement("cpu", range(2), virtual=True)
    gz.to_global(model, place, {"*.up": gz.sbp.S(0), "*.down": gz.sbp.S(0)})
    graph = Train(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), placement=place, stage=1)
    graph.config.set_split_experts("exchange", capacity=1.5)
    return graph.compile(tokens(0)).program


PROGRAMS: dict[str, tuple[Callable[[], StepGraph], set[str]]] = {  # and the streams beside the one that computes
    "stage 0": (lambda: TrainGraph(0).compile(*BATCH).program, {"dp"}),
    "stage 2, micro-batches": (
        lambda: TrainGraph(2, 4, ("dp", "tp"), checkpoint=True).compile(*BATCH).program, {"dp", "tp"}
    ),
    "stage 3": (lambda: TrainGraph(3, 1, ("dp", "dp_shard")).compile(*BATCH).program, {"dp", "dp_shard"}),
    "stage 3, micro-batches": (lambda: TrainGraph(3, 4, checkpoint=True).compile(*BATCH).program, {"dp"}),
    "states on the host": (with_states_on_host, {"dp", TO_DEVICE, TO_HOST}),
    "activations on the host": (with_activations_on_host, {"dp", TO_DEVICE, TO_HOST}),
    "experts": (with_exchanged_rows, {"dp"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_law_objects_where_torchs_sanitizer_does(name: str) -> None:
    program_of, streams = PROGRAMS[name]
    events = StreamEvents(program_of()).all()
    assert {event.stream for event in events} >= {COMPUTE, *streams}
    assert find_race(events) is None and not find_race_by_torch(events)
    seen: Counter[tuple[str, bool]] = Counter()
    for kind, mutated in mutations(events):
        objects = find_race(mutated) is not None
        assert objects == find_race_by_torch(mutated), kind
        seen[kind, objects] += 1
    transfers = sum(isinstance(event, StreamKernel) and event.does == "begin" for event in events)
    # Those that are dropped without harm stand beside another one that orders the same: copies are begun in buckets.
    for kind in ("EventRecord", "EventWait"):
        assert seen[f"{kind} dropped", False] < seen[f"{kind} dropped", True], seen
        assert seen[f"{kind} dropped", True] + seen[f"{kind} dropped", False] == 2 * transfers
        assert seen[f"{kind} moved", True] > 0
    assert (seen["EventWait moved", False] > 0) == (name != "experts")  # whose rows are awaited where they are sent


SLOTS = """
graph step(dp=2) local
  v = param() : f32[8]  S(0)
  w = param() : f32[6]  S(0)
  g = batch() : f32[4]  P
forward:
  l = launch('bucket_all_gather', 0, [v, w], [0, 0], 'dp') : (f32[8]  B, f32[6]  B)
  m = launch('bucket_all_gather', SLOT, [w, v], [0, 0], 'dp') : (f32[6]  B, f32[8]  B)
  a = wait(l) : (f32[8]  B, f32[6]  B)
  b = a[0] : f32[8]  B
  n = wait(m) : (f32[6]  B, f32[8]  B)
  c = n[1] : f32[8]  B
  return b, c
"""


def test_two_transfers_at_a_time_have_two_slots() -> None:
    check_streams(parse(SLOTS.replace("SLOT", "1")))
    with pytest.raises(VerifyError, match=r"'m' \(pack, stream compute\) works in slot 0 while 'l'"):
        check_streams(parse(SLOTS.replace("SLOT", "0")))


IN_PLACE = """
graph step(dp=2, tp=2) local
  g = batch() : f32[4]  (P, P)
backward:
  h = neg(g) : f32[4]  (P, P)
  l = launch('bucket_all_reduce', None, [h], 'dp', 'sum') : (f32[4]  (B, P))
  a = wait(l) : (f32[4]  (B, P))
  b = a[0] : f32[4]  (B, P)
  m = launch('bucket_all_reduce', None, [b], 'tp', 'sum') : (f32[4]  (B, B))
  n = wait(m) : (f32[4]  (B, B))
  c = n[0] : f32[4]  (B, B)
  return c
"""


def test_what_is_reduced_along_two_axes_waits_between_them() -> None:
    events = StreamEvents(parse(IN_PLACE)).all()
    assert find_race(events) is None
    first = next(event for event in events if isinstance(event, EventWait) and event.stream == COMPUTE)
    race = find_race([event for event in events if event is not first])
    assert race is not None and (race.first.stream, race.second.node.name) == ("dp", "m")


COPIED = """
graph step(dp=1) local
  x = batch() : f32[4, 2]  B
forward:
  a = exp(x) : f32[4, 2]  B
  r = host_room(a) : f32[4, 2]  B
  l = to_host_launch(r, a) : f32[4, 2]  B
  v = t(a) : f32[2, 4]  B
  b = neg(v) : f32[2, 4]  B
  w = to_host_wait(l, a) : f32[4, 2]  B
  return b
"""


def test_what_is_being_copied_may_be_viewed_and_read_but_not_written() -> None:
    check_streams(parse(COPIED))
    with pytest.raises(VerifyError, match=r"'b' \(call, stream compute\) works in 'a' while 'l'"):
        check_streams(parse(COPIED.replace("neg(v)", "neg(v, out=v)")))


class WithoutOneWait(InstructionList):
    """The list that lacks the first AWAIT of a launch, and what is unpacked is what is there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        awaits = (i for i, one in enumerate(self.all) if one.kind is InstructionKind.AWAIT)
        del self.all[next(awaits)]


def test_the_executor_runs_the_list_and_no_wait_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with strict_transfers():
        assert TrainGraph(1)(*BATCH).isfinite()
        monkeypatch.setattr(program, "InstructionList", WithoutOneWait)
        graph = TrainGraph(0)
        graph(*BATCH)
        assert any(x.isnan().any() for x in graph.model.state_dict().values())
