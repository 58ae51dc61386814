"""FILE:FACTORY, and on which ranks: what every command begins with that looks at a user's step.

A FACTORY is a callable of ``placement`` and ``stage`` that returns ``(graph, example_args)``: a Graph on that placement
at that ZeRO stage, and what one rank calls it with, as in a script under torchrun.  Whatever is wrong with it raises
ConfigError, with the place in the user's file.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.runtime.world import launch
from graphzero.sbp.placement import Placement, placement
from graphzero.step.program import StepProgram
from graphzero.testing import fake_world

STAGES = (0, 1, 2, 3)
MOST = 1 << 20  # ranks: beyond any machine, and what a list of them still takes in a blink
SIGNATURE = "def {name}(placement, stage)"


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what a command takes that is asked of a FACTORY; see ``placement_of`` for the ranks."""
    one.add_argument(
        "factory",
        metavar="FILE:FACTORY",
        help="a callable of `placement` and `stage` in a Python file; it returns (graph, example_args)",
    )
    add_rank_arguments(one)


def add_rank_arguments(one: argparse.ArgumentParser) -> None:
    """Say how a command is given its ranks; see ``placement_of``."""
    one.add_argument("--ranks", type=int, metavar="N", help="how many, along one axis dp")
    one.add_argument("--axes", metavar="dp=4,tp=2", help="ranks along each axis, outermost first")
    one.add_argument("--hierarchy", metavar="4x2", help="the same without names: dp is the first axis, tp the second")


def placement_of(options: argparse.Namespace, device_type: str) -> Placement | None:
    """The ranks that ``--ranks``, ``--axes`` and ``--hierarchy`` name, counted from 0; None where none is there.

    Raises ConfigError for another form, and for numbers that contradict each other.
    """
    ranks, axes, hierarchy = options.ranks, options.axes, options.hierarchy
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: give the number of ranks, from 1 up")
    if axes and hierarchy:
        raise ConfigError("--axes and --hierarchy both say how ranks are arranged; give one of them")
    if axes:
        names, shape = _axes_of(axes)
    elif hierarchy:
        names, shape = None, _hierarchy_of(hierarchy)
    elif ranks is not None:
        names, shape = None, [ranks]
    else:
        return None
    count = math.prod(shape)
    if count > MOST:
        raise ConfigError(f"{count:,} ranks are more than graphzero plans for; give at most {MOST:,}")
    if ranks not in (None, count):
        said = f"--axes {axes}" if axes else f"--hierarchy {hierarchy}"
        raise ConfigError(f"{said} is {count} ranks, and --ranks says {ranks}; leave --ranks out, or make them agree")
    return placement(device_type, torch.arange(count).reshape(shape).tolist(), names)


def stages_of(text: str) -> tuple[int, ...]:
    """The stages of ``0,1,2,3``, each once, in order.  Raises ConfigError for others."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in map(str, STAGES):
            raise ConfigError(f"--stage {text}: unknown stage {part!r}; the ZeRO stages are 0, 1, 2 and 3: --stage 0,2")
    return tuple(sorted({int(part) for part in parts}))


def make(what: str, where: Placement | None, stage: int, **more: Any) -> tuple[Graph, tuple[Any, ...]]:
    """Call the FACTORY of ``FILE:FACTORY``: returns the graph, and the arguments of a call of it.

    more: what else it is given, of which ``takes`` says whether it may be.
    Raises ConfigError where there is no such factory, where it raises, and where it gives something else.
    """
    function = load(what)
    _check_signature(what, function)
    with _reported(what):
        result = function(placement=where, stage=stage, **more)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Graph)):
        raise ConfigError(f"{what} returned {_described(result)}; return (graph, example_args)")
    graph, example = result
    arguments = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    if where is not None and graph.placement not in (where, launch.resolve(where)):
        raise ConfigError(
            f"{what} made a graph on {graph.placement!r}, not on the placement that it was given, {where!r}; pass it "
            "on: super().__init__(placement)"
        )
    _check_arguments(what, graph, arguments)
    return graph, arguments


@contextmanager
def planned(
    command: str, what: str, where: Placement | None, stage: int, verifies: bool = True
) -> Iterator[StepProgram]:
    """The program of what the FACTORY makes, as the first rank has it; nothing runs, and no memory is taken.

    verifies: False where it is only one of many that are counted.
    What the FACTORY prints goes to stderr: stdout is the command's.
    """
    with fake_world(where.size if where is not None else 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with redirect_stdout(sys.stderr), torch.device("meta"):
            graph, example = make(what, where, stage)
        with graph.prepared_call(f"graphzero {command} of {graph.name}", example, {}, verifies=verifies) as prepared:
            yield prepared.program


def takes(what: str, name: str) -> bool:
    """Return whether the FACTORY has a parameter of that name.  Raises ConfigError where there is no factory."""
    function = load(what)
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a callable that shows no signature
        return False


def load(what: str) -> Callable[..., Any]:
    """The callable of ``FILE:FACTORY``.  Raises ConfigError where there is none."""
    file, _, name = what.rpartition(":")
    path = Path(file)
    if not name or (not file and name.endswith(".py")):
        raise ConfigError(f"{what}: no callable is named; write FILE:FACTORY, such as train.py:make")
    if not file or not path.is_file():
        raise ConfigError(f"{what}: there is no file {file or what!r}; write FILE:FACTORY, such as train.py:make")
    if path.suffix != ".py":
        raise ConfigError(f"{what}: {path} is not a Python file; its name ends with .py")
    module = run_file(path, what)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{what}: {file} has no callable {name!r}; define `{SIGNATURE.format(name=name)}` that returns "
            f"(graph, example_args){_others(module, name)}"
        )
    return function  # type: ignore[no-any-return]


def run_file(path: Path, what: str) -> ModuleType:
    """The module of a file of Python.  It may import its neighbours, as a script does.

    what: the file is called in messages.  Raises ConfigError, with the place, for whatever the file raises.
    """
    with _reported(what):
        return _module(path)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # as of every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look there
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _others(module: ModuleType, name: str) -> str:
    """Callables of the file that could be meant."""
    own = (x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__)
    fitting = [x.__name__ for x in own if {"placement", "stage"} <= set(inspect.signature(x).parameters)]
    return f"; it has {', '.join(fitting)}" if fitting and name not in fitting else ""


def _check_signature(what: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(placement=None, stage=0)
    except TypeError as error:
        name = what.rpartition(":")[2]
        raise ConfigError(
            f"{what} cannot be called with placement and stage: {error}; define `{SIGNATURE.format(name=name)}`"
        ) from None
    except ValueError:  # a callable that shows no signature
        pass


def _check_arguments(what: str, graph: Graph, arguments: tuple[Any, ...]) -> None:
    try:
        inspect.signature(graph.build).bind(*arguments)
    except TypeError as error:
        kinds = ", ".join(type(x).__name__ for x in arguments) or "nothing"
        raise ConfigError(
            f"{what} returned example_args that {graph.name}.build cannot be called with: {error}; they are {kinds}; "
            "return (graph, (x, y)) with what one rank calls the graph with, in order"
        ) from None


def _described(result: object) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {', '.join(type(x).__name__ for x in result) or 'nothing'}"
    return "a graph without arguments" if isinstance(result, Graph) else type(result).__name__


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Report errors of the user's code as a ConfigError with its place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(_raised(what, error)) from error


def _raised(what: str, error: BaseException) -> str:
    """The error, the last line of the user's file on the way there, and the place where it was raised."""
    file = what.rpartition(":")[0]
    lines = [f"{what} raised {type(error).__name__}: {error}"]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        lines.append(f"  at {error.filename}:{error.lineno}: {(error.text or '').strip()}")
    elif isinstance(error, SystemExit):
        lines.append("  It ended the process; put what only a script does under `if __name__ == '__main__':`")
    elif isinstance(error, ImportError) and "relative import" in str(error):
        lines.append(
            "  The file is run as a script is, in no package; it imports its neighbours by name: import models"
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if Path(frame.filename).resolve() == Path(file).resolve()]
    if len(lines) == 1 and own and own[0].name == "<module>":
        lines.append(
            "  The file itself was run, to find its FACTORY, on devices without values; put the training under "
            "`if __name__ == '__main__':`"
        )
    shown = (*own[-1:], *(frames[-1:] if own else ()))
    lines += dict.fromkeys(f"  at {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in shown)
    return "\n".join(lines)


def _axes_of(text: str) -> tuple[list[str], list[int]]:
    """Names and sizes of ``dp=4,tp=2``."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and size.isdecimal() and int(size) for name, _, size in pairs):
        raise ConfigError(f"--axes {text}: write each axis with its ranks, outermost first: dp=4,tp=2")
    return [name for name, _, _ in pairs], [int(size) for _, _, size in pairs]


def _hierarchy_of(text: str) -> list[int]:
    """Sizes of ``8x8``."""
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise ConfigError(f"--hierarchy {text}: write ranks along the outer and the inner axis, such as 8x8; for other "
                          "axes give their names: --axes dp=4,tp=2,cp=2")  # fmt: skip
    return [int(part) for part in parts]
