"""Ranks killed at random moments of a run under torchrun, which starts all again: the run must end as if nothing was.

    python bench/stress/killed_ranks.py               # 20 kills, two ranks, stage 3
    python bench/stress/killed_ranks.py --seed 7 --stage 1 --ranks 3

Runs examples/resume.py: once undisturbed, then as often as it takes to kill so many ranks, each after a time drawn at
random from what the undisturbed run took.  Every run must end by itself with the undisturbed run's losses and, bit by
bit, its last checkpoint.  At last a run is killed whole and goes on with one rank, and then with twice as many: there
losses are equal but for rounding (float64, 1e-9).  Exits with 1 where one ends otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import graphzero as gz

RESUME = Path(__file__).resolve().parents[2] / "examples" / "resume.py"
SMALL = ("--model", "mlp", "--width", "16", "--steps", "40", "--save-every", "4", "--double")


class Run:
    """``examples/resume.py`` under torchrun, with what it prints."""

    def __init__(self, folder: Path, ranks: int, stage: int, restarts: int = 0):
        self.folder, self.output, self.stage = folder, folder.with_suffix(".txt"), stage
        self.count, self.begun, self.seconds = ranks, time.monotonic(), 0.0
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += [str(RESUME), str(folder), "--stage", str(stage), *SMALL]
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": str(folder) + ".error"},
            )  # fmt: skip

    def end(self, seconds: float = 300.0) -> str:
        """Wait for its end; what it has printed.  Raises AssertionError where it fails, TimeoutExpired in time."""
        try:
            code = self.process.wait(seconds)
        finally:
            self.kill()
        self.seconds, text = time.monotonic() - self.begun, self.output.read_text()
        assert code == 0, f"{self.folder} ended with {code}:\n{text}"
        return text

    def kill(self) -> None:
        """End it with all its ranks, whatever they do."""
        for process in (*self.list_ranks(), self.process.pid):
            kill(process)
        self.process.wait()

    def list_ranks(self) -> list[int]:
        """Processes of the ranks that live now: those with its folder on their command line, but for torchrun's."""
        ranks = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):
                words = path.read_text().split("\0")
                if str(self.folder) in words and "torch.distributed.run" not in words:
                    ranks.append(int(path.parent.name))
        return ranks

    def kill_one(self, chance: random.Random) -> bool:
        """Kill one rank; whether there was one."""
        ranks = self.list_ranks()
        if not ranks or self.process.poll() is not None:
            return False
        kill(chance.choice(ranks))
        return True

    def has_saved(self, steps: int) -> bool:
        """Whether a checkpoint of so many steps or more is there."""
        last = gz.latest(self.folder)
        return last is not None and int(last.name.rpartition("-")[2]) >= steps


def read_losses(text: str) -> dict[int, float]:
    """The loss after each step that was printed; of a step that was taken again, the last one."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+), loss ([\d.e+-]+)", text)}


def read_last_checkpoint(folder: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint but for its index, which tells times."""
    last = gz.latest(folder)
    assert last is not None, f"no checkpoint in {folder}"
    return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def disturb_run(folder: Path, whole: Run, kills: int, chance: random.Random, saved: int = 0) -> tuple[int, str]:
    """One run like ``whole`` of which up to so many ranks are killed; how many were, and what it printed.

    saved: steps of which there is a checkpoint before a rank is killed, at once; 0: it is killed at any time.
    """
    run, done = Run(folder, whole.count, whole.stage, restarts=kills), 0
    while done < kills and run.process.poll() is None:
        if saved and not run.has_saved(saved):
            time.sleep(0.02)
            continue
        time.sleep(0 if saved else chance.uniform(0, whole.seconds))
        done += run.kill_one(chance)
    return done, run.end()


def check_kills(where: Path, whole: Run, kills: int, seed: int, saved: int = 0) -> None:
    """Kill so many ranks; raises AssertionError where a run ends otherwise than ``whole``, which was undisturbed.

    saved: see ``disturb_run``; such a run has to go on from that step or a later one.
    """
    expected, files = read_losses(whole.output.read_text()), read_last_checkpoint(whole.folder)
    print(f"undisturbed: {whole.seconds:.1f} s, last loss {max(expected.items())[1]:.12g}", flush=True)
    chance, done, runs = random.Random(seed), 0, 0
    while done < kills:
        folder, runs, begun = where / f"killed-{runs}", runs + 1, time.monotonic()
        now, text = disturb_run(folder, whole, kills - done, chance, saved)
        losses = read_losses(text)
        assert losses.items() <= expected.items() and max(losses) == max(expected), f"{folder}:\n{text}"
        assert read_last_checkpoint(folder) == files, f"{folder}: the last checkpoint differs"
        resumed = [int(step) for step in re.findall(r"goes on from step (\d+)", text)]
        assert not (saved and now) or max(resumed, default=0) >= saved, f"{folder} did not go on:\n{text}"
        done += now
        took = f"{time.monotonic() - begun:.1f} s, {now} killed, went on from steps {resumed}"
        print(f"run {runs}: {took}; losses and last checkpoint equal", flush=True)
    print(f"{done} ranks killed in {runs} runs: all ended as the undisturbed one")


def check_other_ranks(where: Path, whole: Run) -> None:
    """A run killed whole goes on with one rank, and then with twice as many as at first."""
    expected, ranks, folder = read_losses(whole.output.read_text()), whole.count, where / "moved"
    for now, until in ((ranks, 12), (1, 24)):
        run = Run(folder, now, whole.stage)
        while run.process.poll() is None and not run.has_saved(until):
            time.sleep(0.02)
        run.kill()
    losses = read_losses(Run(folder, 2 * ranks, whole.stage).end())
    off = max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses.items())
    print(f"{ranks}, then 1, then {2 * ranks} ranks: losses differ by {off:.1e}")
    assert max(losses) == max(expected) and off < 1e-9, losses


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        whole = Run(Path(where, "whole"), options.ranks, options.stage)
        whole.end()
        check_kills(Path(where), whole, options.kills, options.seed)
        check_other_ranks(Path(where), whole)


if __name__ == "__main__":
    main()
