"""Mutated programs, and every name of torch in the place of an op: what becomes of their texts.

Each text becomes a graph that keeps the laws, whose text reads back, that is planned, and that runs on virtual ranks,
or is refused with a GraphZeroError; within ``SECONDS`` and ``BYTES``.  A step that runs may fail in one of its ops, as
one of a Graph may (an index out of range): the executor's note says which.  Names are put in the place of an op and of
an argument; while they are read and checked, nothing of what they name may be called.
"""

from __future__ import annotations

import operator
import random
import resource
import string
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from models import CASES, OPTIMIZERS
from parity import TrainGraph

import graphzero as gz
from graphzero.ir import known_ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.verifier.verify import verify
from graphzero.plan import plan_of
from graphzero.testing.compare import random_inputs
from graphzero.testing.simulate import lower_program, run_program

SECONDS, BYTES = 2.0, 200 * 2**20
RUN_BYTES = 2**24  # of all values of a program together: a larger one is planned, and not run
RANKS = 64  # likewise
PLACEMENTS = {"1-d": range(2), "2-d": [[0, 1], [2, 3]]}
MODELS = (("mlp", "adamw"), ("mlp", "sgd"), ("convnet", "sgd"), ("gpt2", "sgd"))
PASSES = ("pin", "propagate", "lower_boxing", "overlap", "slots")


def seeds(models: tuple[tuple[str, str], ...] = MODELS) -> dict[str, str]:
    """Programs of real models at stages 0 to 3 on one and two axes, as captured, on the way, and final."""
    found: dict[str, str] = {}
    for (name, optimizer), (where, ranks) in ((m, p) for m in models for p in PLACEMENTS.items()):
        model = CASES[name].model()
        place, (made, _) = gz.placement("cpu", ranks, virtual=True), OPTIMIZERS[optimizer](model.parameters(), 1)
        graph = TrainGraph(model, made, placement=place, clip_grad_norm=1.0)
        for stage in range(4):
            if stage:
                graph.config.enable_zero(stage=stage)
            graph.compile(*CASES[name].batch(0, 4, torch.float32))
            key = f"{name} {optimizer} {where} stage {stage}"
            texts = {record.name: record.after for record in graph.history if record.name in PASSES}
            found |= {f"{key} {at}": str(program) for at, program in (texts | {"final": graph.program}).items()}
    return found


# ---- mutations


NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "64", "4096", "2000000000", str(2**31), str(2**63 - 1), str(2**63), "9" * 5000,
)  # fmt: skip
TOKENS = (
    "S(0)", "S(1)", "S(7)", "S(0, 2)", "B", "P", "P(max)", "?", "!", "f32[8, 32]", "bool[]", "i64[8]", "c64[2]", "_",
    "float", "int", "torch.float64", "torch.os", "operator.mul", "operator.methodcaller('x')", "launch", "wait",
    "assign", "box", "use", "from_file", "rand", "8/dp", "8@tp", "8/dp/dp", "out=", "None", "nan", "'a'", "[]", "()",
    ", ", " : ", "; ", "(", ")", "[", "]", "return", "update(", "forward:", "update:", "local", "lowered",
    "captured", "boxed", "\n", "\\", "'", '"',
)  # fmt: skip


def mutated(text: str, others: list[str], rng: random.Random) -> str:
    """``text`` with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(CHANGES)(text, others, rng)
    return text


def _words(text: str) -> list[str]:
    """The text in pieces: words, numbers, and single other characters."""
    found, word = [], ""
    for char in text:
        if char.isalnum() or char in "_.":
            word += char
        else:
            found += [word, char] if word else [char]
            word = ""
    return [*found, word]


def _at(words: list[str], rng: random.Random, good: Any) -> int | None:
    places = [i for i, word in enumerate(words) if good(word)]
    return rng.choice(places) if places else None


def change_character(text: str, others: list[str], rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(("", rng.choice(string.printable), "\x00", "é")) + text[at + rng.randrange(2) :]


def change_number(text: str, others: list[str], rng: random.Random) -> str:
    words = _words(text)
    at = _at(words, rng, str.isdigit)
    return text if at is None else "".join((*words[:at], rng.choice(NUMBERS), *words[at + 1 :]))


def change_name(text: str, others: list[str], rng: random.Random) -> str:
    words = _words(text)
    names = [i for i, word in enumerate(words) if word[:1].isalpha()]
    words[rng.choice(names)] = words[rng.choice(names)]
    return "".join(words)


def swap_words(text: str, others: list[str], rng: random.Random) -> str:
    words = _words(text)
    i, j = rng.randrange(len(words)), rng.randrange(len(words))
    words[i], words[j] = words[j], words[i]
    return "".join(words)


def put_token(text: str, others: list[str], rng: random.Random) -> str:
    words = _words(text)
    at = rng.randrange(len(words))
    return "".join((*words[:at], rng.choice(TOKENS), *words[at + rng.randrange(2) :]))


def drop_words(text: str, others: list[str], rng: random.Random) -> str:
    words = _words(text)
    at = rng.randrange(len(words))
    return "".join((*words[:at], *words[at + rng.randrange(1, 8) :]))


def move_line(text: str, others: list[str], rng: random.Random) -> str:
    lines = text.splitlines()
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def drop_line(text: str, others: list[str], rng: random.Random) -> str:
    lines = text.splitlines()
    lines.pop(rng.randrange(len(lines)))
    return "\n".join(lines)


def double_line(text: str, others: list[str], rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    again = lines[at].replace("=", "_again =", 1) if rng.random() < 0.7 else lines[at]
    return "\n".join((*lines[: at + 1], again, *lines[at + 1 :]))


def take_line(text: str, others: list[str], rng: random.Random) -> str:
    """A line of another program in the place of one of this."""
    lines, strange = text.splitlines(), rng.choice(others).splitlines()
    lines[rng.randrange(len(lines))] = rng.choice(strange)
    return "\n".join(lines)


def nest(text: str, others: list[str], rng: random.Random) -> str:
    at, count = rng.randrange(len(text)), rng.choice((5, 100, 5000))
    opening, closing = rng.choice((("(", ")"), ("[", "]"), ("-", ""), ("relu(", ")"), ("x.", ""), ("8/dp", "")))
    return text[:at] + opening * count + closing * count + text[at:]


CHANGES = (
    change_character, change_number, change_number, change_name, change_name, swap_words, put_token, put_token,
    drop_words, move_line, drop_line, double_line, take_line, nest,
)  # fmt: skip


# ---- what becomes of a text


def outcome(text: str) -> str:
    """Outcome of a text: the class of the error, how far it came, or the violation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = verify(gz.parse(text))
        except gz.GraphZeroError as error:
            return f"refused: {type(error).__name__}"
        if str(verify(gz.parse(str(graph)))) != str(graph):
            return "WRONG: its text does not read back"
        if graph.placement.size > RANKS or _bytes(graph) > RUN_BYTES:
            return "too large to run here"
        try:
            program = lower_program(graph)
            plan_of(program)
            run_program(program, random_inputs(program, 0))
        except gz.GraphZeroError as error:
            return f"a pass refused: {type(error).__name__}"
        except Exception as error:
            if any("ran graph" in note for note in getattr(error, "__notes__", ())):
                return "an op of the step failed"
            raise
        return "ran"


def _bytes(graph: StepGraph) -> int:
    types = [node.meta["type"] for node in graph.nodes if node.op != "output"]
    flat = [t for type_ in types for t in (type_ if isinstance(type_, tuple) else (type_,))]
    return sum(getattr(type_, "nbytes", 0) for type_ in flat)


def attack(texts: Iterator[str]) -> tuple[Counter[str], list[str], float, int]:
    """Outcomes of the texts: counts, violations, the longest in seconds, the growth of memory in bytes."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    longest, before = 0.0, _peak()
    for text in texts:
        started, held = time.process_time(), _peak()
        try:
            found = outcome(text)
        except Exception:
            found = f"WRONG: {traceback.format_exc(limit=-4)}"
        seconds, grown = time.process_time() - started, _peak() - held
        longest = max(longest, seconds)
        if seconds > SECONDS:
            found = f"WRONG: {seconds:.1f} s ({found})"
        if grown > BYTES:
            found = f"WRONG: {grown / 2**20:.0f} MB ({found})"
        if found.startswith("WRONG"):
            bad.append(f"{found}\n{_difference(text)}")
            found = "WRONG"
        counts[found] += 1
    return counts, bad, longest, _peak() - before


_seeds: list[str] = []


def _difference(text: str) -> str:
    """The lines that no seed has."""
    known = {line for seed in _seeds for line in seed.splitlines()}
    return "\n".join(line[:300] for line in text.splitlines() if line not in known)[:2000]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mutations(count: int, seed: int, programs: dict[str, str]) -> Iterator[str]:
    rng = random.Random(seed)
    _seeds[:] = programs.values()
    for _ in range(count):
        yield mutated(rng.choice(_seeds), _seeds, rng)


# ---- names


def names() -> Iterator[str]:
    """Whatever a text could call: names of torch, operator, math and builtins, and every registered op."""
    import builtins
    import math

    for module in (torch, operator, math, builtins, torch.nn.functional, torch.ops):
        yield from (f"{module.__name__}.{name}" for name in dir(module))
        yield from (name for name in dir(module) if not name.startswith("__"))
    yield from ("os.system", "torch.os.system", "torch.ops.load_library", "operator.methodcaller", "builtins.exec")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        overload = schema.overload_name or "default"
        yield f"{namespace}.{name}.{overload}"
        yield f"{name}.{overload}"


HEAD = "graph g(dp=2)\n  x = batch() : f32[4]\nforward:\n"
FORMS = (
    "  y = {}(x) : f32[4]\n  return y\n",
    "  y = {}('/etc/hostname') : f32[4]\n  return y\n",
    "  y = mul(x, {}) : f32[4]\n  return y\n",
    "  y = mul(x, {}()) : f32[4]\n  return y\n",
    "  y = x[{}] : f32[4]\n  return y\n",
    "  return {}\n",
)


def name_texts(every: int = 1) -> Iterator[str]:
    for name in list(dict.fromkeys(names()))[::every]:
        for form in FORMS:
            yield HEAD + form.format(name)


EFFECTS = (
    "os.", "subprocess.", "socket.", "shutil.", "open", "exec", "compile", "import", "ctypes.", "pickle.", "marshal.",
)  # fmt: skip


class Watch:
    """Recorder of Python's actions while it is on: events of its audit hook that name effects beyond memory."""

    def __init__(self) -> None:
        self.on, self.seen = False, Counter[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(EFFECTS):
            self.seen[f"{event} {args!r:.200}"] += 1


def attack_names(watch: Watch, every: int = 1) -> tuple[Counter[str], list[str]]:
    """Read, check and run all names; what happened, and what must not have."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    for text in name_texts(every):
        watch.seen.clear()
        watch.on = True
        try:
            graph = gz.parse(text)
        except gz.GraphZeroError as error:
            found = f"refused: {type(error).__name__}"
        except Exception as error:
            found = f"WRONG: {error!r}"
        else:
            ops = [node.target for node in graph.nodes if node.op == "call_function"]
            found = "read" if not any(map(known_ops.why_unfit, ops)) else "WRONG: an op that no program may hold"
        watch.on = False
        if found == "read":
            found = outcome(text)
        if watch.seen:
            found = f"WRONG: reading did {list(watch.seen)[:3]}"
        if found.startswith("WRONG"):
            bad.append(f"{found}\n{text}")
            found = "WRONG"
        counts[found] += 1
    return counts, bad
