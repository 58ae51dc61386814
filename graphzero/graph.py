"""Graph: the user's class.  One call is one step: read the inputs, agree with the other ranks, find or make the
program (``selection``), bind what is not bound (``runtime.binding``), run (``runtime.executor``), and leave the user's
modules, optimizers and schedulers true (``runtime.state``).

Here is only their order, and what the user may ask.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.attributes import Attributes
from graphzero.capture import OptimizerSpec, Step, is_capturing
from graphzero.checks import (
    check_attribute,
    check_build,
    check_clipping,
    check_optimizer,
    check_scheduler,
    missing_attribute,
)
from graphzero.compiled import Compiled, Programs
from graphzero.config import GraphConfig
from graphzero.errors import CaptureError, ConfigError
from graphzero.expected import StatesToCome
from graphzero.ir.graph import StepGraph
from graphzero.passes import Record
from graphzero.plan import Plan
from graphzero.runtime import checked, checkpoint, launch, loading, modules, prospect
from graphzero.runtime.agree import BIND, FULL, LOAD, SAVE, Ranks, identity, tensor_text
from graphzero.runtime.binding import bind
from graphzero.runtime.checked import Checked
from graphzero.runtime.inputs import Reader
from graphzero.runtime.modules import Found
from graphzero.runtime.state import State
from graphzero.runtime.virtual import VirtualWorld
from graphzero.runtime.world import World
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd
from graphzero.selection import Prepared, Selection


class Graph:
    """A training or evaluation step, compiled as one program for all ranks of a placement.

    Derive from it; in ``__init__`` call ``super().__init__()``, assign modules to attributes and ``add_optimizer``;
    write the step for one device and the whole batch in ``build``; then call the object with each batch.

    placement: the ranks, a ``gz.placement`` or a DeviceMesh; by default all ranks of the world.
    name: what programs and messages call it; by default the class's name.
    Raises PlacementError for ranks that do not exist, ConfigError for settings that have no meaning.
    """

    def __init__(self, placement: Placement | DeviceMesh | None = None, name: str | None = None) -> None:
        self.name = name or type(self).__name__
        self.placement = launch.resolve(placement)
        self.config = GraphConfig(self.placement)
        if self.placement.size > 1 and not self.placement.data_axes:
            warnings.warn(
                f"no axis of {self.placement!r} is a data axis (its name begins with dp), so every rank takes its "
                'plain inputs for the whole batch; to split the batch: gz.placement(..., names=("dp",))',
                stacklevel=2,
            )
        self._optimizers: list[OptimizerSpec] = []
        self._schedulers: list[Any] = []  # one per optimizer, None for none
        self._begin()

    def _begin(self) -> None:
        """The parts that are this Graph's alone: what is compiled, and what is known of the user's tensors."""
        self._ranks = Ranks(self.placement, identity(self.name, self.placement))
        attributes = Attributes(self)
        self._programs = Programs(self.name, attributes, self.config)
        self._selection = Selection(
            self._programs, attributes, self._ranks, self.config, self._optimizers,
            step=self._as_step, state=self._state_now, reader=self._make_reader,
        )  # fmt: skip
        self._lazy_world: World | None = None
        self._lazy_state: State | None = None
        self._last: Compiled | None = None  # used or compiled last
        self._grad_norms: dict[str, Tensor] = {}

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step: written for one device and the whole batch."""
        raise ConfigError(
            f"{type(self).__name__} has no build: write the step as a method, for example\n    def build(self, x, y):\n"
            "        loss = self.loss_fn(self.model(x), y)\n        loss.backward()\n        return loss"
        )

    def add_optimizer(
        self,
        optim: torch.optim.Optimizer,
        *,
        lr_sch: Any = None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
        clip_grad_value: float | None = None,
    ) -> None:
        """Let ``optim`` step after ``build``'s backward; may be called for several optimizers.

        lr_sch: a scheduler of it, stepped after each training call.
        clip_grad_norm: the largest norm of its gradients, all together, of kind ``norm_type``.
        clip_grad_value: the largest absolute value of one element.

        Raises ConfigError for an optimizer that is there already, one without parameters, a scheduler of another one
        or one that takes a metric, and limits that are no positive numbers.
        """
        check_optimizer(optim, [spec.optimizer for spec in self._optimizers])
        check_scheduler(lr_sch, optim)
        check_clipping(clip_grad_norm=clip_grad_norm, norm_type=norm_type, clip_grad_value=clip_grad_value)
        self._optimizers.append(OptimizerSpec(optim, clip_grad_norm, float(norm_type), clip_grad_value))
        self._schedulers.append(lr_sch)

    # ---- running

    @_compat.cpu_by_default
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step: compile for arguments of such shapes if need be, run, update modules and optimizers.

        A plain tensor is this rank's share of the batch, split along dim 0 over the data axes (0-d ones and numbers are
        the same on all ranks); on a virtual placement it is the whole batch.  Returns what ``build`` returns, with
        batch-split values as this rank's share (whole on a virtual placement) and everything else complete; DTensors
        if any argument was one.  Every rank calls it.

        Raises ConfigError, CaptureError or SbpError before the step is taken, on every rank, with what differs or where
        the step cannot be captured.
        """
        self._not_in_build("called")
        with self._ranks.together(f"step of {self.name}"), _compat.outside_inference_mode():
            call = self._prepare(args, kwargs, running=True)
            with torch.no_grad():
                self._bind(call)
                return self._run(call)

    @_compat.cpu_by_default
    def compile(self, *args: Any, **kwargs: Any) -> Graph:
        """Capture and rewrite for such arguments without running; they, and the modules, may be on the meta device.

        No step is taken and no state is made or changed.  Every rank calls it.  Returns the Graph itself.

        Raises CaptureError, with the line of ``build``, for a step that cannot be one graph.
        """
        self._not_in_build("compiled")
        with self._ranks.together(f"compile() of {self.name}"), _compat.outside_inference_mode():
            self._prepare(args, kwargs, running=False)
        return self

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool) -> Prepared:
        call = self._selection.prepare(args, kwargs, self._schedulers, running)
        self._last = call.program
        return call

    def _bind(self, call: Prepared) -> None:
        program, state = call.program, call.state
        if program is self._selection.bound:
            return
        captured, found = program.captured, state.tensors()
        self._ranks.agree_on(
            BIND,
            lambda: prospect.check(state, program.graph, captured.states, found),
            lambda _: prospect.facts(state, captured.states, captured.constants, found, program.repeated),
        )
        executor = program.executor(self._world)
        executor.bind(bind(state, program.graph, captured.states, captured.constants, found))
        state.settle()
        self._selection.bind(call)

    def _run(self, call: Prepared) -> Any:
        program, state = call.program, call.state
        executor, training = program.executor(self._world), program.captured.training
        if program.uses_seed:
            state.random.begin(self._ranks.share)
        arguments = call.arguments(self._world, state.random)
        try:
            state.before()
            results = executor.run(arguments)
            state.after(training, program.uses_seed)
            is_step = executor.program.first_write >= 0 or program.uses_seed
            self._selection.taken += is_step
            executor.finish()
        except BaseException as error:
            if executor.has_written:
                written = program.graph.updates
                held = (node for node in program.graph.placeholders("param", "buffer") if node.name in written)
                state.tear(self._why_torn(error), {node.meta["role"].of for node in held})
            raise
        if training:
            self._grad_norms = {
                name: held[0].detach().clone() for name, held in results.aux.items() if name.startswith("grad_norm")
            }
            self._step_schedulers()
        self._selection.completed += is_step
        return call.outputs(results, self._world)

    def _why_torn(self, error: BaseException) -> str:
        return (
            f"a call of {self.name} ended in the middle of its update ({type(error).__name__}: {error}), so parameters "
            "and optimizer states are partly those of before it and partly those of after it; load a checkpoint of all "
            "of them, graph.load_state_dict(...), or make modules, optimizer and Graph anew"
        )

    def _step_schedulers(self) -> None:
        for spec, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            if scheduler is not None:
                _compat.note_step(spec.optimizer)
                scheduler.step()

    # ---- reading

    @property
    def is_compiled(self) -> bool:
        """Whether a program has been made, by a call or by ``compile``."""
        return self._last is not None

    @property
    def training(self) -> bool:
        """Whether the program used or compiled last has an update."""
        return self._last is not None and self._last.captured.training

    @property
    def program(self) -> StepGraph:
        """The final program, used or compiled last; its text is ``str(graph.program)``.

        Raises ConfigError before the first call or ``compile``, as ``history`` and ``plan`` do.
        """
        return self._compiled("program").graph

    @property
    def history(self) -> list[Record]:
        """What each pass did to it, one record per pass: see ``gz.passes.Record``."""
        return self._compiled("history").history

    @property
    def plan(self) -> Plan:
        """What one step of it costs one rank: bytes of memory and collectives, known without running."""
        return self._compiled("plan").plan

    @property
    def grad_norm(self) -> Any:
        """The norm of the last training call's gradients before clipping, a 0-d tensor; None without clip_grad_norm.

        With several clipping optimizers a tuple, one entry per optimizer, None for those that do not clip.
        """
        if len(self._grad_norms) < 2:
            return next(iter(self._grad_norms.values()), None)
        return tuple(self._grad_norms.get(f"grad_norm.{i}") for i in range(len(self._optimizers)))

    @_compat.cpu_by_default
    def state_dict(self) -> dict[str, Any]:
        """Modules, optimizers, schedulers and the random stream; values are DTensors where they are split.

        ``{"modules": {attribute: module.state_dict()}, "optimizers": [{"state": {"attribute.fqn": {...}},
        "param_groups": [...]}], "schedulers": [...], "random": {"seed", "step"}}``; ``torch.distributed.checkpoint``
        saves and reshards it.

        It is live: its tensors are those that the next step writes to, as in torch.  To keep them as they are now,
        take ``full_state_dict``, or ``copy.deepcopy`` of this.  Every rank calls it where values are cut in sections.
        """
        outline = self._outline()
        if not any(checkpoint.is_sectioned(x) for _, x in checkpoint.tensors_in(outline)):
            return cast("dict[str, Any]", checkpoint.saveable(outline, self.placement))
        with self._ranks.together(f"state_dict() of {self.name}"):
            self._ranks.agree_on(SAVE, lambda: outline, checkpoint.facts)
            made: dict[str, Any] = checkpoint.saveable(outline, self.placement)
        return made

    @_compat.cpu_by_default
    def full_state_dict(self) -> dict[str, Any]:
        """The same with plain whole tensors, a snapshot: nothing writes to it.  Every rank calls it, and gets it."""
        with self._ranks.together(f"full_state_dict() of {self.name}"):
            outline = self._ranks.agree_on(FULL, self._outline, checkpoint.facts)
            made: dict[str, Any] = checkpoint.full(outline, self.placement, self._state.why_torn())
        return made

    def _outline(self) -> dict[str, Any]:
        """What there is to save."""
        self._not_in_build("saved")
        torn = self._state.why_torn()
        if torn:
            warnings.warn(torn, stacklevel=4)
        program = (None, ()) if self._last is None else (self._last.graph, self._last.captured.states)
        return checkpoint.outline(self._state, self._schedulers, *program)

    @_compat.cpu_by_default
    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Load what ``state_dict`` or ``full_state_dict`` gave, at any stage and world size.

        Once the Graph has been called or compiled, or where tensors are split, every rank calls it, with the same
        checkpoint: whole tensors and numbers are compared.  Before that the first call takes what rank 0 has.

        Raises CheckpointError, before anything is written, on every rank, for what is no state dict, for missing or
        unexpected keys, and for shapes and kinds of values that do not fit.
        """
        self._not_in_build("loaded")
        state, schedulers = self._state, self._schedulers
        program = self._last
        nds = {} if program is None else program.state_nds()

        def check() -> Checked:
            return checked.check(sd, state, schedulers, strict, StatesToCome(self._optimizers, state, program))

        if program is None and not checked.is_split(sd, state):
            loading.load(check(), state, schedulers, strict, nds)
        else:
            with self._ranks.together(f"load_state_dict() of {self.name}"):
                fitting = self._ranks.agree_on(LOAD, check, checked.contents)
                loading.load(fitting, state, schedulers, strict, nds)
                if fitting.is_complete:
                    self._selection.taken = self._selection.completed = 0
        self._selection.bound = None

    @_compat.cpu_by_default
    def __repr__(self) -> str:
        found = modules.tensors(self._modules())
        nds = {path: self._state.nd_of(entry.tensor) for path, entry in found.items()}
        body = str(self._last.graph) if self._last else "  (not compiled: call it, or graph.compile(...))"
        lines = [
            f"{self.name}({self.placement!r})",
            repr(self.config),
            *(self._last.decisions if self._last else ()),
            *(f"along {axis} {way}" for axis, way in (self._lazy_world.ways if self._lazy_world else {}).items()),
            "parameters:",
            *_parameter_lines(found, nds),
        ]
        return "\n".join([*lines, body.rstrip()])

    def _not_in_build(self, what: str) -> None:
        if is_capturing():
            raise CaptureError(
                f"the Graph {self.name} is {what} inside of a build; a step is one graph. Call its modules or its "
                "build there (self.other.build(x)), and Graphs one after another"
            )

    def __copy__(self) -> Graph:
        return self._copied(object.__new__(type(self)), lambda held: held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        made = memo[id(self)] = object.__new__(type(self))
        return self._copied(made, lambda held: copy.deepcopy(held, memo))

    def _copied(self, made: Graph, copied: Callable[[Any], Any]) -> Graph:
        """``made`` with ``copied`` settings and attributes.  It compiles programs of its own."""
        made.name, made.placement, made.config = self.name, self.placement, copied(self.config)
        made._optimizers, made._schedulers = list(copied(self._optimizers)), list(copied(self._schedulers))
        made._begin()
        vars(made).update((name, copied(held)) for name, held in vars(self).items() if name not in vars(made))
        if self._lazy_state is not None:
            made._state.take_over(self._lazy_state)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            f"the Graph {self.name} cannot be pickled: it holds programs and connections of this process. "
            "Save graph.state_dict() (or full_state_dict()), make the Graph anew, and load it: load_state_dict(...)"
        )

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(type(self), name, "_programs" in vars(self))

    def __setattr__(self, name: str, held: Any) -> None:
        check_attribute(type(self), name, held, "_programs" in vars(self))
        super().__setattr__(name, held)

    # ---- parts that come to life when they are needed

    def _modules(self) -> dict[str, nn.Module]:
        return {name: held for name, held in vars(self).items() if isinstance(held, nn.Module)}

    def _as_step(self) -> Step:
        return Step(self.name, self.placement, self.build, self._modules(), self._optimizers)

    def _make_reader(self) -> Reader:
        if getattr(self.build, "__func__", None) is Graph.build:
            self.build()  # says that there is none
        check_build(type(self), self.build)
        return Reader(self.build, self.placement)

    @property
    def _world(self) -> World:
        if self._lazy_world is None:
            if self.placement.virtual:
                self._lazy_world = VirtualWorld(self.placement)
            else:
                from graphzero.runtime.process import ProcessWorld

                self._lazy_world = ProcessWorld(self.placement)
        return self._lazy_world

    @property
    def _state(self) -> State:
        held, optimizers = self._modules(), [spec.optimizer for spec in self._optimizers]
        kept = self._lazy_state
        if kept is not None and kept.modules == held and kept.optimizers == optimizers:
            return kept
        made = self._lazy_state = State(lambda: self._world, self._ranks, held, optimizers)
        if kept is not None:
            made.random, made.moved = kept.random, kept.moved
        self._selection.bound = None
        return made

    def _state_now(self) -> State:
        return self._state

    def _compiled(self, what: str) -> Compiled:
        if self._last is None:
            raise ConfigError(
                f"{self.name} has no {what} yet: call it with a batch, or graph.compile(...) to run nothing"
            )
        return self._last


def _parameter_lines(found: Mapping[str, Found], nds: Mapping[str, Nd]) -> list[str]:
    """Path, type and SBP of every parameter, for ``repr``."""
    lines = []
    for path, entry in found.items():
        if entry.kind == "param":
            sbp = ", ".join(map(str, nds[path]))
            kind = " DTensor" if isinstance(entry.tensor, DTensor) else ""
            lines.append(f"  {path}: {tensor_text(entry.tensor)} {sbp}{kind}")
    return lines
