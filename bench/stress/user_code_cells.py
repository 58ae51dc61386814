"""One program of ``user_programs/`` in plain PyTorch and as a Graph in one configuration, and how they compare."""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphzero as gz
from stress.user_programs import PROGRAMS, Program, Source

STEPS = 3
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": ("1", "2", "4", "dp2 x tp2", "gloo 2"),
    "stage": (0, 1, 2, 3),
    "micro_batches": (1, 2),
    "precision": ("float64", "float32", "bf16"),
    "recompute": (False, True),
    "in_backward": (False, True),
}
BOUNDS = {"float64": 1e-8, "float32": 5e-4, "bf16": 0.1}  # relative to a tensor's largest element, or to 1


@dataclass(frozen=True)
class Cell:
    program: str
    layout: str
    stage: int
    micro_batches: int
    precision: str
    recompute: bool
    in_backward: bool

    @property
    def is_real(self) -> bool:
        """Whether its ranks are processes."""
        return self.layout.startswith("gloo")

    def __str__(self) -> str:
        words = [f"{self.layout} ranks, stage {self.stage}, {self.precision}", f"{self.micro_batches} micro-batches"]
        words += ["recompute"] * self.recompute + ["in backward"] * self.in_backward
        return f"{self.program}: {', '.join(words)}"


def cells_of(program: str, seed: int) -> Iterator[Cell]:
    """Configurations in which every two options meet with all of their values, few at a time: drawn, the best first."""
    draw = random.Random(f"{program} {seed}")
    names = list(OPTIONS)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]
    }  # fmt: skip
    while missing:
        drawn = [{name: draw.choice(OPTIONS[name]) for name in names} for _ in range(30)]
        pairs = [set(itertools.combinations(one.items(), 2)) & missing for one in drawn]
        best = max(range(len(drawn)), key=lambda i: len(pairs[i]))
        if not pairs[best]:
            continue
        missing -= pairs[best]
        yield Cell(program, **drawn[best])


@dataclass
class Run:
    """Results of a program: outputs of each step, then everything that the user can see."""

    outputs: list[list[Any]]
    seen: dict[str, Any]
    warned: list[str] = field(default_factory=list)


@contextmanager
def settings(precision: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(source: Source) -> Program:
    torch.manual_seed(0)
    return source.make()


def plain(source: Source, precision: str) -> Run:
    """The program in plain PyTorch, on whole batches."""
    with settings(precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, outputs = made(source), []
        for number in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
                given = program.step(program.model, *source.batch(number))
            outputs.append([copied(x) for x in leaves(given)])
            program.optimizer.step()
            program.model.zero_grad()  # also what no optimizer has: a Graph leaves no gradients
            if program.between:
                program.between(program, number)
        return Run(outputs, seen(program))


class Step(gz.Graph):
    """A program's step in a cell's configuration."""

    def __init__(self, program: Program, cell: Cell) -> None:
        super().__init__(placement_of(cell))
        self.model, self.user_step = program.model, program.step
        self.add_optimizer(program.optimizer)
        if cell.stage:
            self.config.enable_zero(stage=cell.stage)
        if cell.precision == "bf16":
            self.config.enable_amp()
        self.config.set_gradient_accumulation_steps(cell.micro_batches)
        if cell.recompute:
            self.config.set_activation_memory("checkpoint")
        if cell.in_backward:
            self.config.set_optimizer_in_backward()

    def build(self, *args: Any) -> Any:
        return self.user_step(self.model, *args)


def placement_of(cell: Cell) -> gz.Placement:
    if cell.is_real:
        return gz.placement("cpu", range(2))
    if "tp" in cell.layout:
        return gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
    return gz.placement("cpu", range(int(cell.layout)), virtual=True)


def split_weights(model: nn.Module, placement: gz.Placement) -> None:
    """Every other weight by rows, the rest by columns, as in tensor parallelism."""
    weights = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] % 2 == p.shape[1] % 2 == 0]
    for number, weight in enumerate(weights):
        gz.to_global(weight, placement=placement, sbp=(gz.sbp.B, gz.sbp.S(number % 2)))


def graphs(cell: Cell, rank: int = 0) -> Run:
    """The program as a Graph; on real ranks each gives its share of a batch."""
    source = PROGRAMS[cell.program]
    with settings(cell.precision), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program, outputs = made(source), []
        graph = Step(program, cell)
        if "tp" in cell.layout:
            split_weights(program.model, graph.placement)
        for number in range(STEPS):
            args = [share(x, rank, cell) for x in source.batch(number)]
            outputs.append([copied(x) for x in leaves(graph(*args))])
            if program.between:
                with graph.full_parameters() if cell.is_real and program.writes else nullcontext():
                    program.between(program, number)
        return Run(outputs, seen(program), [str(warning.message) for warning in caught])


def share(x: Tensor, rank: int, cell: Cell) -> Tensor:
    return x.chunk(2)[rank].clone() if cell.is_real and x.dim() else x.clone()


def leaves(tree: Any) -> list[Any]:
    """Those of nested containers and dataclasses, ``None`` among them."""
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree, key=str) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def copied(x: Any) -> Any:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, Tensor) else x


def seen(program: Program) -> dict[str, Any]:
    """Everything of a user's objects, by name, as plain values."""
    found: dict[str, Any] = {}
    for path, module in program.model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and is_plain(value):
                found[f"{path}.{name}"] = value
        for name, buffer in module._buffers.items():
            found[f"buffer {path}.{name}"] = buffer
    first: dict[int, str] = {}
    for name, p in program.model.named_parameters(remove_duplicate=False):
        found |= {f"parameter {name}": p, f"requires_grad {name}": p.requires_grad, f"grad {name}": p.grad}
        found[f"tie {name}"] = first.setdefault(id(p), name)
    found |= {f"optimizer {name}": value for name, value in seen_of(program.optimizer).items()}
    found |= {f"watched {name}": value for name, value in program.watched.items()}
    return {name: [copied(leaf) for leaf in leaves(value)] for name, value in found.items()}


def seen_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and k not in ("state", "param_groups")}
    found = {f"attribute {k}": v for k, v in own.items() if is_plain(v)}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"group {i} {k}": v for k, v in group.items() if k != "params" and is_plain(v)}
        for j, p in enumerate(group["params"]):
            found[f"group {i} parameter {j}"] = p
            found |= {f"state {i} {j} {k}": v for k, v in optimizer.state.get(p, {}).items()}
    return found


def is_plain(value: Any) -> bool:
    return all(isinstance(leaf, Tensor | int | float | complex | str | None.__class__) for leaf in leaves(value))


def differences(ours: Run, theirs: Run, cell: Cell, rank: int = 0) -> list[str]:
    """Differences from plain PyTorch."""
    found = []
    for number, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        found += compared(f"outputs of step {number}", a, b, cell, rank)
    for name in theirs.seen.keys() | ours.seen.keys():
        if name not in ours.seen or name not in theirs.seen:
            found.append(f"{name} is {'missing' if name in theirs.seen else 'new'}")
        else:
            found += compared(name, ours.seen[name], theirs.seen[name], cell)
    return sorted(found, key=lambda text: (not text.startswith("outputs"), text))


def compared(name: str, ours: Sequence[Any], theirs: Sequence[Any], cell: Cell, rank: int | None = None) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{name}: {len(ours)} values, not {len(theirs)}"]
    texts = [difference(a, b, cell, rank) for a, b in zip(ours, theirs, strict=True)]
    return [f"{name}: {text}" for text in texts if text]


def difference(a: Any, b: Any, cell: Cell, rank: int | None) -> str:
    if not isinstance(b, Tensor) or not isinstance(a, Tensor):
        numbers = all(isinstance(x, float) for x in (a, b))
        return "" if a == b or (numbers and near(a, b, cell)) else f"{a!r}, not {b!r}"[:120]
    if rank is not None and cell.is_real and b.dim() and 2 * a.shape[0] == b.shape[0]:
        b = b.chunk(2)[rank]
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, not {tuple(b.shape)}"
    loose = cell.precision == "bf16"
    if a.dtype != b.dtype and not loose:
        return f"{a.dtype}, not {b.dtype}"
    if not b.numel() or (loose and not b.dtype.is_floating_point):
        return ""
    a, b = (x.to(torch.complex128) for x in (a, b))
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max()
    largest = b.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0)
    return "" if apart <= BOUNDS[cell.precision] * largest else f"apart by {float(apart):.1e}"


def near(a: float, b: float, cell: Cell) -> bool:
    return abs(a - b) <= BOUNDS[cell.precision] * max(1.0, abs(b))
