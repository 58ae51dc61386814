"""A rank that stops makes the others raise an error that says which, by what and where, over both ways of sending."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import failure_toys  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero.checkpoint.files import markers  # noqa: E402
from graphzero.checkpoint.state_dict import loading  # noqa: E402
from graphzero.runtime.state import modules  # noqa: E402
from graphzero.runtime.tensors import gather, resplit  # noqa: E402
from graphzero.runtime.transport import peer_memory  # noqa: E402
from graphzero.runtime.transport.shared_memory_connect import SWITCH, requested_transport  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=failure_toys.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class LookupGraph(gz.Graph):
    """Two embeddings and a product: an index that is out of range fails on the rank that has it alone."""

    def __init__(self, stage: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.add_optimizer(torch.optim.SGD([*self.table.parameters(), *self.layer.parameters()], lr=0.1))
        self.config.enable_zero(stage > 0, stage=stage or 2)

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.layer(self.table(ids)).square().mean()
        loss.backward()
        return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return (torch.arange(8) * (step + 1) + 3 * rank) % 10


def tried(call: Any) -> dict[str, Any]:
    """What came of a call: its result, or kind and text of its error, and the seconds that it took."""
    began = time.monotonic()
    try:
        found = {"value": float(call())}
    except BaseException as error:
        found = {"kind": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return found | {"seconds": time.monotonic() - began}


def an_op_fails_on_rank_1(rank: int) -> Any:
    graph = LookupGraph()
    found = [tried(lambda: graph(batch(0, rank)))]
    bad = torch.tensor([1, 2, 3, 77, 5, 6, 7, 8])
    found.append(tried(lambda: graph(bad if rank == 1 else batch(1, rank))))
    found += [tried(lambda step=step: graph(batch(step, rank))) for step in (1, 2)]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_op_that_fails_on_one_rank_is_an_error_on_all_and_the_next_call_works(
    tmp_path: Path, way: str, ranks: int
) -> None:
    found = failure_toys.run(an_op_fails_on_rank_1, ranks, tmp_path, way)
    assert sorted(found) == list(range(ranks))
    for rank, (first, failed, second, third) in found.items():
        assert failed["seconds"] < failure_toys.WAITS / 2
        if rank == 1:
            assert failed["kind"] == "IndexError"
        else:
            assert failed["kind"] == "RankError" and failed["ranks"] == [1], failed
            assert "rank 1 stopped in this step of LookupGraph: IndexError: index out of range" in failed["text"]
            assert "test_failures.py:" in failed["text"] and "in build" in failed["text"]
        assert first["value"] > second["value"] > third["value"]
        assert [first, second, third] == [{**found[0][i], "seconds": x["seconds"]} for i, x in
                                          ((0, first), (2, second), (3, third))]  # fmt: skip


def a_scheduler_fails_on_rank_1(rank: int) -> Any:
    graph = LookupGraph()
    schedule = torch.optim.lr_scheduler.LambdaLR(graph._source.optimizers[0].optimizer, lambda step: 1.0)
    graph._source.schedulers[0] = schedule
    graph(batch(0, rank))
    saved = graph.full_state_dict()

    def fail() -> None:
        raise LookupError("no such rate")

    if rank == 1:
        schedule.step = fail  # type: ignore[method-assign]
    found = [tried(lambda: graph(batch(1, rank)))]
    vars(schedule).pop("step", None)
    found += [tried(lambda: graph(batch(1, rank))) for _ in range(2 - rank)]  # rank 0 hears of it in a call of its own
    graph.load_state_dict(saved)
    return [*found, tried(lambda: graph(batch(1, rank))), schedule.last_epoch]


def test_a_scheduler_that_fails_on_one_rank_is_refused_until_all_have_loaded(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(a_scheduler_fails_on_rank_1, 2, tmp_path, way)
    assert found[1][0]["kind"] == "LookupError" and "value" in found[0][0]
    assert found[0][1]["kind"] == "RankError" and "no such rate" in found[0][1]["text"]
    for rank in range(2):
        *_, refused, again, epoch = found[rank]
        assert "load_state_dict" in refused["text"] and "rank 1: 2, 1 completed" in refused["text"], refused
        assert again["value"] == found[0][0]["value"] and epoch == 2


def ends(rank: int, how: Any) -> Any:
    graph = LookupGraph()
    graph(batch(0, rank))
    dist.barrier()
    if rank == 1:
        how()
    return [tried(lambda: graph(batch(1, rank)))]


def killed(rank: int) -> Any:
    return ends(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits(rank: int) -> Any:
    return ends(rank, lambda: os._exit(3))


@pytest.mark.parametrize("way", [*failure_toys.WAYS, failure_toys.FAR])
@pytest.mark.parametrize("how", [killed, exits])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_has_ended_is_named_at_once(tmp_path: Path, way: str, how: Any, ranks: int) -> None:
    found = failure_toys.run(how, ranks, tmp_path, way)
    assert sorted(found) == [rank for rank in range(ranks) if rank != 1]
    for (one,) in found.values():
        assert one["kind"] == "RankError" and one["ranks"] == [1] and one["seconds"] < failure_toys.WAITS / 2, one
        assert "rank 1 has ended" in one["text"] or "rank 1, which has ended" in one["text"]


def with_a_child(rank: int, how: Any) -> Any:
    """Rank 1 leaves a process after that it has forked when all were connected."""
    graph = LookupGraph()
    graph(batch(0, rank))
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        how()
    return [tried(lambda: graph(batch(1, rank)))]


def killed_with_a_child(rank: int) -> Any:
    return with_a_child(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("way", [*failure_toys.WAYS, failure_toys.FAR])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_whose_forked_child_lives_on_is_named(tmp_path: Path, way: str, ranks: int) -> None:
    found = failure_toys.run(killed_with_a_child, ranks, tmp_path, way)
    assert sorted(found) == [rank for rank in range(ranks) if rank != 1]
    for (one,) in found.values():
        assert one["kind"] == "RankError" and one["ranks"] == [1] and one["seconds"] < failure_toys.WAITS / 2, one


def killed_while_all_save(rank: int, path: str, asynchronous: bool) -> Any:
    graph = LookupGraph()
    graph(batch(0, rank))
    dist.barrier()
    if rank == 1:
        markers.SaveMarkers.mark_written = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return [tried(lambda: gz.save(graph, path, asynchronous=asynchronous).wait() or 0)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("way", [*failure_toys.WAYS, failure_toys.FAR])
def test_a_rank_that_is_killed_while_all_save_is_named_soon(tmp_path: Path, way: str, asynchronous: bool) -> None:
    work = partial(killed_while_all_save, path=str(tmp_path / "saved"), asynchronous=asynchronous)
    ((one,),) = failure_toys.run(work, 2, tmp_path, way).values()
    said = "rank 1 ended before its part was written" if asynchronous else "rank 1 has ended"
    assert said in one["text"] and one["seconds"] < failure_toys.WAITS / 2, one


def a_forked_child_calls(rank: int) -> Any:
    graph = LookupGraph()
    graph(batch(0, rank))
    read, write = os.pipe()
    if os.fork() == 0:
        found = [tried(lambda: graph(batch(1, rank))), tried(LookupGraph), tried(lambda: gz.to_global(
            nn.Linear(2, 2), graph.placement, gz.sbp.B))]  # fmt: skip
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        in_child = json.loads(pipe.read())
    return [*in_child, tried(lambda: graph(batch(1, rank)))]


def test_a_forked_child_may_not_call_a_graph_and_disturbs_nobody(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(a_forked_child_calls, 2, tmp_path, way)
    for rank in range(2):
        *in_child, after = found[rank]
        for one in in_child:
            assert one["kind"] == "GraphZeroError" and f"forked from that of rank {rank}" in one["text"], one
            assert one["seconds"] < failure_toys.WAITS / 2
        assert after["value"] == found[0][-1]["value"]


def stopped_by_a_signal(rank: int) -> Any:
    graph = LookupGraph()
    graph(batch(0, rank))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [tried(lambda: graph(batch(1, rank)))]


def test_a_stopped_process_is_named_after_the_jobs_timeout(tmp_path: Path, way: str) -> None:
    def run(ranks: int) -> dict[int, Any]:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        return failure_toys.run(stopped_by_a_signal, ranks, folder, way, timeout=8.0, stops=[1])

    with ThreadPoolExecutor() as pool:  # both worlds wait at one time
        for ranks, found in zip((2, 3), pool.map(run, (2, 3)), strict=True):
            for rank in {0, 2} & set(range(ranks)):
                (one,) = found[rank]
                assert one["kind"] == "RankError" and one["ranks"] == [1], one
                assert 5 < one["seconds"] < failure_toys.WAITS / 2, one
                assert "has waited 8 s" in one["text"] and "rank 1" in one["text"] and "timeout" in one["text"]


def two_threads(rank: int) -> Any:
    graph = LookupGraph(0)
    found: dict[int, list[float]] = {0: [], 1: []}

    def work(which: int) -> None:
        for step in range(20):
            found[which].append(float(graph(batch(step, which))))

    threads = [threading.Thread(target=work, args=(which,)) for which in found]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [len(found[0]), len(found[1])]


def test_calls_of_two_threads_run_one_after_the_other(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(two_threads, 2, tmp_path, way)
    assert found == {0: [20, 20], 1: [20, 20]}


def stops_while(rank: int, what: str) -> Any:
    """Rank 1 has no memory left for one of several tensors; then all do the same once more."""
    where, graph = gz.placement("cpu", range(dist.get_world_size())), LookupGraph(3)
    graph(batch(0, rank))
    saved, module = graph.state_dict(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for held in saved["modules"].values():
        held.update({key: gz.to_global(x, sbp=gz.sbp.S(1)) for key, x in held.items() if x.dim() == 2})
    split = gz.to_global(torch.ones(2, 4), where, gz.sbp.S(0))
    asked: dict[str, Callable[[], Any]] = {
        "full_state_dict": lambda: len(graph.full_state_dict()),
        "load_state_dict": lambda: graph.load_state_dict(saved) or 0,
        "to_global of a module": lambda: len(gz.to_global(module, where, gz.sbp.S(0))),
        "to_global of a tensor": lambda: gz.to_global(split, sbp=gz.sbp.B).to_local().sum().item(),
        "a first call": lambda: float(LookupGraph(3)(batch(0, rank))),
        "gz.check": lambda: bool(gz.check(graph, batch(0, rank))),
    }
    place, name, left = _FAILING[what]
    working = getattr(place, name)

    def fail(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("no room")
        return working(*args)

    if rank == 1:
        setattr(place, name, fail)
    found = tried(asked[what])
    setattr(place, name, working)
    return [found, tried(asked[what])]


# Where rank 1 fails, and in which call of it.
_FAILING: dict[str, tuple[Any, str, int]] = {
    "full_state_dict": (gather, "_copy", 1),
    "load_state_dict": (loading, "_split_as", 2),
    "to_global of a module": (modules, "from_first_rank", 3),
    "to_global of a tensor": (resplit, "_gather_and_join", 1),
    "a first call": (modules, "from_first_rank", 2),
    "gz.check": (resplit, "join", 2),
}


@pytest.mark.parametrize("what", _FAILING)
def test_a_rank_that_stops_while_tensors_are_made_whole_or_placed_is_an_error_on_all(
    tmp_path: Path, way: str, what: str
) -> None:
    found = failure_toys.run(partial(stops_while, what=what), 3, tmp_path, way)
    assert sorted(found) == [0, 1, 2] and not any("raised" in one for one in found.values()), found
    for rank, (failed, again) in found.items():
        assert failed["seconds"] < failure_toys.WAITS / 2
        if rank == 1:
            assert failed["kind"] == "MemoryError", failed
        else:
            assert failed["kind"] == "RankError" and failed["ranks"] == [1], failed
            assert "MemoryError: no room" in failed["text"]
        assert "value" in again and again["value"] == found[0][1]["value"], again


class Gathers(LookupGraph):
    """What moves is as large as the batch."""

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = gz.to_global(self.layer(self.table(ids)), sbp=gz.sbp.B)
        loss = hidden.softmax(0).square().mean()
        loss.backward()
        return loss


def other_shapes_in_first_mode(rank: int) -> Any:
    """Both shapes have a program already, so no rank compiles, and in this mode no call begins with a comparison."""
    graph = Gathers()
    graph.config.check_inputs = "first"
    for rows in (8, 4):
        graph(batch(0, rank)[:rows])
    found = tried(lambda: graph(batch(0, rank)[: 4 if rank else 8]))
    graph(batch(0, rank))
    return [found]


def test_batches_that_differ_by_rank_raise_on_all_also_where_calls_compare_nothing(tmp_path: Path, way: str) -> None:
    found = failure_toys.run(other_shapes_in_first_mode, 2, tmp_path, way)
    texts = [found[rank][0]["text"] for rank in range(2)]
    assert all("the ranks do not agree on the compiled program" in text for text in texts), texts


def many_collectives(rank: int) -> Any:
    graph = LookupGraph()
    before = float(graph(batch(0, rank)))
    for pairs in graph._source.world._collectives.values():
        pairs.number = 2**31 - 20
    values = [float(graph(batch(0, rank))) for _ in range(20)]
    shown = [line for line in repr(graph).splitlines() if line.startswith("along dp")]
    return [before > values[0] > values[-1], shown]


def test_collectives_are_counted_beyond_31_bits_and_repr_says_the_way(tmp_path: Path, way: str) -> None:
    said = {"memory": "read each other's memory", "gloo": "send through gloo (rank 0: GRAPHZERO_TRANSPORT=gloo)"}
    found = failure_toys.run(many_collectives, 2, tmp_path, way)
    assert found == {rank: [True, [f"along dp ranks 0, 1 {said[way]}"]] for rank in range(2)}


def reading_memory_is_forbidden(rank: int) -> Any:
    def refuse(process: int, address: int, into: torch.Tensor) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphzero").addHandler(handler)
    peer_memory.read_memory = refuse
    graph = LookupGraph()
    values = [float(graph(batch(0, rank))) for _ in range(3)]
    return [values[0] > values[-1], warnings]


def test_ranks_of_one_host_that_may_not_read_send_through_gloo_and_one_line_says_why(tmp_path: Path) -> None:
    found = failure_toys.run(reading_memory_is_forbidden, 3, tmp_path, "auto")
    line = "rank 0: ranks 0, 1, 2 send through gloo (rank 0: [Errno 1] Operation not permitted)"
    assert found == {0: [True, [line]], 1: [True, []], 2: [True, []]}


@pytest.mark.parametrize("word", ["tcp", "Memory", "", "0"])
def test_a_transport_that_does_not_exist_is_an_error_with_the_three_that_do(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, word)
    with pytest.raises(gz.ConfigError, match=f"GRAPHZERO_TRANSPORT='{word}'; it must be auto .*memory .*gloo "):
        requested_transport()
