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

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "runtime"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/
from _run import markdown
from failure_toys import WAYS
from failure_toys import run as start_ranks

SOON = 10.0  # seconds
Act = Callable[["Job", random.Random], Any]  # with the fault prepared, what the rank does instead of its call


class Train(gz.Graph):
    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__()
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.add_optimizer(optimizer, lr_sch=self.schedule)
        self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh()))).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


class Job:
    """One rank of a world that trains."""

    def __init__(self, rank: int, ranks: int, stage: int) -> None:
        self.rank, self.ranks, self.step = rank, ranks, 0
        self.graph = Train(model(), stage)
        self.eager = model()
        self.optimizer = torch.optim.AdamW(self.eager.parameters(), lr=1e-2)
        self.saved: dict[str, Any] = {}

    def call(self) -> float:
        return float(self.graph(batch(self.step, self.rank)))

    @property
    def steps(self) -> list[Any]:
        """Of the program that ran last."""
        assert self.graph._selection.last is not None
        return self.graph._selection.last.executor(self.graph._source.world).program.steps

    def wanted(self) -> float:
        """The loss of the step that comes."""
        with torch.no_grad():
            return float(self._loss())

    def follow(self) -> None:
        """All have taken a step with this batch."""
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()

    def advance(self) -> None:
        """The same; the next batch, and a checkpoint."""
        self.follow()
        self.step += 1
        self.saved = self.graph.full_state_dict()

    def _loss(self) -> torch.Tensor:
        return self.eager(torch.cat([batch(self.step, rank) for rank in range(self.ranks)])).square().mean()


# ---- faults


def raising(error: Callable[[], BaseException]) -> Act:
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
            return job.call()
        finally:
            steps[at] = step

    return act


def interrupted(job: Job, chance: random.Random) -> Any:
    """Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 8e-3))
    try:
        return job.call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def between(name: str) -> Act:
    """A part of a call of the Graph raises."""

    def act(job: Job, chance: random.Random) -> Any:
        def fail(*_: Any) -> None:
            raise OSError(f"in {name}")

        setattr(job.graph, name, fail)
        try:
            return job.call()
        finally:
            vars(job.graph).pop(name)

    return act


def scheduler_raises(job: Job, chance: random.Random) -> Any:
    def fail() -> None:
        raise LookupError("no such rate")

    job.graph.schedule.step = fail  # type: ignore[method-assign]
    try:
        return job.call()
    finally:
        vars(job.graph.schedule).pop("step")


def killed(job: Job, chance: random.Random) -> Any:
    """By a signal that nothing can catch, at any moment."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 8e-3))
    while True:
        job.call()


def killed_with_a_child(job: Job, chance: random.Random) -> Any:
    """While a process that it has forked lives on."""
    if os.fork() == 0:
        time.sleep(2 * SOON)
        os._exit(0)
    return killed(job, chance)


def exits(job: Job, chance: random.Random) -> Any:
    def leave() -> BaseException:
        os._exit(3)

    return raising(leave)(job, chance)


@dataclass(frozen=True)
class Fault:
    """act: what the faulty rank does.  is_end: its process is gone then."""

    act: Act
    is_end: bool = False


FAULTS: dict[str, Fault] = {
    "an exception": Fault(raising(lambda: IndexError("index 77 is out of range"))),
    "out of memory": Fault(raising(lambda: MemoryError("no room"))),
    "SystemExit": Fault(raising(lambda: SystemExit(2))),
    "an interrupt": Fault(interrupted),
    "an exception while binding": Fault(between("_bind")),
    "an exception before running": Fault(between("_run")),
    "a scheduler raises": Fault(scheduler_raises),
    "killed": Fault(killed, is_end=True),
    "killed, a child lives on": Fault(killed_with_a_child, is_end=True),
    "os._exit": Fault(exits, is_end=True),
}


# ---- one world


def work(ranks: int, names: list[str], seed: int, rank: int) -> list[dict[str, Any]]:
    """One rank: faults one after the other; the last one may end a process."""
    chance = random.Random(seed)
    job = Job(rank, ranks, chance.choice((1, 2, 3)))
    job.call()
    job.advance()
    found = []
    for name in names:
        faulty, seed = chance.randrange(ranks), chance.randrange(1 << 30)
        for _ in range(chance.randrange(3)):
            job.call()
            job.advance()
        dist.barrier()
        found.append((end if FAULTS[name].is_end else survive)(job, name, faulty, seed))
        if found[-1]["wrong"]:
            break
    return found


def tried(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found: dict[str, Any] = {"value": call()}
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", ()))}
    return found | {"seconds": time.monotonic() - began}


def survive(job: Job, name: str, faulty: int, seed: int) -> dict[str, Any]:
    """A fault after which all go on: what is wrong with that, and the seconds until this rank raised."""
    wanted, act = job.wanted(), FAULTS[name].act
    mine = tried(lambda: act(job, random.Random(seed)) if job.rank == faulty else job.call())
    wrong = judged(mine, wanted, faulty, job.rank)
    everyone = gathered([mine, wrong])
    taken = ["value" in one for one, _ in everyone]
    if not any(bad for _, bad in everyone):
        retried = tried(job.call)
        if "value" in mine and retried.get("ranks") == [faulty]:  # this rank has not heard of the fault before
            retried = tried(job.call)
        answers = gathered(retried)
        if all("value" in one for one in answers):
            if any(taken):  # then all have taken that step, also who raised after it
                job.follow()
            again = job.wanted()
            wrong = "" if near(retried["value"], again) else f"the next call gives {retried['value']}, not {again}"
            job.advance()
        elif any("value" in one for one in answers):
            wrong = f"the next call gives {answers}"
        else:
            wrong = reloaded(job, retried)
    return {"wrong": wrong, "seconds": 0.0 if job.rank == faulty else mine["seconds"], "told": mine.get("error", "")}


def judged(mine: dict[str, Any], wanted: float, faulty: int, rank: int) -> str:
    """What is wrong with what a rank has got while another one had a fault."""
    if rank == faulty:
        return ""
    if mine["seconds"] > SOON:
        return f"took {mine['seconds']:.1f} s: {mine.get('error', 'no error')}"
    if "error" in mine:
        return "" if f"rank {faulty}" in mine["error"] else f"names another rank or none: {mine['error']}"
    return "" if near(mine["value"], wanted) else f"finished with {mine['value']}, not {wanted}"


def reloaded(job: Job, refusal: dict[str, Any]) -> str:
    """After a step that some ranks have taken, or one of them in part."""
    if "load_state_dict" not in refusal["error"]:
        return f"cannot go on, and does not say how: {refusal['error']}"
    job.graph.load_state_dict(job.saved)
    again, wanted = tried(job.call), job.wanted()
    if "value" not in again or not near(again["value"], wanted):
        return f"after loading a checkpoint: {again}, not {wanted}"
    job.advance()
    return ""


def end(job: Job, name: str, faulty: int, seed: int) -> dict[str, Any]:
    """A fault that ends a rank: the others call on until they hear of it."""
    if job.rank == faulty:
        FAULTS[name].act(job, random.Random(seed))
        return {"wrong": "it has not ended", "seconds": 0.0, "told": ""}
    began = time.monotonic()
    while "value" in (mine := tried(job.call)):
        pass
    seconds = time.monotonic() - began
    wrong = "" if f"rank {faulty}" in mine["error"] else f"names another rank or none: {mine['error']}"
    return {"wrong": wrong or ("" if seconds < SOON else f"took {seconds:.1f} s"), "seconds": seconds,
            "told": mine["error"]}  # fmt: skip


def gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * abs(b)


# ---- all of them


def world(ranks: int, way: str, names: list[str], seed: int) -> list[list[dict[str, Any]]]:
    """What each rank has found: a list of faults, empty for one that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        told = start_ranks(partial(work, ranks, names, seed), ranks, Path(folder), way, limit=60.0 + 20 * len(names))
    for rank, found in told.items():
        if isinstance(found, dict):
            print(f"rank {rank}: {found['raised']}", file=sys.stderr)
    return [found if isinstance(found := told.get(rank, []), list) else [] for rank in range(ranks)]


def verdict(told: list[list[dict[str, Any]]], i: int, name: str) -> tuple[str, float]:
    """What went wrong with fault number i, and the seconds until the last survivor had heard of it."""
    known = [found[i] for found in told if len(found) > i]
    expected = len(told) - FAULTS[name].is_end
    if len(known) < expected:
        return f"{expected - len(known)} ranks have not answered", 0.0
    return next((one["wrong"] for one in known if one["wrong"]), ""), max(one["seconds"] for one in known)


def run(faults: int, seed: int, ranks: list[int], ways: list[str]) -> tuple[str, int, int]:
    """The table, and how many faults were made and ended otherwise than they should."""
    going_on = [name for name, fault in FAULTS.items() if not fault.is_end]
    ending = [name for name, fault in FAULTS.items() if fault.is_end]
    rows, made, bad = [], 0, 0
    for way in ways:
        for count in ranks:
            chance = random.Random(f"{seed} {way} {count}")
            worlds = [[name] for name in ending for _ in range(faults)]
            worlds += [chance.sample(going_on, len(going_on)) for _ in range(faults)]
            found: dict[str, list[tuple[str, float]]] = {}
            for names in worlds:
                told = world(count, way, names, chance.randrange(1 << 30))
                for i, name in enumerate(names):
                    found.setdefault(name, []).append(verdict(told, i, name))
            for name in FAULTS:
                wrong = [text for text, _ in found[name] if text]
                made, bad = made + len(found[name]), bad + len(wrong)
                longest = max(seconds for _, seconds in found[name])
                rows.append([name, way, str(count), str(len(found[name])), str(len(wrong)), f"{longest:.1f}"])
                for text in wrong:
                    print(f"{name}, {way}, {count} ranks: {text}", file=sys.stderr)
    return markdown(["fault", "over", "ranks", "faults", "wrong", "slowest, s"], rows), made, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2, help="of each kind in each world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table, made, bad = run(options.faults, options.seed, options.ranks, options.ways)
    print(f"{table}\n\n{made} faults, {bad} of them ended otherwise than they should")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
