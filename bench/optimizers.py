"""Published optimizers, five steps each at stages 0 and 3 on two virtual ranks, against plain PyTorch.

    pip install --no-deps pytorch_optimizer==4.1.0 schedulefree prodigyopt timm torchvision torchao transformers
    python bench/optimizers.py                         # all of them, kept in optimizers.jsonl
    python bench/optimizers.py --only 'prodigy'        # those whose name matches
    python bench/optimizers.py --page                  # what is kept, into bench/results/ and docs/optimizers.md

The packages are those of the extra ``optimizers``; what is not installed is left out.  Every class is constructed with
its defaults but for what ``MADE`` says.  Outcomes: equal, to ``LIMITS``; refused, by a GraphZeroError; wrong; crash,
any other error.  A class that plain PyTorch does not step with a plain ``optimizer.step()`` is skipped.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _run import filled, keep_line, kept_lines, markdown
from parity import TrainGraph
from torch import Tensor, nn
from zoo.trial import declare_torchvision_ops

import graphzero as gz
from graphzero.errors import GraphZeroError

STEPS = 5
STAGES = (0, 3)
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest difference, in units of the largest parameter
RESULTS = Path(__file__).parent / "results" / "optimizers.md"
PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"
PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt",
    "timm": "timm.optim", "torchao": "torchao.optim", "transformers": "transformers.optimization",
}  # fmt: skip
OUTCOMES = ("equal", "refused", "wrong", "crash", "skipped")


class Model(nn.Module):
    """A convolution kernel, matrices and vectors, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.conv(x)).flatten(1))
        out: Tensor = self.down(torch.tanh(self.up(hidden)))
        return (out - y).square().mean()


def _matrices_apart(model: Model) -> list[dict[str, Any]]:
    params = list(model.parameters())
    flags = {True: [p for p in params if p.ndim >= 2], False: [p for p in params if p.ndim < 2]}
    return [{"params": held, "use_muon": flag} for flag, held in flags.items()]


def _over(base: str, **given: Any) -> Callable[[type, Model], Any]:
    """An optimizer around one of torch's."""
    return lambda cls, model: cls(getattr(torch.optim, base)(model.parameters(), lr=1e-2), **given)


def _with(**given: Any) -> Callable[[type, Model], Any]:
    return lambda cls, model: cls(model.parameters(), **given)


def _apart(cls: Any, model: Model) -> Any:
    return cls(_matrices_apart(model))


def _of_model(cls: Any, model: Model) -> Any:
    return cls(model)


MADE: dict[str, Callable[[Any, Model], Any]] = {
    **dict.fromkeys(("Muon", "AdaMuon", "AdaGO", "DistributedMuon", "MuonClip", "NorMuon"), _apart),
    **dict.fromkeys(("AdamMini", "LOMO", "AdaLOMO"), _of_model),
    **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"),
                    _over("SGD")),
    "BSAM": _with(num_data=8),
    "Ranger21": _with(num_iterations=20, lr=1e-2),
    "transformers.Adafactor": _with(),
    "transformers.LayerWiseDummyOptimizer": lambda cls, model: cls({}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """name: ``package.Class``."""

    name: str
    cls: Any

    def made(self, model: Model) -> Any:
        known = MADE.get(self.name) or (MADE.get(self.cls.__name__) if self.name.startswith("pytorch_opt") else None)
        optimizer = known(self.cls, model) if known else self.cls(model.parameters())
        if hasattr(optimizer, "train") and callable(optimizer.train):  # of the schedule-free ones
            optimizer.train()
        return optimizer


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str
    says: str = ""
    seconds: float = 0.0
    programs: int = 0


def cases() -> Iterator[Case]:
    """Every class of the packages that is there, once."""
    known: set[Any] = set()
    declare_torchvision_ops()  # timm imports torchvision
    for package, module in PACKAGES.items():
        try:
            held = vars(importlib.import_module(module))
        except ImportError as error:
            print(f"without {package}: {error}", file=sys.stderr)
            continue
        in_full(package)
        for name, cls in sorted(held.items()):
            is_one = inspect.isclass(cls) and (issubclass(cls, torch.optim.Optimizer) or _is_wrapper(cls))
            ours = is_one and cls.__module__.startswith(package) and cls not in known and not name.startswith("_")
            if ours and not inspect.isabstract(cls):
                known.add(cls)
                yield Case(f"{package}.{name}", cls)


def in_full(package: str) -> None:
    """Let products that a package rounds to bfloat16 be in float64: two ways to multiply round apart there."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for function in filter(inspect.isfunction, list(vars(module).values())):
                function.__defaults__ = _in_float64(function.__defaults__)


def _in_float64(defaults: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return defaults and tuple(torch.float64 if x is torch.bfloat16 else x for x in defaults)


def _is_wrapper(cls: type) -> bool:
    """A class that steps, though it is none of torch's Optimizer."""
    return callable(getattr(cls, "step", None)) and callable(getattr(cls, "zero_grad", None))


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 2, 4, 4, generator=generator, dtype=dtype), torch.randn(8, 4, generator=generator, dtype=dtype))
        for _ in range(STEPS)
    ]


def plain(case: Case, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
    """The parameters after each step of plain PyTorch, whose gradients are summed over ``parts`` of each batch."""
    model = Model().to(dtype)
    optimizer, after = case.made(model), []
    for x, y in batches(dtype):
        optimizer.zero_grad()
        for one, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (model(one, wanted) / parts).backward()
        torch.manual_seed(2)
        optimizer.step()
        after.append(_values(model))
    return after


def _values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def reference(case: Case) -> tuple[torch.dtype, list[Tensor], float]:
    """Plain PyTorch's in float64, or float32 where the optimizer takes only that; and how far one may be from it.

    That is ten times what plain PyTorch differs from itself by where it sums gradients in another order: some cast to
    bfloat16 inside, or take signs.
    """
    dtype = torch.float64
    try:
        want = plain(case, dtype)
    except Exception:  # noqa: BLE001 - whatever it cannot do
        dtype = torch.float32
        want = plain(case, dtype)
    own = max(map(distance, plain(case, dtype, parts=2), want))
    return dtype, want, max(LIMITS[dtype], 10 * own)


def distance(values: Tensor, want: Tensor) -> float:
    difference = float((values - want).abs().max() / want.abs().max())
    return difference if difference == difference else float("inf")


def tried(case: Case) -> Result:
    try:
        dtype, want, limit = reference(case)
    except Exception as error:  # noqa: BLE001
        return Result(case.name, "skipped", f"plain PyTorch: {_first_line(error)}")
    began, programs, worst = time.perf_counter(), 0, 0.0
    for stage in STAGES:
        try:
            model = Model().to(dtype)
            graph = TrainGraph(model, case.made(model), None, stage, gz.placement("cpu", range(2), virtual=True))
            for step, (x, y) in enumerate(batches(dtype)):
                torch.manual_seed(2)
                graph(x, y)
                worst = max(worst, distance(_values(model), want[step]))
                if worst > limit:
                    says = f"stage {stage}, step {step + 1}: {worst:.1e} from plain PyTorch in {_name(dtype)}"
                    return Result(case.name, "wrong", says)
            programs = max(programs, len(graph._selection.programs.all))
        except GraphZeroError as error:
            return Result(case.name, "refused", _first_line(error))
        except Exception as error:  # noqa: BLE001
            return Result(case.name, "crash", f"stage {stage}: {type(error).__name__}: {_first_line(error)}")
    seconds = time.perf_counter() - began
    own = f", to its own rounding ({limit:.0e})" if worst > LIMITS[dtype] else ""
    return Result(case.name, "equal", f"{worst:.0e} in {_name(dtype)}{own}", seconds, programs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return re.sub(r"/\S*/site-packages/|/\S*/(?=[\w-]+/[\w-]+\.py)", "", text.splitlines()[0])[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    parser.add_argument("--save", default="optimizers.jsonl", help="where results are kept, a line for each class")
    parser.add_argument("--page", action="store_true", help="write what is kept into results and the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.page:
        results = [Result(**one) for one in kept_lines(options.save).values()]
        RESULTS.write_text(text_of(results), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled(page, "optimizers.py", "packages", summary(results)), encoding="utf-8")
        return 0
    results = []
    for case in cases():
        if re.search(options.only, case.name, re.IGNORECASE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(tried(case))
            print(f"{results[-1].name:45} {results[-1].outcome:8} {results[-1].says}", flush=True)
            keep_line(options.save, asdict(results[-1]))
    print(summary(results))
    return int(any(one.outcome in ("wrong", "crash") for one in results))


def summary(results: list[Result]) -> str:
    """Numbers of outcomes by package."""
    rows = []
    for package in PACKAGES:
        counts = Counter(one.outcome for one in results if one.name.split(".")[0] == package)
        if counts:
            rows.append([package, *(counts[outcome] for outcome in OUTCOMES)])
    return markdown(["package", *OUTCOMES], rows)


def text_of(results: list[Result]) -> str:
    parts = [
        "# Optimizers as people publish them\n\n```bash\npython bench/optimizers.py\n```\n",
        f"Python {sys.version.split()[0]}, torch {torch.__version__}. {STEPS} steps of a convolution, a norm and two "
        f"linear layers at stages {' and '.join(map(str, STAGES))} on two virtual ranks, every parameter compared with "
        f"plain PyTorch's after each step: in float64 to {LIMITS[torch.float64]:.0e} of the largest, or in float32 to "
        f"{LIMITS[torch.float32]:.0e} where an optimizer takes only that; what a package rounds to bfloat16 by default "
        "is in float64 too.\n",
        summary(results),
    ]
    for outcome in OUTCOMES:
        held = [one for one in results if one.outcome == outcome]
        if held:
            lines = [f"* `{one.name}`: {re.sub(' at 0x[0-9a-f]+', '', one.says)}" for one in held]
            parts += [f"\n## {outcome.capitalize()} ({len(held)})\n", *lines]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
