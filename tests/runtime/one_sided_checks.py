"""What several gloo processes check of changes that one of them makes alone, drawn from a table.

Each is either refused on all ranks, by an error that says what differs, or makes no difference: then all hold what one
device would.  Nobody hangs, and nothing mixes.
"""

import random
import time

import torch
import torch.distributed as dist
from torch import nn

import graphzero as gz

ROWS, SECONDS = 12, 30  # seconds: far below the time-out of a collective
OWN = (RuntimeError,)  # what an action may raise by itself, on the rank that does it


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
        self.factor = 1.0

    def forward(self, x, weights):
        return self.layers(x) * weights * self.factor


class Step(gz.Graph):
    def __init__(self, placement, stage, seed=0):
        super().__init__(placement)
        torch.manual_seed(seed)
        self.model = Model().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(self.optimizer)
        self.config.set_input("weights", sbp=gz.sbp.B)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x, y, weights):
        loss = nn.functional.mse_loss(self.model(x, weights), y)
        loss.backward()
        return loss


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (5, 3)]


def share(seed):
    parts, rank = dist.get_world_size(), dist.get_rank()
    return [*(x.chunk(parts)[rank] for x in batch(seed)), torch.ones(3, dtype=torch.float64)]


class Scene:
    """A Graph after two steps, another one like it, and what was saved after the first step."""

    def __init__(self, stage):
        where = gz.placement("cpu", range(dist.get_world_size()))
        self.graph, self.other = Step(where, stage), Step(where, stage, seed=1)
        self.graph(*share(0))
        self.other(*share(0))
        self.saved = self.graph.full_state_dict()
        self.graph(*share(1))

    def step(self, change=None):
        inputs = share(2)
        if change is not None:
            change(inputs)
        return self.graph(*inputs)

    @property
    def last(self):
        return self.graph.model.layers[3]

    @property
    def group(self):
        return self.graph.optimizer.param_groups[0]


def put(owner, name, make):
    def change(scene):
        held = getattr(owner(scene), name)
        setattr(owner(scene), name, make(held))

    return change


def new_parameter(scene):
    fresh = nn.Parameter(torch.ones(3, dtype=torch.float64))
    scene.group["params"] = [fresh if p is scene.last.bias else p for p in scene.group["params"]]
    scene.last.bias = fresh


def new_state(scene):
    state = scene.graph.optimizer.state[scene.last.bias]
    state["momentum_buffer"] = torch.ones(3, dtype=torch.float64)


def another_group(scene):
    scene.graph.model.extra = nn.Linear(2, 2).double()
    scene.graph.optimizer.add_param_group({"params": list(scene.graph.model.extra.parameters())})


def fails_in_build(scene):
    def build(x, y, weights):
        raise RuntimeError("this rank cannot")

    scene.graph.build = build
    scene.graph.model.factor = 2.0  # captured anew


# What one rank does before the step that all make.
BEFORE = {
    "another rate": lambda s: s.group.update(lr=0.3),
    "another momentum": lambda s: s.group.update(momentum=0.5),
    "nesterov": lambda s: s.group.update(nesterov=True),
    "evaluation mode": lambda s: s.graph.model.eval(),
    "evaluation mode of a layer": lambda s: s.graph.model.layers[1].eval(),
    "a frozen parameter": lambda s: s.last.bias.requires_grad_(False),
    "a buffer put in": put(lambda s: s.graph.model.layers[1], "running_mean", torch.ones_like),
    "a parameter put in": new_parameter,
    "a state put in": new_state,
    "a state gone": lambda s: s.graph.optimizer.state.pop(s.last.bias),
    "another group": another_group,
    "a hook": lambda s: s.last.register_forward_hook(lambda module, args, out: 2 * out),
    "another layer": lambda s: s.graph.model.layers.append(nn.Tanh()),
    "another attribute": put(lambda s: s.graph.model, "factor", lambda x: 2.0),
    "another stage": lambda s: s.graph.config.enable_zero(s.graph.config.zero.stage == 0, stage=1),
    "other buckets": lambda s: setattr(s.graph.config, "bucket_bytes", 16),
    "a pass": lambda s: s.graph.config.add_pass(lambda graph: graph),
    "other checks": lambda s: setattr(s.graph.config, "check_inputs", "values"),
    "other draws": lambda s: s.graph._state.random.set(5, 7),
    "a build that fails": fails_in_build,
    "an optimizer's own load": lambda s: s.graph.optimizer.load_state_dict(s.saved["optimizers"][0]),
    "a seed": lambda s: torch.manual_seed(99),
    "a look": lambda s: (repr(s.graph), s.graph.state_dict()),
    "nothing": lambda s: None,
}
# What one rank does to the step's inputs.
INPUTS = {
    "another dtype": lambda given: given.__setitem__(0, given[0].float()),
    "fewer rows": lambda given: given.__setitem__(0, given[0][:1]),
    "another B input": lambda given: given.__setitem__(2, given[2] * 2),
    "no tensor": lambda given: given.__setitem__(2, 1.0),
    "an input that needs a gradient": lambda given: given[0].requires_grad_(),
    "an array": lambda given: given.__setitem__(0, given[0].numpy()),
}
# What one rank does in place of the step.
INSTEAD = {
    "a step of another Graph": lambda s: s.other(*share(2)),
    "compile": lambda s: s.graph.compile(*share(2)),
    "a full state dict": lambda s: s.graph.full_state_dict(),
    "a load": lambda s: s.graph.load_state_dict(s.saved),
    "a bad load": lambda s: s.graph.load_state_dict({}),
    "placing a module": lambda s: gz.to_global(Model(), s.graph.placement, gz.sbp.B),
    "nothing": lambda s: None,
}
TABLE = [
    *(("before", name) for name in BEFORE), *(("inputs", name) for name in INPUTS),
    *(("instead", name) for name in INSTEAD),
]  # fmt: skip
HARMLESS = {"a seed", "a look", "nothing"}


def act(scene, kind, name, is_actor):
    """The step, and the state after it, with what one rank does alone; returns what came of it."""
    try:
        if kind == "instead" and is_actor:
            INSTEAD[name](scene)
        else:
            if kind == "before" and is_actor:
                BEFORE[name](scene)
            scene.step(INPUTS[name] if kind == "inputs" and is_actor else None)
        return "ok", scene.graph.full_state_dict()
    except Exception as error:  # noqa: BLE001 - the check judges it
        return type(error), str(error)


def wanted(steps):
    """The state after so many steps, of one device."""
    graph = Step(gz.placement("cpu", [0], virtual=True), 0)
    for step in range(steps):
        graph(*batch(step), torch.ones(3, dtype=torch.float64))
    return graph.full_state_dict()


def check_what_one_rank_does_alone_is_refused_on_all_or_makes_no_difference():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chance = random.Random(ranks)
    expected = wanted(3)
    table = TABLE if ranks == 2 else chance.sample(TABLE, 12)
    for kind, name in table:
        stage, actor = chance.randrange(4), chance.randrange(ranks)
        what = f"{kind}: {name}, by rank {actor} of {ranks}, at stage {stage}"
        scene, began = Scene(stage), time.monotonic()
        kind_of, told = act(scene, kind, name, rank == actor)
        took, everyone = time.monotonic() - began, [None] * ranks
        dist.all_gather_object(everyone, "ok" if kind_of == "ok" else "raised")
        assert took < SECONDS, f"{what}: rank {rank} took {took:.0f} s: {told}"
        assert len(set(everyone)) == 1, f"{what}: {everyone}, rank {rank}: {told}"
        if kind_of == "ok":
            assert name in HARMLESS, f"{what}: nobody has noticed"
            for path, x in expected["modules"]["model"].items():
                torch.testing.assert_close(told["modules"]["model"][path], x, msg=lambda m, what=what: f"{what}: {m}")
        else:
            named = issubclass(kind_of, gz.GraphZeroError) or (rank == actor and issubclass(kind_of, OWN))
            assert named, f"{what}: rank {rank} raised {kind_of.__name__}: {told}"
            assert name not in HARMLESS or kind == "instead", f"{what}: {told}"
            assert f"rank {actor}" in told or rank == actor or "do not agree" in told, f"{what}: {told}"
