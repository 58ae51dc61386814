"""One program of ``user_programs/`` in plain PyTorch and as a Graph in one configuration, and how they compare."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from _run import default_dtype
from parity import largest_difference
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

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
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.float32}
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

    def placement(self) -> gz.Placement:
        if self.is_real:
            return gz.placement("cpu", range(2))
        if "tp" in self.layout:
            return gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
        return gz.placement("cpu", range(int(self.layout)), virtual=True)

    def __str__(self) -> str:
        words = [f"{self.layout} ranks, stage {self.stage}, {self.precision}", f"{self.micro_batches} micro-batches"]
        words += ["recompute"] * self.recompute + ["in backward"] * self.in_backward
        return f"{self.program}: {', '.join(words)}"


def list_cells(program: str, seed: int) -> Iterator[Cell]:
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
class ProgramResults:
    """Results of a program: outputs of each step, then everything that the user can see, by name; and warnings."""

    outputs: list[list[Any]]
    state: dict[str, list[Any]]
    warnings: list[str] = field(default_factory=list)


def seeded(source: Source) -> Program:
    torch.manual_seed(0)
    return source.make()


def train_eagerly(source: Source, precision: str) -> ProgramResults:
    """The program in plain PyTorch, on whole batches."""
    with default_dtype(DTYPES[precision]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, outputs = seeded(source), []
        for number in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                results = program.step(program.model, *source.batch(number))
            outputs.append(copy_leaves(results))
            program.optimizer.step()
            program.model.zero_grad()  # also what no optimizer has: a Graph leaves no gradients
            if program.between:
                program.between(program, number)
        return ProgramResults(outputs, collect_state(program))


class ProgramGraph(gz.Graph):
    """A program's step in a cell's configuration."""

    def __init__(self, program: Program, cell: Cell) -> None:
        super().__init__(cell.placement())
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


def split_weights(model: nn.Module, placement: gz.Placement) -> None:
    """Every other weight by rows, the rest by columns, as in tensor parallelism."""
    weights = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] % 2 == p.shape[1] % 2 == 0]
    for number, weight in enumerate(weights):
        gz.to_global(weight, placement=placement, sbp=(gz.sbp.B, gz.sbp.S(number % 2)))


def train_graph(cell: Cell, rank: int = 0) -> ProgramResults:
    """The program as a Graph; on real ranks each gives its share of a batch."""
    source = PROGRAMS[cell.program]
    with default_dtype(DTYPES[cell.precision]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program, outputs = seeded(source), []
        graph = ProgramGraph(program, cell)
        if "tp" in cell.layout:
            split_weights(program.model, graph.placement)
        for number in range(STEPS):
            batch = source.batch(number)
            shares = [x.chunk(2)[rank].clone() if cell.is_real and x.dim() else x.clone() for x in batch]
            outputs.append(copy_leaves(graph(*shares)))
            if program.between:
                with graph.full_parameters() if cell.is_real and program.writes else nullcontext():
                    program.between(program, number)
        return ProgramResults(outputs, collect_state(program), [str(warning.message) for warning in caught])


def copy_leaves(tree: Any) -> list[Any]:
    return [copy_whole(x) for x in tree_leaves(tree)]


def copy_whole(x: Any) -> Any:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, Tensor) else x


def collect_state(program: Program) -> dict[str, list[Any]]:
    """Everything of a user's objects, by name, as plain values."""
    state: dict[str, Any] = {}
    for path, module in program.model.named_modules():
        state |= {f"{path}.{name}": value for name, value in plain_attributes(module)}
        state |= {f"buffer {path}.{name}": buffer for name, buffer in module._buffers.items()}
    first: dict[int, str] = {}
    for name, p in program.model.named_parameters(remove_duplicate=False):
        state |= {f"parameter {name}": p, f"requires_grad {name}": p.requires_grad, f"grad {name}": p.grad}
        state[f"tie {name}"] = first.setdefault(id(p), name)
    optimizer = program.optimizer
    own = [(name, x) for name, x in plain_attributes(optimizer) if name not in ("state", "param_groups")]
    state |= {f"optimizer attribute {name}": value for name, value in own}
    for i, group in enumerate(optimizer.param_groups):
        state |= {f"optimizer group {i} {k}": v for k, v in group.items() if k != "params" and is_plain(v)}
        for j, p in enumerate(group["params"]):
            state[f"optimizer group {i} parameter {j}"] = p
            state |= {f"optimizer state {i} {j} {k}": v for k, v in optimizer.state.get(p, {}).items()}
    state |= {f"watched {name}": value for name, value in program.watched.items()}
    return {name: copy_leaves(value) for name, value in state.items()}


def plain_attributes(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("_") and is_plain(value)]


def is_plain(value: Any) -> bool:
    return all(isinstance(leaf, Tensor | int | float | complex | str | None.__class__) for leaf in tree_leaves(value))


def compare_trainings(training: ProgramResults, expected: ProgramResults, cell: Cell, rank: int = 0) -> list[str]:
    """Differences from plain PyTorch."""
    differences = []
    for number, (a, b) in enumerate(zip(training.outputs, expected.outputs, strict=True)):
        differences += compare_lists(f"outputs of step {number}", a, b, cell, rank)
    for name in expected.state.keys() | training.state.keys():
        if name not in training.state or name not in expected.state:
            differences.append(f"{name} is {'missing' if name in expected.state else 'new'}")
        else:
            differences += compare_lists(name, training.state[name], expected.state[name], cell)
    return sorted(differences, key=lambda text: (not text.startswith("outputs"), text))


def compare_lists(
    name: str, values: Sequence[Any], expected: Sequence[Any], cell: Cell, rank: int | None = None
) -> list[str]:
    if len(values) != len(expected):
        return [f"{name}: {len(values)} values, not {len(expected)}"]
    texts = [compare_values(a, b, cell, rank) for a, b in zip(values, expected, strict=True)]
    return [f"{name}: {text}" for text in texts if text]


def compare_values(a: Any, b: Any, cell: Cell, rank: int | None) -> str:
    bound = BOUNDS[cell.precision]
    if not isinstance(b, Tensor) or not isinstance(a, Tensor):
        is_near = isinstance(a, float) and isinstance(b, float) and abs(a - b) <= bound * max(1.0, abs(b))
        return "" if a == b or is_near else f"{a!r}, not {b!r}"[:120]
    if rank is not None and cell.is_real and b.dim() and 2 * a.shape[0] == b.shape[0]:
        b = b.chunk(2)[rank]
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, not {tuple(b.shape)}"
    loose = cell.precision == "bf16"
    if a.dtype != b.dtype and not loose:
        return f"{a.dtype}, not {b.dtype}"
    if not b.numel() or (loose and not b.dtype.is_floating_point):
        return ""
    difference = largest_difference(a, b)
    largest = float(b.to(torch.complex128).abs().nan_to_num(0.0, 0.0, 0.0).max())
    return "" if difference <= bound * max(1.0, largest) else f"apart by {difference:.1e}"
