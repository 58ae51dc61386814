"""The idea of graphzero in one file: a training step is a program, and ZeRO is a change of its annotations.

    build, sgd -> trace -> pins: data_parallel, zero -> propagate -> insert_boxing -> plan, run

Read it from top to bottom, or run it, which takes some seconds: ``python examples/core/core.py`` prints the program
after each part.  It needs torch alone, no GPU, and nothing of graphzero, whose files it names where they do the same
for whole models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


# # A training step
#
# This is all that a user writes: a loss, for one device and the whole batch, and the update of one parameter.
def build(x: Tensor, y: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return (torch.relu(x @ w1) @ w2 - y).square().mean()


def sgd(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    momentum = momentum * 0.9 + gradient
    return parameter - momentum * 0.1, momentum


SHAPES = {"x": (8, 16), "y": (8, 4), "w1": (16, 32), "w2": (32, 4), "m1": (16, 32), "m2": (32, 4)}
ROLES = {"x": "batch", "y": "batch", "w1": "parameter", "w2": "parameter", "m1": "state", "m2": "state"}
STATES = {"w1": "m1", "w2": "m2"}  # the momentum of each parameter


# # A program
#
# A program is a list of values. Each has an op, operands, and the shape that it has on *one* device: ranks do not
# occur in it. How a value is spread over ranks is its SBP:
#
# * `B`, broadcast: every rank has the whole value.
# * `S(i)`, split: rank r has the r-th piece along dim i.
# * `P`, partial: every rank has a term of the whole shape, and the value is their sum.
#
# An SBP that is asked for, rather than derived, is a pin; it prints with `!`. (In graphzero: `graphzero/ir` has the
# program, `graphzero/sbp/types.py` the annotations.)

B, P = "B", "P"


def S(dim: int) -> str:
    return f"S({dim})"


@dataclass(eq=False)
class Value:
    """One value of a program.

    role: its meaning for the step: batch, parameter, state, read (of a parameter, in one phase), gradient, result.
    of: the parameter of a state, a read, a gradient or a result.
    """

    name: str
    op: Any
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    phase: str
    role: str = ""
    of: str = ""
    sbp: str = ""
    pinned: bool = False

    @property
    def operands(self) -> list[Value]:
        return [arg for arg in self.args if isinstance(arg, Value)]

    def pin(self, sbp: str) -> None:
        self.sbp, self.pinned = sbp, True

    def __str__(self) -> str:
        args = ", ".join(arg.name if isinstance(arg, Value) else str(arg) for arg in self.args)
        line = f"  {self.name:8} = {op_name(self.op)}({args})".ljust(45) + f": {[*self.shape]}".ljust(11)
        return f"{line}{self.sbp}{'!' if self.pinned else ''}".ljust(64) + f"{self.role} {self.of}"


@dataclass
class Program:
    """Values in the order of their computation, inputs first, and results by name: "w1" is the new value of w1."""

    values: list[Value] = field(default_factory=list)
    results: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        lines, phase = [], ""
        for value in self.values:
            lines += [f"{value.phase}:", str(value).rstrip()] if value.phase != phase else [str(value).rstrip()]
            phase = value.phase
        return "\n".join([*lines, f"  return {', '.join(f'{name}={one.name}' for name, one in self.results.items())}"])


def op_name(op: Any) -> str:
    return op if isinstance(op, str) else op.__name__.split(".")[0]


# # Tracing
#
# The step runs once, on tensors without data. A dispatch mode sees every op that torch runs below autograd, those of
# backward too, and notes each as a value. A mean becomes a sum divided by the number of elements in the whole batch,
# because sums can be computed in parts.
#
# Each phase reads a parameter through a `pin` of its own, and a `pin` follows each gradient and each result. A `pin`
# computes nothing: it is a place where an SBP can be asked for. (In graphzero: `graphzero/capture`, which takes
# modules and any torch optimizer, in-place ops included.)

PHASES = ("forward", "backward", "update")
DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.mean.default: lambda x: x.sum() / x.numel(),
    aten.ones_like.default: lambda x, **_: torch.ones(x.shape, device=x.device, dtype=x.dtype),
}


class Tracer(TorchDispatchMode):
    """Notes the ops that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.program, self.phase = Program(), "forward"
        self.value_of: dict[int, Value] = {}  # by the identity of a tensor
        self.tensors: list[Tensor] = []  # so that no identity is used twice
        self.reads: dict[tuple[str, Value], Value] = {}

    def add(self, op: Any, args: tuple[Any, ...], shape: tuple[int, ...], name: str = "", **more: Any) -> Value:
        name = name or f"{op_name(op)[:5]}_{len(self.program.values)}"
        value = Value(name, op, args, tuple(shape), self.phase, **more)
        self.program.values.append(value)
        return value

    def add_pin(self, tensor: Tensor, role: str, of: str = "") -> Value:
        """A pin right after the value of a tensor, which from now on stands for the pin."""
        source = self.value_of[id(tensor)]
        value = self.value_of[id(tensor)] = self.add("pin", (source,), source.shape, role=role, of=of)
        if role == "gradient":
            values = self.program.values
            values.insert(values.index(source) + 1, values.pop())
        return value

    def bind(self, tensor: Tensor, value: Value) -> Tensor:
        self.value_of[id(tensor)] = value
        self.tensors.append(tensor)
        return tensor

    def operand(self, arg: Any) -> Any:
        """The value of an argument; of a parameter, the one that this phase reads."""
        value = self.value_of[id(arg)] if isinstance(arg, Tensor) else arg
        if not isinstance(value, Value) or value.role != "parameter":
            return value
        if (self.phase, value) not in self.reads:
            self.reads[self.phase, value] = self.add("pin", (value,), value.shape, role="read", of=value.name)
        return self.reads[self.phase, value]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in DECOMPOSITIONS:
            with self:
                return DECOMPOSITIONS[op](*args, **(kwargs or {}))
        result = op(*args, **(kwargs or {}))
        if op is aten.detach.default:  # a tensor that autograd saves is the same value
            return self.bind(result, self.value_of[id(args[0])])
        return self.bind(result, self.add(op, tuple(map(self.operand, args)), result.shape))


def trace() -> Program:
    """The program of a step: forward, backward, update."""
    tracer = Tracer()
    program, inputs = tracer.program, {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    owners = {state: parameter for parameter, state in STATES.items()}
    for name, tensor in inputs.items():
        value = tracer.add("input", (), tensor.shape, name, role=ROLES[name], of=owners.get(name, ""))
        tracer.bind(tensor.requires_grad_(ROLES[name] == "parameter"), value)
    with tracer:
        loss = build(inputs["x"], inputs["y"], inputs["w1"], inputs["w2"])
        tracer.phase = "backward"
        gradients = torch.autograd.grad(loss, [inputs[name] for name in STATES])
        for name, gradient in zip(STATES, gradients, strict=True):
            tracer.add_pin(gradient, "gradient", name)
        tracer.phase = "update"
        program.results["loss"] = tracer.add_pin(loss, "result")
        for (name, state), gradient in zip(STATES.items(), gradients, strict=True):
            with torch.no_grad():
                parameter, momentum = sgd(inputs[name], gradient, inputs[state])
            program.results[name] = tracer.add_pin(parameter, "result", name)
            program.results[state] = tracer.add_pin(momentum, "result", name)
    return program


# # Pins
#
# Data parallelism is a choice of pins: the batch is split, everything else is whole. What must happen to gradients is
# not written down, it follows.
#
# ZeRO moves pins from B to S(0), and does nothing else (Rajbhandari et al., arXiv 1910.02054): at stage 1 those of
# states, and of what the update reads; at stage 2 those of gradients, where they are made; at stage 3 those of
# parameters. (Stage 1 cuts gradients too, when backward has ended.)
#
# The tensor parallelism of Megatron-LM is another choice: columns of one matrix, rows of the next.
# (In graphzero: `graphzero/passes/place/pin.py` and `zero.py`.)
def data_parallel(program: Program) -> None:
    for value in program.values:
        if value.role:
            value.pin(S(0) if value.role == "batch" else B)


def zero(program: Program, stage: int) -> None:
    for value in program.values:
        if value.role in ("state", "gradient") or (value.role == "read" and value.phase == "update"):
            value.pin(S(0))
        if value.role == "parameter" and stage == 3:
            value.pin(S(0))
        if value.role == "gradient" and stage == 1:
            value.phase = "update"
    for name, value in program.results.items():
        if name in STATES.values() or (name in STATES and stage == 3):
            value.pin(S(0))
    program.values.sort(key=lambda value: PHASES.index(value.phase))  # which keeps the order within a phase


def tensor_parallel(program: Program) -> None:
    cuts = {"w1": S(1), "w2": S(0)}
    for value in program.values:
        if value.role:
            value.pin(cuts.get(value.of or value.name, B))


# # Rules
#
# `mk,kn->mn` is all that there is to know about a product of matrices: split along m, each rank computes rows of the
# result; along n, columns; along k, which the result lacks, a partial sum. A `+` in front says that the op is linear
# in all of its operands together, a `*` that it is in each of them alone: those may be partial sums. `...` stands for
# all dims. An op without a rule works on whole values. (In graphzero: `graphzero/sbp/rules`, in the same notation,
# each rule checked against the op itself.)

RULES = {
    "pin": "+...->...",
    aten.add.Tensor: "+...,...->...",
    aten.div.Scalar: "+...->...",
    aten.div.Tensor: "+...->...",  # by a number
    aten.mm.default: "*mk,kn->mn",
    aten.mul.Scalar: "+...->...",
    aten.mul.Tensor: "*...,...->...",
    aten.pow.Tensor_Scalar: "...->...",
    aten.relu.default: "...->...",
    aten.sub.Tensor: "+...,...->...",
    aten.sum.default: "+...->",
    aten.t.default: "+ab->ba",
    aten.threshold_backward.default: "...,...->...",
}


Signature = tuple[tuple[str, ...], str]  # the SBP of each operand, and that of the result


def signatures(value: Value) -> Iterator[Signature]:
    """The ways to run a value's op on all ranks; the one that works on whole values comes first."""
    count = len(value.operands)
    yield (B,) * count, B
    if value.op not in RULES:
        return
    dims = "abcdef"[: max(len(operand.shape) for operand in value.operands)]
    rule = RULES[value.op].replace("...", dims)
    left, _, result = rule.lstrip("+*").partition("->")
    terms = left.split(",")[:count]  # an operand may be a number
    for letter in sorted(set(left) - {","}):
        cut = tuple(S(term.index(letter)) if letter in term else B for term in terms)
        if letter in result:
            yield cut, S(result.index(letter))
        elif rule[0] in "+*":
            yield cut, P
    if rule[0] == "+" or (rule[0] == "*" and count == 1):
        yield (P,) * count, P
    elif rule[0] == "*":
        yield from ((tuple(P if i == k else B for i in range(count)), P) for k in range(count))


# # Propagation
#
# One walk over the program gives each value the signature for which the fewest bytes have to move. The table names what
# moves them, by the first letters of the SBP that a value has and of the one that is wanted. (In graphzero:
# `graphzero/passes/place`, where a second walk goes backward, so that a sum is taken where that saves traffic, and a
# price may be seconds of a link.)

COLLECTIVES = {"PB": "all_reduce", "PS": "reduce_scatter", "SB": "all_gather", "SS": "all_to_all"}
COLLECTIVES |= {"BS": "slice", "BP": "one_term", "SP": "one_place"}  # these send nothing


def sent_bytes(kind: str, shape: tuple[int, ...], n: int) -> float:
    """Bytes that each of n ranks sends, of numbers of 8 bytes."""
    share = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1 / n}.get(kind, 0.0)
    return share * (n - 1) / n * 8 * torch.Size(shape).numel()


def propagate(program: Program, n: int) -> dict[Value, Signature]:
    """Give every value an SBP on n ranks; the signatures say in which SBP operands are read."""

    def cost(value: Value, signature: Signature) -> tuple[float, int]:
        pairs = zip(value.operands, signature[0], strict=True)
        moved = [sent_bytes(COLLECTIVES[one.sbp[0] + want[0]], one.shape, n) for one, want in pairs if one.sbp != want]
        return sum(moved), len(moved)

    chosen = {}
    for value in program.values:
        if value.op != "input" and value.pinned:
            chosen[value] = (value.sbp,), value.sbp
        elif value.op != "input":
            chosen[value] = min(signatures(value), key=partial(cost, value))
            value.sbp = chosen[value][1]
    return chosen


# # Boxing
#
# Where an op reads a value in another SBP than the value has, a collective is inserted, and nothing else inserts one.
# Readers of one phase share it. (In graphzero: `graphzero/passes/boxing`; then `schedule` and `memory` put small
# collectives into buckets, and let them run beside compute.)
def insert_boxing(program: Program, n: int) -> Program:
    chosen = propagate(program, n)
    boxes: dict[tuple[Value, str, str], Value] = {}
    new: dict[Value, Value] = {}
    values: list[Value] = []
    for value in program.values:
        args = list(value.args)
        wants = chosen[value][0] if value in chosen else ()
        for operand, want in zip(value.operands, wants, strict=True):
            key = (operand, want, value.phase)
            if operand.sbp != want and key not in boxes:
                kind, name = COLLECTIVES[operand.sbp[0] + want[0]], f"box_{len(boxes)}"
                boxes[key] = Value(name, kind, (new[operand], want), operand.shape, value.phase, sbp=want)
                values.append(boxes[key])
            args[args.index(operand)] = boxes.get(key, new[operand])
        new[value] = replace(value, args=tuple(args))
        values.append(new[value])
    return Program(values, {name: new[value] for name, value in program.results.items()})


def compile_step(n: int, *passes: Callable[[Program], None]) -> Program:
    """The program of the step on n ranks, with the pins that the passes set."""
    n, program = 4, trace()
    for one in passes:
        one(program)
    return insert_boxing(program, n)


# # The plan
#
# The program says what a step costs, before anything runs. (In graphzero: `graphzero/plan`, whose bytes equal those of
# the executor, and `graphzero/ir/storage`, which knows all views, and what is written in place.)
def plan(program: Program, n: int) -> tuple[int, int, float]:
    """Bytes that a rank has between steps, that it has at most, and that it sends."""

    def storage(value: Value) -> Value:
        return storage(value.operands[0]) if value.op in ("pin", aten.t.default) else value

    def nbytes(value: Value) -> int:
        return 8 * torch.Size(value.shape).numel() // (n if value.sbp.startswith("S") else 1)

    read_last = {storage(operand): i for i, value in enumerate(program.values) for operand in value.operands}
    read_last |= dict.fromkeys(map(storage, program.results.values()), len(program.values))
    lasting = [value for value in program.values if value.role in ("parameter", "state")]
    resident = now = peak = sum(map(nbytes, lasting))
    for i, value in enumerate(program.values):
        now += nbytes(value) if value is storage(value) and value not in lasting else 0
        peak = max(peak, now)
        now -= sum(nbytes(one) for one, last in read_last.items() if last == i)
    return resident, peak, sum(sent_bytes(value.op, value.shape, n) for value in program.values)


# # A pass of your own
#
# This one lets backward read what forward has gathered: less is sent, more is held, and the plan says how much of
# each. (In graphzero: `graphzero/passes/memory/keep_gathered.py`; `docs/passes.md` shows how to write and test a pass.)
def keep_gathered(program: Program) -> Program:
    gathered: dict[Value, Value] = {}
    new: dict[Value, Value] = {}
    for value in program.values:
        copy = replace(value, args=tuple(new[arg] if isinstance(arg, Value) else arg for arg in value.args))
        gathers = value.op == "all_gather" and copy.operands[0].role == "parameter"
        new[value] = gathered.setdefault(copy.operands[0], copy) if gathers else copy
    return Program(list(dict.fromkeys(new.values())), {name: new[value] for name, value in program.results.items()})


# # Running
#
# A world is the ranks of this process, and a way to show each rank what all of them have. Virtual ranks all live here,
# and that way is a list; between processes it is an all_gather. All else is the same code. (In graphzero:
# `graphzero/runtime`, where a collective sends no more than the plan says, through shared memory, gloo or NCCL, and a
# program becomes straight-line Python.)
@dataclass
class World:
    """The ranks of this process, and a function from their tensors to those of all ranks."""

    size: int
    ranks: Sequence[int]
    exchange: Callable[[list[Tensor]], list[Tensor]]


def process_world() -> World:
    def exchange(tensors: list[Tensor]) -> list[Tensor]:
        everyone = [torch.empty_like(tensors[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensors[0].contiguous())
        return everyone

    return World(dist.get_world_size(), [dist.get_rank()], exchange)


def piece(whole: Tensor, sbp: str, rank: int, n: int) -> Tensor:
    """A rank's piece of a whole value."""
    if sbp == P:
        return whole if rank == 0 else torch.zeros_like(whole)
    return whole if sbp == B else whole.chunk(n, int(sbp[2:-1]))[rank]


def join(pieces: list[Tensor], sbp: str) -> Tensor:
    """The value of which ranks have these pieces."""
    if sbp == B:
        return pieces[0]
    return torch.stack(pieces).sum(0) if sbp == P else torch.cat(pieces, int(sbp[2:-1]))


def run(program: Program, inputs: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Run a step, from whole inputs to whole results."""
    local: dict[Value, list[Tensor]] = {}
    for value in program.values:
        if value.op == "pin":
            local[value] = local[value.operands[0]]
        elif isinstance(value.op, str):  # an input, or a collective
            pieces = [join(world.exchange(local[source]), source.sbp) for source in value.operands]
            whole = pieces[0] if pieces else inputs[value.name]
            local[value] = [piece(whole, value.sbp, rank, world.size) for rank in world.ranks]
        else:
            columns = [local[arg] if isinstance(arg, Value) else [arg] * len(world.ranks) for arg in value.args]
            local[value] = [value.op(*args) for args in zip(*columns, strict=True)]
    return {name: join(world.exchange(local[value]), value.sbp) for name, value in program.results.items()}


# # All of it
def example() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def largest_error(results: dict[str, Tensor]) -> float:
    """The largest difference of results from those of plain PyTorch on one device."""
    inputs = example()
    parameters = {name: inputs[name].clone().requires_grad_() for name in STATES}
    loss = build(inputs["x"], inputs["y"], **parameters)
    expected = {"loss": loss.detach()}
    for (name, state), gradient in zip(STATES.items(), torch.autograd.grad(loss, [*parameters.values()]), strict=True):
        expected[name], expected[state] = sgd(inputs[name], gradient, inputs[state])
    return max((results[name] - tensor).abs().max().item() for name, tensor in expected.items())


def run_process(rank: int, n: int, folder: str) -> None:
    program = compile_step(n, data_parallel, partial(zero, stage=3))  # before: it imports modules that keep the group
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    results = run(program, example(), process_world())
    if rank == 0:
        print(f"{f'ZeRO 3 on {n} gloo ranks':51}  {largest_error(results) < 1e-9}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    n, program = 4, trace()
    print(f"# Tracing\n{program}\n")
    data_parallel(program)
    zero(program, stage=3)
    print(f"# Pins\n{program}\n")
    propagate(program, n)
    print(f"# Propagation\n{program}\n")
    print(f"# Boxing\n{insert_boxing(program, n)}\n")

    programs = {"data parallel": compile_step(n, data_parallel)}
    programs |= {f"ZeRO {i}": compile_step(n, data_parallel, partial(zero, stage=i)) for i in (1, 2, 3)}
    programs["ZeRO 3, kept gathered"] = keep_gathered(programs["ZeRO 3"])
    programs["tensor parallel"] = compile_step(n, tensor_parallel)
    print("# All of it\nbytes on each of 4 ranks:  resident    peak    sent  as one device computes")
    for name, program in programs.items():
        results = run(program, example(), World(n, range(n), lambda tensors: tensors))
        resident, peak, sent = plan(program, n)
        print(f"{name:26}{resident:9,}{peak:8,}{sent:8,.0f}  {largest_error(results) < 1e-9}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (2, folder), nprocs=2)


if __name__ == "__main__":
    main()
