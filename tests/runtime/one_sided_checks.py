"""Checks on several gloo processes of changes that one rank makes alone, drawn from a table.

Each is either refused on all ranks, by an error that says what differs, or makes no difference: then all hold what one
device would.  Nobody hangs, and nothing mixes.  A change is a function in ``BEFORE``, ``INPUTS`` or ``INSTEAD``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphzero as gz

ROWS, SOON = 12, 30.0  # seconds
OWN = (RuntimeError,)  # what a change may raise by itself, on the rank that makes it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
        self.factor = 1.0

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = self.layers(x) * weights * self.factor
        return made


class Step(gz.Graph):
    def __init__(self, placement: gz.Placement, stage: int, seed: int = 0) -> None:
        super().__init__(placement)
        torch.manual_seed(seed)
        self.model = Model().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(self.optimizer, clip_grad_norm=1.0)
        self.config.set_input("weights", sbp=gz.sbp.B)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(x, weights), y)
        loss.backward()
        return loss


def batch(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (5, 3)]


def share(seed: int) -> list[Any]:
    parts, rank = dist.get_world_size(), dist.get_rank()
    return [*(x.chunk(parts)[rank] for x in batch(seed)), torch.ones(3, dtype=torch.float64)]


class Scene:
    """A Graph after two steps, and what was saved after the first step; ``has_other``: and another Graph like it."""

    def __init__(self, stage: int, has_other: bool) -> None:
        where = gz.placement("cpu", range(dist.get_world_size()))
        self.graph = Step(where, stage)
        self.graph(*share(0))
        if has_other:
            self.other = Step(where, stage, seed=1)
            self.other(*share(0))
        self.saved = self.graph.full_state_dict()
        self.graph(*share(1))

    def step(self, change: Callable[[list[Any]], Any] | None = None) -> Any:
        inputs = share(2)
        if change is not None:
            change(inputs)
        return self.graph(*inputs)

    @property
    def last(self) -> Any:
        return self.graph.model.layers[3]

    @property
    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self.graph.optimizer.param_groups[0]
        return found


Change = Callable[[Scene], Any]


def put(owner: Callable[[Scene], Any], name: str, make: Callable[[Any], Any]) -> Change:
    def change(scene: Scene) -> None:
        held = getattr(owner(scene), name)
        setattr(owner(scene), name, make(held))

    return change


def new_parameter(scene: Scene) -> None:
    fresh = nn.Parameter(torch.ones(3, dtype=torch.float64))
    scene.group["params"] = [fresh if p is scene.last.bias else p for p in scene.group["params"]]
    scene.last.bias = fresh


def new_state(scene: Scene) -> None:
    state = scene.graph.optimizer.state[scene.last.bias]
    state["momentum_buffer"] = torch.ones(3, dtype=torch.float64)


def another_group(scene: Scene) -> None:
    scene.graph.model.extra = nn.Linear(2, 2).double()
    scene.graph.optimizer.add_param_group({"params": list(scene.graph.model.extra.parameters())})


def fails_in_build(scene: Scene) -> None:
    def build(x: Tensor, y: Tensor, weights: Tensor) -> None:
        raise RuntimeError("this rank cannot")

    scene.graph.build = build  # type: ignore[method-assign]
    scene.graph.model.factor = 2.0  # captured anew


# What one rank does before the step that all make.
BEFORE: dict[str, Change] = {
    "another rate": lambda s: s.group.update(lr=0.3),
    "another momentum": lambda s: s.group.update(momentum=0.5),
    "nesterov": lambda s: s.group.update(nesterov=True),
    "evaluation mode": lambda s: s.graph.model.eval(),
    "evaluation mode of a layer": lambda s: s.graph.model.layers[1].eval(),
    "a frozen parameter": lambda s: s.last.bias.requires_grad_(False),
    "a buffer put in": put(lambda s: s.graph.model.layers[1], "running_mean", torch.ones_like),
    "a buffer of another dtype": put(lambda s: s.graph.model.layers[1], "running_mean", Tensor.float),
    "a parameter put in": new_parameter,
    "a state put in": new_state,
    "a state gone": lambda s: s.graph.optimizer.state.pop(s.last.bias),
    "another group": another_group,
    "a hook": lambda s: s.last.register_forward_hook(lambda module, args, out: 2 * out),
    "another layer": lambda s: s.graph.model.layers.append(nn.Tanh()),
    "another module": put(lambda s: s.graph, "model", lambda held: Model().double()),
    "another attribute": put(lambda s: s.graph.model, "factor", lambda x: 2.0),
    "another stage": lambda s: s.graph.config.enable_zero(s.graph.config.zero.stage == 0, stage=1),
    "other buckets": lambda s: setattr(s.graph.config, "bucket_bytes", 16),
    "a pass": lambda s: s.graph.config.add_pass(lambda graph: graph),
    "another executor": lambda s: s.graph.config.set_executor("inductor"),
    "other checks": lambda s: setattr(s.graph.config, "check_inputs", "values"),
    "other draws": lambda s: s.graph._source.state().random.set(5, 7),
    "other threads": lambda s: torch.set_num_threads(2),
    "a build that fails": fails_in_build,
    "an optimizer's own load": lambda s: s.graph.optimizer.load_state_dict(s.saved["optimizers"][0]),
    "a seed": lambda s: torch.manual_seed(99),
    "a look": lambda s: (repr(s.graph), s.graph.state_dict()),
    "nothing": lambda s: None,
}
# What one rank does to the step's inputs.
INPUTS: dict[str, Callable[[list[Any]], Any]] = {
    "another dtype": lambda given: given.__setitem__(0, given[0].float()),
    "fewer rows": lambda given: given.__setitem__(0, given[0][:1]),
    "another B input": lambda given: given.__setitem__(2, given[2] * 2),
    "no tensor": lambda given: given.__setitem__(2, 1.0),
    "an input that needs a gradient": lambda given: given[0].requires_grad_(),
    "an array": lambda given: given.__setitem__(0, given[0].numpy()),
}
# What one rank does in place of the step.
INSTEAD: dict[str, Change] = {
    "a step of another Graph": lambda s: s.other(*share(2)),
    "compile": lambda s: s.graph.compile(*share(2)),
    "a full state dict": lambda s: s.graph.full_state_dict(),
    "a load": lambda s: s.graph.load_state_dict(s.saved),
    "a bad load": lambda s: s.graph.load_state_dict({}),
    "a check": lambda s: gz.check(s.graph, *share(2)),
    "placing a module": lambda s: gz.to_global(Model(), s.graph.placement, gz.sbp.B),
    "nothing": lambda s: None,
}
TABLE = [
    *(("before", name) for name in BEFORE), *(("inputs", name) for name in INPUTS),
    *(("instead", name) for name in INSTEAD),
]  # fmt: skip
HARMLESS = {"a seed", "a look", "nothing"}
DEPENDS = {"other threads"}  # on whether each rank sums something for itself


def trial(kind: str, name: str, actor: int, stage: int) -> dict[str, Any]:
    """Every rank calls it: what is wrong with what came of the change on this one, and its seconds."""
    torch.set_num_threads(1)
    scene, rank, began = Scene(stage, name == "a step of another Graph"), dist.get_rank(), time.monotonic()
    error, told = _act(scene, kind, name, rank == actor)
    found: dict[str, Any] = {"seconds": time.monotonic() - began}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, "ok" if error is None else "raised")
    wrong = f"{everyone}" if len(set(everyone)) > 1 else _judged(kind, name, actor, error, told)
    if found["seconds"] > SOON:
        wrong = f"took {found['seconds']:.0f} s"
    what = f"{kind}: {name}, by rank {actor} of {len(everyone)}, at stage {stage}"
    return found | {"wrong": f"{what}: {wrong}; rank {rank}: {error or told}" if wrong else ""}


def _act(scene: Scene, kind: str, name: str, is_actor: bool) -> tuple[Exception | None, Any]:
    """The step, and the state after it, with what one rank does alone."""
    try:
        if kind == "instead" and is_actor:
            INSTEAD[name](scene)
        else:
            if kind == "before" and is_actor:
                BEFORE[name](scene)
            scene.step(INPUTS[name] if kind == "inputs" and is_actor else None)
        return None, scene.graph.full_state_dict()
    except Exception as error:  # noqa: BLE001 - it is judged
        return error, None


def _judged(kind: str, name: str, actor: int, error: Exception | None, told: Any) -> str:
    """What is wrong with what all ranks have come to alike."""
    if error is None:
        if name not in HARMLESS | DEPENDS:
            return "nobody has noticed"
        expected = wanted(3)["modules"]["model"]
        off = [path for path, x in expected.items() if not torch.allclose(told["modules"]["model"][path], x)]
        return f"other values in {', '.join(off)}" if off else ""
    is_actor = dist.get_rank() == actor
    if not isinstance(error, gz.GraphZeroError) and not (is_actor and isinstance(error, OWN)):
        return f"raised {type(error).__name__}"
    if name in HARMLESS and kind != "instead":
        return "refused"
    named = f"rank {actor}" in str(error) or is_actor or "do not agree" in str(error)
    return "" if named else "names another rank or none"


@cache
def wanted(steps: int) -> dict[str, Any]:
    """The state after so many steps, of one device."""
    graph = Step(gz.placement("cpu", [0], virtual=True), 0)
    for step in range(steps):
        graph(*batch(step), torch.ones(3, dtype=torch.float64))
    return graph.full_state_dict()


def trials(table: Sequence[tuple[str, str]], chance: random.Random) -> Iterator[dict[str, Any]]:
    """All of a table, each by some rank at some stage; every rank calls it."""
    for kind, name in table:
        yield trial(kind, name, chance.randrange(dist.get_world_size()), chance.randrange(4))


def check_what_one_rank_does_alone_is_refused_on_all_or_makes_no_difference():
    ranks = dist.get_world_size()
    chance = random.Random(ranks)
    table = TABLE if ranks == 2 else chance.sample(TABLE, 12)
    for one in trials(table, chance):
        assert not one["wrong"], one["wrong"]
