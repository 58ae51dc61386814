"""Faults at random moments of training, over shared memory and over gloo: what each rank says, and after how long.

    python bench/stress/faults.py              # about 100 faults on 2 and 3 ranks
    python bench/stress/faults.py --faults 4   # of each kind and world fewer
    python bench/stress/faults.py --seed 7     # at other moments

One rank of a world has the fault, always in its call of a training step.  Every other rank must raise an error that
names that rank, within 10 seconds, or finish its step with the right loss and raise that error in its next call; then a
call of all ranks must give the right loss, or be refused on all of them until a checkpoint is loaded.  Right is what
plain PyTorch computes on the whole batch.  Where a rank has ended, all others must say so.

A fault is a function in ``FAULTS``; it may do anything to its rank.  What one rank may do otherwise than the others,
without any fault, is tried in ``tests/runtime/one_sided_checks.py``.  Exits with 1 where one ends otherwise.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in ("bench", "tests/runtime", "tests"))
from _run import command_parser, format_table, gather_over_ranks, parse_options
from failure_toys import WAYS
from failure_toys import run as start_ranks
from parity import TrainGraph

SOON = 10.0  # seconds
Act = Callable[["Job", random.Random], Any]  # with the fault prepared, what the rank does instead of its call
Answer = dict[str, Any]  # of a call: its value, or its error and the ranks that it names; and seconds
Verdict = tuple[str, float]  # of a rank on a fault: what is wrong, and the seconds until it raised


class FaultModel(nn.Sequential):
    """Eight layers and their loss; as in a Graph of the benchmarks, a batch has labels, here none."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x).square().mean()


def draw_batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


class Job:
    """One rank of a world that trains."""

    def __init__(self, rank: int, ranks: int, stage: int) -> None:
        self.rank, self.ranks, self.step = rank, ranks, 0
        model, self.eager = FaultModel(), FaultModel()
        optimizer, self.optimizer = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, self.eager))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.graph = TrainGraph(model, optimizer, self.schedule, stage)
        self.saved: dict[str, Any] = {}

    def call_graph(self) -> float:
        return float(self.graph(draw_batch(self.step, self.rank), None))

    @property
    def steps(self) -> list[Any]:
        """Of the program that ran last."""
        assert self.graph._selection.last is not None
        return self.graph._selection.last.executor(self.graph._source.world).program.steps

    def expected_loss(self) -> float:
        """The loss of the step that comes."""
        with torch.no_grad():
            return float(self._compute_loss())

    def step_eagerly(self) -> None:
        """All have taken a step with this batch."""
        self.optimizer.zero_grad()
        self._compute_loss().backward()
        self.optimizer.step()

    def advance(self) -> None:
        """The same; the next batch, and a checkpoint."""
        self.step_eagerly()
        self.step += 1
        self.saved = self.graph.full_state_dict()

    def _compute_loss(self) -> Tensor:
        return self.eager(torch.cat([draw_batch(self.step, rank) for rank in range(self.ranks)]))


# ---- faults


def raise_in_program(error: Callable[[], BaseException]) -> Act:
    """An op, or a collective, raises."""

    def act(job: Job, chance: random.Random) -> Any:
        at, steps = chance.randrange(len(job.steps)), job.steps
        step, before = steps[at], chance.random() < 0.5

        def fail(envs: Any) -> None:
            steps[at] = step
            if not before:
                step(envs)
            raise error()

        steps[at] = fail
        try:
            return job.call_graph()
        finally:
            steps[at] = step

    return act


def raise_in_method(find_owner: Callable[[Job], Any], name: str, error: BaseException) -> Act:
    """A part of a call of the Graph raises."""

    def fail(*_: Any) -> None:
        raise error

    def act(job: Job, chance: random.Random) -> Any:
        with patch.object(find_owner(job), name, fail):
            return job.call_graph()

    return act


def interrupt(job: Job, chance: random.Random) -> Any:
    """Ctrl-C."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 8e-3))
    try:
        return job.call_graph()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def kill(job: Job, chance: random.Random) -> Any:
    """By a signal that nothing can catch, at any moment."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 8e-3))
    while True:
        job.call_graph()


def kill_with_child(job: Job, chance: random.Random) -> Any:
    """While a process that it has forked lives on."""
    if os.fork() == 0:
        time.sleep(2 * SOON)
        os._exit(0)
    return kill(job, chance)


FAULTS: dict[str, Act] = {
    "an exception": raise_in_program(lambda: IndexError("index 77 is out of range")),
    "out of memory": raise_in_program(lambda: MemoryError("no room")),
    "SystemExit": raise_in_program(lambda: SystemExit(2)),
    "an interrupt": interrupt,
    "an exception while binding": raise_in_method(lambda job: job.graph._steps, "bind", OSError("in bind")),
    "an exception before running": raise_in_method(lambda job: job.graph._steps, "run_step", OSError("in run_step")),
    "a scheduler raises": raise_in_method(lambda job: job.schedule, "step", LookupError("no such rate")),
    "killed": kill,
    "killed, a child lives on": kill_with_child,
    "os._exit": raise_in_program(lambda: os._exit(3)),
}
ENDS = ("killed", "killed, a child lives on", "os._exit")  # the faulty rank's process is gone then


# ---- one world


def run_rank(ranks: int, names: list[str], seed: int, rank: int) -> list[Verdict]:
    """One rank: faults one after the other; the last one may end a process."""
    chance = random.Random(seed)
    job = Job(rank, ranks, chance.choice((1, 2, 3)))
    job.call_graph()
    job.advance()
    verdicts = []
    for name in names:
        faulty, seed = chance.randrange(ranks), chance.randrange(1 << 30)
        for _ in range(chance.randrange(3)):
            job.call_graph()
            job.advance()
        dist.barrier()
        try_fault = outlive_rank if name in ENDS else survive_fault
        verdicts.append(try_fault(job, partial(FAULTS[name], job, random.Random(seed)), faulty))
        if verdicts[-1][0]:
            break
    return verdicts


def try_call(call: Callable[[], Any]) -> Answer:
    began = time.monotonic()
    try:
        answer: Answer = {"value": call()}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", ()))}
    return answer | {"seconds": time.monotonic() - began}


def survive_fault(job: Job, fault: Callable[[], Any], faulty: int) -> Verdict:
    """A fault after which all go on: what is wrong with that, and the seconds until this rank raised."""
    expected = job.expected_loss()
    own = try_call(fault if job.rank == faulty else job.call_graph)
    wrong = "" if job.rank == faulty else judge_answer(own, expected, faulty)
    answers = gather_over_ranks([own, wrong])
    if not any(text for _, text in answers):
        wrong = judge_retry(job, own, faulty, has_stepped=any("value" in answer for answer, _ in answers))
    return wrong, 0.0 if job.rank == faulty else own["seconds"]


def judge_answer(own: Answer, expected: float, faulty: int) -> str:
    """Return what is wrong with what a rank has got while another one had a fault."""
    if own["seconds"] > SOON:
        return f"took {own['seconds']:.1f} s: {own.get('error', 'no error')}"
    if "error" in own:
        return "" if f"rank {faulty}" in own["error"] else f"names another rank or none: {own['error']}"
    return "" if math.isclose(own["value"], expected) else f"finished with {own['value']}, not {expected}"


def judge_retry(job: Job, own: Answer, faulty: int, has_stepped: bool) -> str:
    """Return what is wrong with the next call of all ranks.  has_stepped: some rank took the step with the fault."""
    retried = try_call(job.call_graph)
    if "value" in own and retried.get("ranks") == [faulty]:  # this rank has not heard of the fault before
        retried = try_call(job.call_graph)
    answers = gather_over_ranks(retried)
    if not any("value" in answer for answer in answers):
        return judge_reload(job, retried)
    if not all("value" in answer for answer in answers):
        return f"the next call gives {answers}"
    if has_stepped:  # then all have taken that step, also a rank that raised after it
        job.step_eagerly()
    expected = job.expected_loss()
    job.advance()
    return "" if math.isclose(retried["value"], expected) else f"the next call gives {retried['value']}, not {expected}"


def judge_reload(job: Job, refusal: Answer) -> str:
    """After a step that some ranks have taken, or one of them in part."""
    if "load_state_dict" not in refusal["error"]:
        return f"cannot go on, and does not say how: {refusal['error']}"
    job.graph.load_state_dict(job.saved)
    again, expected = try_call(job.call_graph), job.expected_loss()
    if "value" not in again or not math.isclose(again["value"], expected):
        return f"after loading a checkpoint: {again}, not {expected}"
    job.advance()
    return ""


def outlive_rank(job: Job, fault: Callable[[], Any], faulty: int) -> Verdict:
    """A fault that ends a rank: the others call on until they hear of it."""
    if job.rank == faulty:
        fault()
        return "it has not ended", 0.0
    began = time.monotonic()
    while "value" in (own := try_call(job.call_graph)):
        pass
    own["seconds"] = time.monotonic() - began
    return judge_answer(own, math.nan, faulty), own["seconds"]


# ---- all of them


def run_world(ranks: int, way: str, names: list[str], seed: int) -> list[list[Verdict]]:
    """Verdicts of each rank, one for each fault, none of a rank that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        limit = 60.0 + 20 * len(names)
        results = start_ranks(partial(run_rank, ranks, names, seed), ranks, Path(folder), way, limit=limit)
    for rank, result in results.items():
        if isinstance(result, dict):
            print(f"rank {rank}: {result['raised']}", file=sys.stderr)
    return [result if isinstance(result := results.get(rank, []), list) else [] for rank in range(ranks)]


def join_verdicts(verdicts: list[list[Verdict]], i: int, name: str) -> Verdict:
    """Return what went wrong with fault number i, and the seconds until the last survivor had heard of it."""
    known = [own[i] for own in verdicts if len(own) > i]
    expected = len(verdicts) - (name in ENDS)
    if len(known) < expected:
        return f"{expected - len(known)} ranks have not answered", 0.0
    return next((wrong for wrong, _ in known if wrong), ""), max(seconds for _, seconds in known)


def run_faults(faults: int, seed: int, ranks: list[int], ways: list[str]) -> tuple[str, int, int]:
    """The table, and how many faults there were and how many ended otherwise than they should."""
    going_on = [name for name in FAULTS if name not in ENDS]
    rows, total, bad = [], 0, 0
    for way in ways:
        for count in ranks:
            chance = random.Random(f"{seed} {way} {count}")
            worlds = [[name] for name in ENDS for _ in range(faults)]
            worlds += [chance.sample(going_on, len(going_on)) for _ in range(faults)]
            results: dict[str, list[Verdict]] = defaultdict(list)
            for names in worlds:
                verdicts = run_world(count, way, names, chance.randrange(1 << 30))
                for i, name in enumerate(names):
                    results[name].append(join_verdicts(verdicts, i, name))
            for name in FAULTS:
                wrong = [text for text, _ in results[name] if text]
                total, bad = total + len(results[name]), bad + len(wrong)
                longest = max(seconds for _, seconds in results[name])
                rows.append([name, way, count, len(results[name]), len(wrong), f"{longest:.1f}"])
                for text in wrong:
                    print(f"{name}, {way}, {count} ranks: {text}", file=sys.stderr)
    return format_table(["fault", "over", "ranks", "faults", "wrong", "slowest, s"], rows), total, bad


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--faults", type=int, default=2, help="of each kind in each world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parse_options(parser)
    table, total, bad = run_faults(options.faults, options.seed, options.ranks, options.ways)
    print(f"{table}\n\n{total} faults, {bad} of them ended otherwise than they should")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
