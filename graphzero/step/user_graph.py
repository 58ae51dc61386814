"""Parts of a user's Graph: its build, modules, optimizers and settings, and the ranks that share it.

The Graph and the selection of its programs both hold it; it knows neither of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from graphzero import _compat
from graphzero.capture import LOSS_SCALE, AverageSpec, Carry, LossScale, OptimizerSpec, Step
from graphzero.config import GraphConfig
from graphzero.ir.value import Role
from graphzero.logs import note_rank
from graphzero.runtime.state.modules import register_optimizer
from graphzero.runtime.state.state import State
from graphzero.runtime.world import launch
from graphzero.runtime.world.consensus import Ranks, identity
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import World
from graphzero.sbp.placement import Placement
from graphzero.step.argument_checks import check_build
from graphzero.step.build_inputs import BuildInputReader


class UserGraph:
    """Everything that a user's Graph holds, as of now.

    whole_placement: with the axis ``pp``, where there is one; placement: of the member of it that this process has, the
    first one of virtual ranks.  ranks: all of them.
    owner: the user's object, on whose attributes ``build``, modules and a ``name`` are looked up.
    optimizers: in the order of add_optimizer; schedulers: one per optimizer, None for none.  averages: in the order of
    add_average.  speaks: whether this process says for all ranks what the Graph is busy with.
    """

    def __init__(self, owner: Any, whole: Placement, config: GraphConfig) -> None:
        own = launch.own_rank()
        self.owner, self.config, self.whole_placement = owner, config, whole
        self.placement = whole.without_pipeline(0 if whole.virtual else whole.pipeline_member(own))
        self.ranks = Ranks(whole, identity(self.name, whole))
        note_rank(own)
        self.speaks = own == (0 if whole.virtual else int(whole.ranks.flat[0]))
        self.optimizers: list[OptimizerSpec] = []
        self.schedulers: list[Any] = []
        self.averages: list[AverageSpec] = []
        self._epochs: dict[int, Any] = {}  # of schedulers, by their numbers, after the last step
        self._state: State | None = None
        self._loss_scale: LossScale | None = None

    @property
    def name(self) -> str:
        return str(self.owner.name)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules by attribute; also the loss scale where there is one."""
        named = {name: attribute for name, attribute in vars(self.owner).items() if isinstance(attribute, nn.Module)}
        scale = self.loss_scale
        return named if scale is None else {**named, LOSS_SCALE: scale}

    @property
    def loss_scale(self) -> LossScale | None:
        """The state of loss scaling, made when it is first asked for; None where no loss is scaled."""
        precision = self.config.settings.amp.precision
        if precision is None or precision.scaling is None or not self.optimizers:
            return None
        if self._loss_scale is None:
            self._loss_scale = LossScale(precision.scaling)
        return self._loss_scale

    @property
    def next_loss_scale(self) -> float | None:
        """The factor by which the next call multiplies its loss; None where no loss is scaled."""
        scale = self.loss_scale
        return None if scale is None else float(scale.scale)

    @property
    def has_schedule(self) -> bool:
        """Whether any optimizer has a scheduler."""
        return any(scheduler is not None for scheduler in self.schedulers)

    def carry(self, carries: Sequence[Carry], numbers: Mapping[Role, float]) -> None:
        """Let optimizers hold the numbers that a step has made of ``numbers``."""
        params = {path: entry.tensor for path, entry in self.state().tensors().items()} if carries else {}
        for carried, after in [(carried, carried.after(numbers)) for carried in carries]:
            carried.store_number(self.optimizers[carried.optimizer].optimizer, params, after)

    def step_schedulers(self) -> None:
        """Step them all, as after a training call; warn of one that other code steps too."""
        for i, (spec, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            if scheduler is None:
                continue
            if i in self._epochs and getattr(scheduler, "last_epoch", None) == self._epochs[i] + 1:
                self._warn_of_two_steps(i, type(scheduler).__name__)
            _compat.note_step(spec.optimizer)
            scheduler.step()
            if isinstance(epoch := getattr(scheduler, "last_epoch", None), int):  # a ChainedScheduler has none
                self._epochs[i] = epoch

    def forget_epochs(self) -> None:
        """Schedulers have been loaded: that they are elsewhere says nothing of who steps them."""
        self._epochs.clear()

    def _warn_of_two_steps(self, index: int, kind: str) -> None:
        warnings.warn(
            f"the {kind} of optimizer {index} was stepped between two calls of {self.name}, which steps it after each "
            "training call: it is twice as far. Leave out scheduler.step(), or give add_optimizer no lr_sch",
            stacklevel=9,
        )

    @property
    def step(self) -> Step:
        """The step that capture traces."""
        precision = self.config.settings.amp.precision
        build, modules = self.owner.build, self.modules
        return Step(self.name, self.placement, build, modules, self.optimizers, precision, self.averages)

    def reader(self) -> BuildInputReader:
        """Reader of build's arguments. Raises ConfigError for a build that cannot be called."""
        build = self.owner.build
        if getattr(build, "__isabstractmethod__", False):
            build()  # says that there is none
        check_build(type(self.owner), build)
        return BuildInputReader(build, self.placement)

    @cached_property
    def world(self) -> World:
        """Made when it is first asked for, for which all ranks are needed."""
        if self.placement.virtual:
            return VirtualWorld(self.placement)
        from graphzero.runtime.world.process import ProcessWorld

        return ProcessWorld(self.placement, whole=self.whole_placement)

    @property
    def transports(self) -> dict[str, str]:
        """The transport that ranks use along each axis, where one is open."""
        return dict(self.world.transports) if "world" in vars(self) else {}

    def state(self) -> State:
        """The tensors; another object when modules or optimizers are others."""
        modules, optimizers = self.modules, [spec.optimizer for spec in self.optimizers]
        previous = self._state
        if previous is not None and previous.modules == modules and previous.optimizers == optimizers:
            return previous
        new_state = self._state = State(lambda: self.world, self.placement, self.ranks, modules, optimizers)
        if previous is not None:
            new_state.random, new_state.moved = previous.random, previous.moved
        return new_state

    def take_settings(self, other: UserGraph, copied: Callable[[Any], Any]) -> None:
        """Optimizers and schedulers of ``other``, as ``copied`` makes them."""
        self.optimizers, self.schedulers = list(copied(other.optimizers)), list(copied(other.schedulers))
        self.averages, self._loss_scale = list(copied(other.averages)), copied(other._loss_scale)
        for spec in self.optimizers:
            register_optimizer(spec.optimizer)

    def take_state(self, other: UserGraph) -> None:
        """Go on as ``other``, of whose tensors this one's are copies, or which they are."""
        if other._state is not None:
            self.state().take_over(other._state)
