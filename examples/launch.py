"""The options of train.py, and what starts it on many ranks.  A wrong option is one sentence, before any rank starts.

    python examples/launch.py --ranks 4 --model gpt2 --stage 3

``make train`` calls it.  It imports no torch, so that its answer comes at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

TRAIN = Path(__file__).with_name("train.py")
NEEDS = {"gpt2": ("torch", "graphzero", "tqdm", "transformers"), "mlp": ("torch", "graphzero", "tqdm")}
HEAD = 32  # the width of one attention head
LONGEST = 1024  # positions


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, by the first rank only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message.removeprefix('argument ')}", file=sys.stderr, flush=True)
        raise SystemExit(2)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked alone and together; ends the process with a sentence and status 2 if one is wrong."""
    parser = Parser("train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    started = os.environ.get("WORLD_SIZE")
    parser.add_argument("--ranks", type=int, default=int(started or 4), help="processes")
    parser.add_argument("--model", choices=tuple(NEEDS), default="gpt2")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, help="sequences, of all ranks together; by default one a rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--compare-steps", type=int, default=8, help="steps of each run of the table; 0: no table")
    options = parser.parse_args(arguments)
    if options.batch is None:
        options.batch = options.ranks
    wrong = next(problems(options, started), None)
    if wrong:
        parser.error(wrong)
    return options


def problems(options: argparse.Namespace, started: str | None) -> Iterator[str]:
    """Sentences about what does not go, or not together."""
    for name in ("ranks", "steps", "batch", "context", "layers", "width"):
        if getattr(options, name) < 1:
            yield f"--{name} {getattr(options, name)}: at least 1 is needed"
    if started is not None and options.ranks != int(started):
        yield f"--ranks {options.ranks}: torchrun has started {started}; leave --ranks out"
    if options.batch % options.ranks:
        yield (
            f"--batch {options.batch}: {options.ranks} ranks cannot share {options.batch} sequences equally; "
            f"take a multiple of {options.ranks}"
        )
    if options.context > LONGEST:
        yield f"--context {options.context}: at most {LONGEST} bytes"
    if options.model == "gpt2" and options.width > HEAD and options.width % HEAD:
        yield f"--width {options.width}: gpt2 has heads of {HEAD}; take a multiple of {HEAD}"
    if options.compare_steps < 0 or options.compare_steps == 1:
        yield f"--compare-steps {options.compare_steps}: 0 for no table, else at least 2, of which the first compiles"
    missing = [name for name in NEEDS[options.model] if find_spec(name) is None]
    if missing:
        yield f"--model {options.model} needs {' and '.join(missing)}: pip install -e '.[examples]'"


def start(options: argparse.Namespace) -> NoReturn:
    """Become the process that starts the ranks, or the only rank."""
    arguments = [word for name, value in vars(options).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *(several if options.ranks > 1 else []), str(TRAIN), *arguments])


if __name__ == "__main__":
    start(options_of())
