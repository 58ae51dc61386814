"""Small training steps as text, and how tests lower, run and measure them.

``step`` writes a whole step (forward, backward, update) for a stack of layers; tests that are about one thing write
their few lines out instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.passes import Bucket, KeepGathered, Options, Pipeline, Record, Zero, default_passes
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.types import Nd
from graphzero.testing.meter import Measured, MemoryMeter

STAGES = (None, Zero(1), Zero(2), Zero(3))
MEMORY = {"param": "parameters", "state": "optimizer_states", "buffer": "buffers", "constant": "buffers"}


def lower(
    graph: StepGraph | str, zero: Zero | None = None, bucket: Bucket | None = None, in_backward: bool = False
) -> StepGraph:
    """The program that runs."""
    passes = default_passes(replace(options(zero, bucket), optimizer_in_backward=in_backward))
    return Pipeline(passes)(parse(graph) if isinstance(graph, str) else graph)


def options(*passes: Zero | Bucket | KeepGathered | None) -> Options:
    """Those with which the built-in passes are these."""
    return Options(**{name: x for one in passes if one is not None for name, x in vars(one).items()})


def history(text: str, zero: Zero | None = None) -> dict[str, Record]:
    """What each pass did, by its name."""
    pipeline = Pipeline(default_passes(options(zero)))
    pipeline(parse(text))
    return {record.name: record for record in pipeline.history}


def lines(graph: StepGraph, word: str) -> list[str]:
    """Lines of a graph's text that hold ``word``, with single spaces."""
    return [" ".join(line.split()) for line in str(graph).splitlines() if word in line]


def on_ranks(text: str, ranks: int) -> str:
    """The same step for another number of ranks on axis ``dp``."""
    head, rest = text.strip("\n").split("\n", 1)
    return f"{head.split('(')[0]}(dp={ranks})\n{rest}"


def inputs_of(graph: StepGraph, seed: int = 0) -> dict[str, list[torch.Tensor | float]]:
    """Random values for the placeholders of a lowered graph on one placement axis, one piece per rank."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[torch.Tensor | float]] = {}
    count = graph.placement.size
    for node in graph.placeholders():
        type_, nd = node.meta["type"], node.meta["sbp"]
        if not hasattr(type_, "shape"):
            found[node.name] = [0.1] * count
            continue
        if type_.dtype.is_floating_point:
            whole = torch.rand(type_.shape, generator=generator).add_(0.05).to(type_.dtype)
        else:
            whole = torch.randint(0, 2, type_.shape, generator=generator).to(type_.dtype)
        found[node.name] = [piece.clone() for piece in pieces(whole, nd, count)]
    return found


def pieces(whole: torch.Tensor, nd: Nd, count: int) -> list[torch.Tensor]:
    """What each rank holds."""
    if not nd[0].is_split:
        return [whole] * count
    step = -(-whole.shape[nd[0].dim] // count)
    size = whole.shape[nd[0].dim]
    return [
        whole.narrow(nd[0].dim, min(r * step, size), min(step, size - min(r * step, size))) for r in range(count)
    ]  # fmt: skip


def run(graph: StepGraph, seed: int = 0) -> dict[str, list[torch.Tensor]]:
    """Outputs and new states of a lowered graph, by name, one piece per rank."""
    executor, inputs = _bound(graph, seed)
    results = executor.run_step(inputs)
    found = {f"output {i}": out for i, out in enumerate(results.outputs)}
    return found | {name: executor.bound[name] for name in graph.updates}


def measured(graph: StepGraph) -> Measured:
    """Memory of rank 0 as an independent dispatch mode sees it."""
    executor, inputs = _bound(graph, 0)
    categories: dict[object, str] = {}
    for (node, index), category in liveness(graph).categories.items():
        categories[node.name, index] = category
        if not isinstance(node.meta["type"], tuple):
            categories[node.name] = category
    resident: dict[str, list[torch.Tensor]] = {}
    for node in graph.placeholders(*MEMORY):
        resident.setdefault(MEMORY[node.meta["role"].kind], []).append(executor.bound[node.name][0])
    return measure(executor, inputs, categories, resident)


def measure(
    executor: Executor,
    inputs: Mapping[str, Sequence[Any]],
    categories: Mapping[Any, str],
    resident: Mapping[str, Iterable[torch.Tensor]],
) -> Measured:
    """Memory of one step.  categories: as of ``MemoryMeter``; resident: tensors of the first local rank before it."""
    meter = MemoryMeter(categories)
    for category, tensors in resident.items():
        meter.register(category, tensors)
    executor.run_step(inputs, meter)
    return meter.measured()


def _bound(graph: StepGraph, seed: int) -> tuple[Executor, dict[str, list[torch.Tensor | float]]]:
    executor = Executor(graph, VirtualWorld(graph.placement))
    values = inputs_of(graph, seed)
    kept = {node.name for node in graph.placeholders(*MEMORY)}
    executor.bind({name: x for name, x in values.items() if name in kept})  # type: ignore[misc]
    return executor, {name: x for name, x in values.items() if name not in kept}


# ---- writing steps


@dataclass
class _Writer:
    """Lines by phase, and what is known of the values."""

    heads: list[str] = field(default_factory=list)
    bodies: dict[str, list[str]] = field(default_factory=lambda: {"forward": [], "backward": [], "update": []})
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, phase: str, text: str, shape: Sequence[int], role: str = "") -> str:
        self.count += 1
        name = f"v{self.count}"
        self.shapes[name] = tuple(shape)
        self.bodies[phase].append(f"  {name} = {text} : f32{list(shape)}" + (f"  ; {role}" if role else ""))
        return name

    def many(self, phase: str, text: str, shapes: Sequence[Sequence[int]]) -> list[str]:
        self.count += 1
        name = f"v{self.count}"
        types = ", ".join(f"f32{list(shape)}" for shape in shapes)
        self.bodies[phase].append(f"  {name} = {text} : ({types})")
        return [self.add(phase, f"{name}[{i}]", shape) for i, shape in enumerate(shapes)]

    def param(self, shape: Sequence[int]) -> str:
        name = f"w{len(self.params)}"
        self.params.append(name)
        self.shapes[name] = tuple(shape)
        self.heads.append(f"  {name} = param() : f32{list(shape)}")
        return name

    def use(self, phase: str, param: str) -> str:
        name = f"{param}_{phase[0]}"
        if name not in self.uses:
            self.uses.add(name)
            self.bodies[phase].append(f"  {name} = use({param}) : f32{list(self.shapes[param])}")
        return name

    def gradient(self, param: str, text: str) -> None:
        shape = self.shapes[param]
        if param in self.gradients:  # tied
            fresh = self.add("backward", text, shape)
            self.gradients[param] = self.add("backward", f"add({self.gradients[param]}, {fresh})", shape)
        else:
            self.gradients[param] = self.add("backward", text, shape)


def step(
    layers: Sequence[str] = ("linear 12", "relu", "linear 3"),
    *,
    ranks: int = 4,
    batch: int = 8,
    width: int = 6,
    optimizer: str = "adam",
    frozen: Sequence[int] = (),
    name: str = "toy",
) -> str:
    """The text of a captured step.

    layers: "linear N", "bias", "relu", "norm", "scale" (by a 0-d parameter), "skip" (the last two values added),
        "split" (halves changed about), "tied" (the last square linear layer once more).
    optimizer: "sgd" (no state), "momentum", "adam" (two states), "rows" (one number of state per row).
    frozen: numbers of parameters without gradient.
    """
    w = _Writer()
    values = ["x"]
    w.shapes["x"] = (batch, width)
    backward: list[tuple[str, str, str, str]] = []  # (kind, input, result, parameter)
    for layer in layers:
        _forward(w, layer, values, backward)
    y = values[-1]
    shape = w.shapes[y]
    error = w.add("forward", f"sub({y}, t)", shape)
    square = w.add("forward", f"mul({error}, {error})", shape)
    total = w.add("forward", f"sum({square})", ())
    loss = w.add("forward", f"div({total}, {shape[0] * shape[1]})", (), "loss()")
    _backward(w, w.add("backward", f"mul({error}, {2 / (shape[0] * shape[1])})", shape), y, backward)
    updates: list[str] = []
    for i, param in enumerate(w.params):
        if param in w.gradients and i not in frozen:
            _mark(w, param)
            updates += _update(w, param, optimizer)
    heads = [f"  x = batch() : f32{[batch, width]}", f"  t = batch() : f32{list(shape)}", *w.heads]
    heads.append("  lr = hyper(optimizer0.group0, lr) : float")
    body = [line for phase, found in w.bodies.items() if found for line in (f"{phase}:", *found)]
    tail = f"; update({', '.join(updates)})" if updates else ""
    return "\n".join([f"graph {name}(dp={ranks})", *heads, *body, f"  return {loss}, {y}{tail}"]) + "\n"


def _forward(w: _Writer, layer: str, values: list[str], backward: list[tuple[str, str, str, str]]) -> None:
    x = values[-1]
    batch, width = w.shapes[x]
    kind, _, number = layer.partition(" ")
    param = ""
    if kind == "linear":
        param = w.param((width, int(number)))
        out = w.add("forward", f"mm({x}, {w.use('forward', param)})", (batch, int(number)))
    elif kind == "tied":
        param = next((p for p in reversed(w.params) if w.shapes[p] == (width, width)), "")
        if not param:
            return
        kind = "linear"
        out = w.add("forward", f"mm({x}, {w.use('forward', param)})", (batch, width))
    elif kind == "bias":
        param = w.param((width,))
        out = w.add("forward", f"add({x}, {w.use('forward', param)})", (batch, width))
    elif kind == "scale":
        param = w.param(())
        out = w.add("forward", f"mul({x}, {w.use('forward', param)})", (batch, width))
    elif kind == "norm":
        weight, bias = w.param((width,)), w.param((width,))
        text = f"native_layer_norm({x}, [{width}], {w.use('forward', weight)}, {w.use('forward', bias)}, 1e-05)"
        out, mean, rstd = w.many("forward", text, [(batch, width), (batch, 1), (batch, 1)])
        param = f"{weight} {bias} {mean} {rstd}"
    elif kind == "skip":
        other = next((v for v in reversed(values[:-1]) if w.shapes[v] == (batch, width)), x)
        out, param = w.add("forward", f"add({x}, {other})", (batch, width)), other
    elif kind == "split":
        half = width // 2
        a, b = w.many("forward", f"split.Tensor({x}, {width - half}, 1)", [(batch, width - half), (batch, half)])
        out = w.add("forward", f"cat([{b}, {a}], 1)", (batch, width))
    else:
        out = w.add("forward", f"{kind}({x})", (batch, width))
    backward.append((kind, x, out, param))
    values.append(out)


def _backward(w: _Writer, last: str, y: str, layers: list[tuple[str, str, str, str]]) -> None:
    grads: dict[str, str] = {y: last}

    def give(node: str, grad: str) -> None:
        grads[node] = w.add("backward", f"add({grads[node]}, {grad})", w.shapes[node]) if node in grads else grad

    for kind, x, out, param in reversed(layers):
        if out not in grads:
            continue
        g, shape = grads[out], w.shapes[x]
        batch, width = shape
        if kind == "linear":
            turned = w.add("backward", f"t({x})", (width, batch))
            w.gradient(param, f"mm({turned}, {g})")
            if x != "x":
                back = w.add("backward", f"t({w.use('backward', param)})", w.shapes[param][::-1])
                give(x, w.add("backward", f"mm({g}, {back})", shape))
        elif kind == "bias":
            w.gradient(param, f"sum.dim_IntList({g}, [0])")
            give(x, g)
        elif kind == "scale":
            w.gradient(param, f"sum({w.add('backward', f'mul({g}, {x})', shape)})")
            give(x, w.add("backward", f"mul({g}, {w.use('backward', param)})", shape))
        elif kind == "norm":
            weight, bias, mean, rstd = param.split()
            uses = f"{w.use('backward', weight)}, {w.use('backward', bias)}"
            text = f"native_layer_norm_backward({g}, {x}, [{width}], {mean}, {rstd}, {uses}, [True, True, True])"
            dx, dw, db = w.many("backward", text, [shape, (width,), (width,)])
            w.gradients[weight], w.gradients[bias] = dw, db
            give(x, dx)
        elif kind == "relu":
            give(x, w.add("backward", f"threshold_backward({g}, {out}, 0)", shape))
        elif kind == "skip":
            give(x, g)
            give(param, g)
        elif kind == "split":
            half = width // 2
            b = w.add("backward", f"slice.Tensor({g}, 1, 0, {half})", (batch, half))
            a = w.add("backward", f"slice.Tensor({g}, 1, {half}, {width})", (batch, width - half))
            give(x, w.add("backward", f"cat([{a}, {b}], 1)", shape))
        else:
            raise AssertionError(kind)


def _mark(w: _Writer, param: str) -> None:
    """Write the role of the gradient where it is made."""
    made = f"  {w.gradients[param]} = "
    for body in w.bodies.values():
        body[:] = [f"{line}  ; gradient({param})" if line.startswith(made) else line for line in body]


def _update(w: _Writer, param: str, optimizer: str) -> Iterator[str]:
    shape, g = w.shapes[param], w.gradients[param]

    def state(key: str, size: Sequence[int] = shape) -> str:
        w.heads.append(f"  {param}_{key} = state({param}, {key}) : f32{list(size)}")
        return f"{param}_{key}"

    def add(text: str, size: Sequence[int] = shape) -> str:
        return w.add("update", text, size)

    move = g
    if optimizer == "momentum":
        old = add(f"mul({state('m')}, 0.9)")
        move = add(f"add({old}, {g})")
        yield f"{param}_m={move}"
    elif optimizer == "adam":
        old_first, old_second = add(f"mul({state('m')}, 0.9)"), add(f"mul({state('v')}, 0.99)")
        first = add(f"add({old_first}, {g}, alpha=0.1)")
        second = add(f"addcmul({old_second}, {g}, {g}, value=0.01)")
        root = add(f"sqrt({second})")
        below = add(f"add({root}, 1e-08)")
        move = add(f"div({first}, {below})")
        yield f"{param}_m={first}"
        yield f"{param}_v={second}"
    elif optimizer == "rows":
        size = shape[:1]
        tall = (*size, *(1 for _ in shape[1:]))
        square = add(f"mul({g}, {g})")
        rows = add(f"sum.dim_IntList({square}, [1])", size) if len(shape) > 1 else square
        kept = add(f"add({state('r', size)}, {rows})", size)
        wide = add(f"unsqueeze({kept}, 1)", tall) if len(shape) > 1 else kept
        root = add(f"sqrt({wide})", tall)
        move = add(f"div({g}, {root})")
        yield f"{param}_r={kept}"
    used = w.use("update", param)
    scaled = add(f"mul({move}, lr)")
    new = add(f"sub({used}, {scaled})")
    yield f"{param}={new}"


KINDS = ("linear 5", "linear 6", "linear 8", "linear 7", "relu", "bias", "norm", "scale", "skip", "split", "tied")


def random_step(seed: int) -> str:
    """A step that nobody thought of, the same for the same seed."""
    dice = random.Random(seed)
    layers = [f"linear {dice.choice((4, 6, 7))}", *dice.choices(KINDS, k=dice.randint(2, 7)), "linear 3"]
    return step(
        layers,
        ranks=dice.choice((2, 3, 4)),
        batch=12,
        width=dice.choice((3, 5, 8)),
        optimizer=dice.choice(("sgd", "momentum", "adam", "rows")),
        frozen=dice.sample(range(6), dice.randint(0, 2)),
        name=f"random_{seed}",
    )
