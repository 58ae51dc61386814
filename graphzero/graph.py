"""Graph: the user's class.  One call is one step: read the arguments, agree with the other ranks, find or make the
program (``step.selection``), bind what is not bound (``runtime.state``), run (``runtime.execute``), and leave the
user's modules, optimizers and schedulers true (``runtime.state``).

Here is only their order, and what the user may ask.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.capture import OptimizerSpec, is_capturing
from graphzero.config import GraphConfig
from graphzero.errors import CaptureError, ConfigError
from graphzero.ir.graph import StepGraph
from graphzero.passes import Record
from graphzero.plan import Plan
from graphzero.runtime.checkpoint import fit, loading, reading
from graphzero.runtime.checkpoint.fit import Checked
from graphzero.runtime.state import modules, preflight
from graphzero.runtime.state.binding import bind
from graphzero.runtime.state.modules import Found
from graphzero.runtime.world import launch
from graphzero.runtime.world.agree import BIND, FULL, LOAD, SAVE, tensor_text
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd
from graphzero.step import checks
from graphzero.step.checks import check_attribute, missing_attribute
from graphzero.step.loss_scale import moved_in, moved_out
from graphzero.step.program import Program
from graphzero.step.selection import Prepared, Selection
from graphzero.step.source import Source
from graphzero.step.states_to_come import StatesToCome


class Graph:
    """A training or evaluation step, compiled as one program for all ranks of a placement.

    Derive from it; in ``__init__`` call ``super().__init__()``, assign modules to attributes and ``add_optimizer``;
    write the step for one device and the whole batch in ``build``; then call the object with each batch.

    placement: the ranks, a ``gz.placement`` or a DeviceMesh; by default all ranks of the world.
    name: what programs and messages call it; by default the class's name.
    Raises PlacementError for ranks that do not exist, ConfigError for settings that have no meaning.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        checks.check_names(cls, Graph)

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
        self._begin()

    def _begin(self) -> None:
        """The parts that are this Graph's alone: what it consists of, and what is compiled of that."""
        self._source = Source(self, self.placement, self.config)
        self._selection = Selection(self._source)
        self._skipped: list[Tensor] = []  # of the last training call, if it may have been
        self._grad_norms: dict[str, Tensor] = {}

    @abstractmethod
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
        source = self._source
        checks.check_optimizer(optim, [spec.optimizer for spec in source.optimizers])
        checks.check_scheduler(lr_sch, optim)
        checks.check_clipping(clip_grad_norm=clip_grad_norm, norm_type=norm_type, clip_grad_value=clip_grad_value)
        source.optimizers.append(OptimizerSpec(optim, clip_grad_norm, float(norm_type), clip_grad_value))
        source.schedulers.append(lr_sch)

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
        with self._source.ranks.together(f"step of {self.name}"), _compat.outside_inference_mode():
            call = self._selection.prepare(args, kwargs, running=True)
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
        with self.prepared_call(f"compile() of {self.name}", args, kwargs):
            return self

    @contextmanager
    def prepared_call(
        self, doing: str, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool = False
    ) -> Iterator[Prepared]:
        """For the rest of graphzero: the call with these arguments and its program, which is compiled and not run.

        What is done within is done by all ranks together, and is no part of a step.  doing: "gz.check of TrainGraph";
        ranks are told so.  alone: no rank is asked, and ConfigError is raised for a program that has never run.
        """
        with self._source.ranks.together(doing), _compat.outside_inference_mode():
            selection = self._selection
            yield selection.recall(args, kwargs) if alone else selection.prepare(args, kwargs, running=False)

    def _bind(self, prepared: Prepared) -> None:
        program, state = prepared.program, prepared.call.state
        if program is state.program:
            return
        captured, found = program.captured, state.tensors()
        self._source.ranks.agree_on(
            BIND,
            lambda: preflight.check(state, program.graph, captured.states, found),
            lambda _: preflight.facts(state, captured.states, captured.constants, found, program.repeated),
        )
        executor = program.part.executor(prepared.source.world)
        executor.bind(bind(state, program.graph, captured.states, captured.constants, found))
        state.settle(program)
        self._selection.bound(prepared)

    def _run(self, prepared: Prepared) -> Any:
        program, call, world = prepared.program, prepared.call, prepared.source.world
        state, progress = call.state, self._selection.progress
        executor, training = program.part.executor(world), program.captured.training
        if program.uses_seed:
            state.random.begin(self._source.ranks.share)
        arguments = program.arguments(call, world)
        try:
            state.before()
            results = executor.run(arguments)
            state.after(training, program.uses_seed)
            is_step = executor.program.first_write >= 0 or program.uses_seed
            progress.taken += is_step
            executor.finish()
        except BaseException as error:
            if executor.has_written:
                written = program.graph.updates
                held = (node for node in program.graph.placeholders("param", "buffer") if node.name in written)
                state.tear(self._why_torn(error), {node.meta["role"].of for node in held})
            raise
        if training:
            norms = {name: held[0] for name, held in results.aux.items() if name.startswith("grad_norm")}
            norms = {name: norm.detach().clone() for name, norm in norms.items()}
            self._grad_norms.clear()
            self._grad_norms.update(norms)
            self._skipped[:] = [held[0].detach().clone() for name, held in results.aux.items() if name == "skipped"]
            self._step_schedulers()
        progress.completed += is_step
        return program.outputs(call, results, world)

    def _why_torn(self, error: BaseException) -> str:
        return (
            f"a call of {self.name} ended in the middle of its update ({type(error).__name__}: {error}), so parameters "
            "and optimizer states are partly those of before it and partly those of after it; load a checkpoint of all "
            "of them, graph.load_state_dict(...), or make modules, optimizer and Graph anew"
        )

    def _step_schedulers(self) -> None:
        if any(scheduler is not None for scheduler in self._source.schedulers) and self.skipped:
            return
        for spec, scheduler in zip(self._source.optimizers, self._source.schedulers, strict=True):
            if scheduler is not None:
                _compat.note_step(spec.optimizer)
                scheduler.step()

    # ---- reading

    @property
    def is_compiled(self) -> bool:
        """Whether a program has been made, by a call or by ``compile``."""
        return self._selection.last is not None

    @property
    def training(self) -> bool:
        """Whether the program used or compiled last has an update."""
        last = self._selection.last
        return last is not None and last.captured.training

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
        return tuple(self._grad_norms.get(f"grad_norm.{i}") for i in range(len(self._source.optimizers)))

    @property
    def skipped(self) -> bool:
        """Whether the last training call changed nothing because a gradient was not finite: see ``config.enable_amp``.

        On a GPU it waits for that call.
        """
        return any(map(bool, self._skipped))

    @property
    def loss_scale(self) -> float | None:
        """What the next call multiplies its loss by; None unless ``config.enable_amp(dtype=torch.float16)``."""
        scale = self._source.loss_scale
        return None if scale is None else float(scale.scale)

    @_compat.cpu_by_default
    def state_dict(self) -> dict[str, Any]:
        """Modules, optimizers, schedulers and the random stream; values are DTensors where they are split.

        ``{"modules": {attribute: module.state_dict()}, "optimizers": [{"state": {"attribute.fqn": {...}},
        "param_groups": [...]}], "schedulers": [...], "random": {"seed", "step"}}``; ``torch.distributed.checkpoint``
        saves and reshards it.  Where the loss is scaled, "loss_scale" has "scale", "growth_tracker" and "hysteresis".

        It is live: its tensors are those that the next step writes to, as in torch.  To keep them as they are now,
        take ``full_state_dict``, or ``copy.deepcopy`` of this.  Every rank calls it where values are cut in sections.
        """
        outline = self._outline()
        if not any(reading.is_sectioned(x) for _, x in reading.tensors_in(outline)):
            return cast("dict[str, Any]", reading.saveable(outline, self.placement))
        with self._source.ranks.together(f"state_dict() of {self.name}"):
            self._source.ranks.agree_on(SAVE, lambda: outline, reading.facts)
            made: dict[str, Any] = reading.saveable(outline, self.placement)
        return made

    @_compat.cpu_by_default
    def full_state_dict(self) -> dict[str, Any]:
        """The same with plain whole tensors, a snapshot: nothing writes to it.  Every rank calls it, and gets it."""
        ranks = self._source.ranks
        with ranks.together(f"full_state_dict() of {self.name}"):
            outline = ranks.agree_on(FULL, self._outline, reading.facts)
            made: dict[str, Any] = reading.full(outline, self.placement, self._source.state().why_torn())
        return made

    def _outline(self) -> dict[str, Any]:
        """What there is to save."""
        self._not_in_build("saved")
        state, last = self._source.state(), self._selection.last
        torn = state.why_torn()
        if torn:
            warnings.warn(torn, stacklevel=4)
        program = (None, ()) if last is None else (last.graph, last.captured.states)
        return moved_out(reading.outline(state, self._source.schedulers, *program))

    @_compat.cpu_by_default
    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Load what ``state_dict`` or ``full_state_dict`` gave, at any stage and world size.

        Once the Graph has been called or compiled, or where tensors are split, every rank calls it, with the same
        checkpoint: whole tensors and numbers are compared.  Before that the first call takes what rank 0 has.

        Raises CheckpointError, before anything is written, on every rank, for what is no state dict, for missing or
        unexpected keys, and for shapes and kinds of values that do not fit.
        """
        self._not_in_build("loaded")
        source, program = self._source, self._selection.last
        state, schedulers = source.state(), source.schedulers
        nds = {} if program is None else program.state_nds()
        sd = moved_in(sd, state.modules)

        def check() -> Checked:
            return fit.check(sd, state, schedulers, strict, StatesToCome(source.optimizers, state, program))

        if program is None and not fit.is_split(sd, state):
            loading.load(check(), state, schedulers, strict, nds)
        else:
            with source.ranks.together(f"load_state_dict() of {self.name}"):
                fitting = source.ranks.agree_on(LOAD, check, fit.contents)
                loading.load(fitting, state, schedulers, strict, nds)
                if fitting.is_complete:
                    progress = self._selection.progress
                    progress.taken = progress.completed = 0

    @_compat.cpu_by_default
    def __repr__(self) -> str:
        found, state, last = modules.tensors(self._source.modules), self._source.state(), self._selection.last
        nds = {path: state.nd_of(entry.tensor) for path, entry in found.items()}
        body = str(last.graph) if last else "  (not compiled: call it, or graph.compile(...))"
        lines = [
            f"{self.name}({self.placement!r})",
            repr(self.config),
            *(last.decisions if last else ()),
            *(f"along {axis} {way}" for axis, way in self._source.ways.items()),
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
        return self._copied(object.__new__(type(self)), copy.copy(self.config), lambda held: held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        made = memo[id(self)] = object.__new__(type(self))
        return self._copied(made, copy.deepcopy(self.config, memo), lambda held: copy.deepcopy(held, memo))

    def _copied(self, made: Graph, config: GraphConfig, copied: Callable[[Any], Any]) -> Graph:
        """``made`` with settings of its own and ``copied`` attributes.  It compiles programs of its own."""
        made.name, made.placement, made.config = self.name, self.placement, config
        made._begin()
        made._source.take_settings(self._source, copied)
        vars(made).update((name, copied(held)) for name, held in vars(self).items() if name not in vars(made))
        made._source.take_state(self._source)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            f"the Graph {self.name} cannot be pickled: it holds programs and connections of this process. "
            "Save graph.state_dict() (or full_state_dict()), make the Graph anew, and load it: load_state_dict(...)"
        )

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(type(self), name, "_grad_norms" in vars(self))

    def __setattr__(self, name: str, held: Any) -> None:
        check_attribute(type(self), name, held, "_grad_norms" in vars(self))
        super().__setattr__(name, held)

    def _compiled(self, what: str) -> Program:
        last = self._selection.last
        if last is None:
            raise ConfigError(
                f"{self.name} has no {what} yet: call it with a batch, or graph.compile(...) to run nothing"
            )
        return last


def _parameter_lines(found: Mapping[str, Found], nds: Mapping[str, Nd]) -> list[str]:
    """Path, type and SBP of every parameter, for ``repr``."""
    lines = []
    for path, entry in found.items():
        if entry.kind == "param":
            sbp = ", ".join(map(str, nds[path]))
            kind = " DTensor" if isinstance(entry.tensor, DTensor) else ""
            lines.append(f"  {path}: {tensor_text(entry.tensor)} {sbp}{kind}")
    return lines
