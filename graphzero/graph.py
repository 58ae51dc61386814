"""Graph: the user's class.  One call is one step: read the arguments, agree with the other ranks, find or make the
program (``step.program_selector``), bind what is not bound, run, and leave the user's modules, optimizers and
schedulers true (``step.step_runner``).

Here is only their order, and what the user may ask.
"""

from __future__ import annotations

import copy
import html
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from graphzero import _compat
from graphzero.capture import AverageSpec, OptimizerSpec, is_capturing
from graphzero.checkpoint.checkpointer import Checkpointer
from graphzero.config import GraphConfig
from graphzero.errors import CapacityError, CaptureError, ConfigError, hides_frames
from graphzero.ir.graph import StepGraph
from graphzero.ir.verifier.read_only_graphs import ReadOnlyGraphs
from graphzero.logs import OPTIONS
from graphzero.passes import Record
from graphzero.plan import Plan
from graphzero.runtime.execute.checks import room_checks
from graphzero.runtime.state import full_tensors, modules
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.world import launch
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd
from graphzero.step import argument_checks
from graphzero.step.argument_checks import check_attribute, missing_attribute
from graphzero.step.full_parameters import FullParameters
from graphzero.step.program import StepProgram
from graphzero.step.program_selector import PreparedCall, ProgramSelector
from graphzero.step.step_runner import StepRunner
from graphzero.step.user_graph import UserGraph

MOST_TIMES = 100  # that one step is given more room: by doubling it, more than any has


class Graph:
    """A training or evaluation step, compiled as one program for all ranks of a placement.

    Derive from it; in ``__init__`` call ``super().__init__()``, assign modules to attributes and ``add_optimizer``;
    write the step for one device and the whole batch in ``build``; then call the object with each batch.

    placement: the ranks, a ``gz.placement`` or a DeviceMesh; by default all ranks of the world.
    name: what programs and messages call it; by default the class's name.
    config: settings to begin with, as ``gz.GraphConfig.from_deepspeed`` makes them; the Graph takes a copy.
    Raises PlacementError for ranks that do not exist, ConfigError for settings that have no meaning.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        argument_checks.check_names(cls, Graph)

    def __init__(
        self, placement: Placement | DeviceMesh | None = None, name: str | None = None,
        config: GraphConfig | None = None,
    ) -> None:  # fmt: skip
        argument_checks.check_name(name)
        self.name = name or type(self).__name__
        self.placement = launch.resolve(config.placement if config is not None and placement is None else placement)
        self.config = (
            GraphConfig(self.placement) if config is None else argument_checks.own_config(config, self.placement)
        )
        if self.placement.without_pipeline().size > 1 and not self.placement.data_axes:
            warnings.warn(
                f"no axis of {self.placement!r} is a data axis (its name begins with dp), so every rank takes its "
                'plain inputs for the whole batch; to split the batch: gz.placement(..., names=("dp",))',
                stacklevel=2,
            )
        self._begin()

    def _begin(self) -> None:
        """The parts that are this Graph's alone: what it consists of, and what is compiled of that."""
        self._source = UserGraph(self, self.placement, self.config)
        self._selection = ProgramSelector(self._source)
        self._checkpoints = Checkpointer(self._source, self._selection)
        self._steps = StepRunner(self._source, self._selection)

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
        **others: Any,
    ) -> None:
        """Let ``optim`` step after ``build``'s backward; may be called for several optimizers.

        lr_sch: a scheduler of it, stepped after each training call.
        clip_grad_norm: the largest norm of its gradients, all together, of kind ``norm_type``.
        clip_grad_value: the largest absolute value of one element.

        Raises ConfigError for an optimizer that was added already or has no parameters, for a scheduler that belongs to
        another one or takes a metric, and for limits that are not positive numbers.
        """
        source = self._source
        argument_checks.check_no_others(others)
        argument_checks.check_optimizer(optim, [spec.optimizer for spec in source.optimizers])
        argument_checks.check_scheduler(lr_sch, optim)
        argument_checks.check_clipping(
            clip_grad_norm=clip_grad_norm, norm_type=norm_type, clip_grad_value=clip_grad_value
        )
        modules.register_optimizer(optim)
        source.optimizers.append(OptimizerSpec(optim, clip_grad_norm, float(norm_type), clip_grad_value))
        source.schedulers.append(lr_sch)

    def add_average(self, averaged: AveragedModel, of: nn.Module) -> None:
        """Let ``averaged`` follow the module ``of``: each training call ends with its ``update_parameters(of)``.

        averaged: a ``torch.optim.swa_utils.AveragedModel``, in an attribute of the Graph, as ``of`` is.  Its averaging
        function may be any that computes with tensors.  From stage 1 on its parameters are split like optimizer states;
        another Graph that holds it evaluates with it as it is.

        Raises ConfigError for anything else than an AveragedModel, for modules that are not in attributes, and for an
        average that was added already.
        """
        attributes = vars(self)
        argument_checks.check_average(averaged, of, attributes, [spec.averaged for spec in self._source.averages])
        self._source.averages.append(AverageSpec(averaged, of))

    # ---- running

    @hides_frames
    @_compat.cpu_by_default
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step: compile for arguments of these shapes if necessary, run, update modules and optimizers.

        A plain tensor is this rank's share of the batch, split along dim 0 over the data axes (0-d tensors and numbers
        are the same on all ranks); on a virtual placement it is the whole batch.  Returns the results of ``build``:
        values that are split along the batch as this rank's share (whole on a virtual placement), all others complete;
        DTensors if any argument was one.  Every rank calls it.

        Raises ConfigError, CaptureError or SbpError on every rank before the step is taken, and says what differs or
        where the step cannot be captured.
        """
        times = 0
        while True:
            try:
                return self._take_step(args, kwargs)
            except CapacityError as error:  # on all ranks, and nothing has changed: the same step again
                if self._steps.is_watched:  # by what would take both for one step
                    raise
                times += 1
                self.give_more_room(error, times)

    def _take_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_apart("called")
        with self._source.ranks.together(f"step of {self.name}"), _compat.outside_inference_mode():
            began = time.perf_counter() if OPTIONS.steps else 0.0
            call = self._selection.prepare(args, kwargs, running=True)
            with torch.no_grad():
                self._steps.bind(call)
                result = self._steps.run_step(call)
            self._selection.is_settled = True
            if began:
                self._steps.log_step(time.perf_counter() - began)
            return result

    @hides_frames
    @_compat.cpu_by_default
    def compile(self, *args: Any, **kwargs: Any) -> Graph:
        """Capture and rewrite for these arguments without running; they and the modules may be on the meta device.

        No step is taken and no state is created or changed.  Every rank calls it.  Returns the Graph itself.

        Raises CaptureError, with the line of ``build``, for a step that cannot be captured as one graph.
        """
        self._check_apart("compiled")
        with self.prepared_call(f"compile() of {self.name}", args, kwargs):
            return self

    @_compat.contextmanager
    def prepared_call(
        self, doing: str, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool = False, verifies: bool = True
    ) -> Iterator[PreparedCall]:
        """For the rest of graphzero: the call with these arguments and its program, compiled but not run.

        What is done within is done by all ranks together, and is not part of a step.  doing: "gz.check of TrainGraph";
        ranks are told so.  alone: no rank is asked, and ConfigError is raised for a program that has never run.
        verifies: False for a Graph that is only counted and never called.
        """
        self._check_apart("looked at")
        with self._source.ranks.together(doing), _compat.outside_inference_mode():
            selection = self._selection
            yield selection.recall(args, kwargs) if alone else selection.prepare(args, kwargs, False, verifies)

    def give_more_room(self, error: CapacityError, times: int) -> None:
        """For the rest of graphzero: give what is compiled from now on the room that a step lacked.

        times: that the step has lacked it.  Every rank calls it.
        Raises ``error`` if no setting changes by that: the step would stop again; and ConfigError for a plug-in by
        whose room a step does not end.
        """
        before, (plugin, check) = self.config.settings, room_checks()[error.check]
        if times > MOST_TIMES:
            raise plugin.refusal(
                f"has given a step more room {MOST_TIMES} times, and it still lacks it: {check.message}"
            )
        graphs = ReadOnlyGraphs(plugin, [self.program, *self.stage_programs.values()])
        with self._source.ranks.together(f"more room of {self.name}"), plugin.name_errors():
            check.give_more(self)
            graphs.check()
        if self.config.settings == before:
            raise error

    # ---- reading

    @property
    def is_compiled(self) -> bool:
        """Whether a program exists, made by a call or by ``compile``."""
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
        return self.compiled_program("program").graph

    @property
    def stage_programs(self) -> dict[str, StepGraph]:
        """The programs that pipeline stages run, by name, "forward@0"; empty without stages.

        ``program`` is the whole step then, one micro-batch after the other.  Raises ConfigError as ``program`` does.
        """
        pipeline = self.compiled_program("stage_programs").pipeline
        parts = [] if pipeline is None else pipeline.parts.parts
        return {str(part.key): part.graph for part in parts}

    @property
    def history(self) -> list[Record]:
        """Changes of each pass to the program, one record per pass: see ``gz.passes.Record``."""
        return self.compiled_program("history").history

    @property
    def plan(self) -> Plan:
        """Cost of one step on one rank: bytes of memory and collectives, known without running."""
        return self.compiled_program("plan").plan

    @property
    def grad_norm(self) -> Any:
        """The norm of the last training call's gradients before clipping, a 0-d tensor; None without clip_grad_norm.

        With several clipping optimizers a tuple, one entry per optimizer, None for those that do not clip.
        """
        return self._steps.grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the last training call changed nothing because a gradient was not finite: see ``config.enable_amp``.

        On a GPU it waits for that call.
        """
        return self._steps.skipped

    @property
    def loss_scale(self) -> float | None:
        """Factor by which the next call multiplies its loss; None unless ``config.enable_amp(dtype=torch.float16)``."""
        return self._source.next_loss_scale

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the next call: of every parameter group that has one, in the order of add_optimizer."""
        groups = (group for spec in self._source.optimizers for group in spec.optimizer.param_groups)
        return [float(group["lr"]) for group in groups if "lr" in group]

    @hides_frames
    @_compat.cpu_by_default
    def state_dict(self) -> dict[str, Any]:
        """Modules, optimizers, schedulers and the random stream; values are DTensors where they are split.

        ``{"modules": {attribute: module.state_dict()}, "optimizers": [{"state": {"attribute.fqn": {...}},
        "param_groups": [...]}], "schedulers": [...], "random": {"seed", "step"}}``; ``torch.distributed.checkpoint``
        saves and reshards it.  Where the loss is scaled, "loss_scale" has "scale", "growth_tracker" and "hysteresis".

        It is live: the next step writes to its tensors, as in torch.  For a snapshot take ``full_state_dict``, or a
        ``copy.deepcopy`` of it.  Every rank has to call it if values are split in sections.
        """
        self._check_apart("saved")
        return self._checkpoints.state_dict()

    @hides_frames
    @_compat.cpu_by_default
    def full_state_dict(self) -> dict[str, Any]:
        """The same outline with plain whole tensors, a snapshot: later steps do not change it. Every rank calls it, and
        gets it."""
        self._check_not_whole("saved")  # a build is a step, which says so itself
        return self._checkpoints.full_state_dict()

    @hides_frames
    @_compat.cpu_by_default
    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Load what ``state_dict`` or ``full_state_dict`` gave, at any stage and world size.

        Once the Graph has been called or compiled, or if tensors are split, every rank calls it with the same
        checkpoint: whole tensors and numbers are compared.  Before that, the first call takes rank 0's values.

        Raises CheckpointError, before anything is written, on every rank, for what is not a state dict, for missing or
        unexpected keys, and for shapes and kinds of values that do not fit.
        """
        self._check_apart("loaded")
        self._checkpoints.load_state_dict(sd, strict)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Within it modules hold whole plain tensors, on the rank's device, for eager code: ``generate`` of
        transformers, a plain loop over the validation set.

        Every rank enters and leaves it.  In between no rank needs another one, so one may compute alone while the
        others wait at the end, for at most the process group's timeout; code on one rank alone must not run
        collectives.  A rank holds the whole tensors next to its pieces, and 64 MiB of buffers while they are gathered.

        Parameters are those that the optimizer updates: float32 under ``config.enable_amp``, for ``torch.autocast``.
        Before the first call they have rank 0's values, as in that call.  On a virtual placement modules hold whole
        tensors anyway, and nothing is gathered.

        **Writes are taken back.**  The next step reads the values that eager code leaves in parameters and buffers;
        every rank must leave the same.  After the block modules and optimizers hold the same objects as before, split
        as they were, in the same memory.  If another tensor of the same shape and dtype was put in the place of one,
        its values are taken.  Changes of ``requires_grad`` are kept; gradients of split parameters are dropped.  This
        also holds if the block raises; then every rank raises.

        Raises ConfigError for tensors on the meta device; for whole tensors that do not fit ``set_memory_budget``; at
        the end for tensors of another shape or dtype; and within the block if a Graph over these modules is called,
        compiled, saved or loaded, or another block begins.  Raises CaptureError at the end, by hashes, if ranks have
        left different values: these are not taken, and no Graph runs with them until they are loaded again.
        """
        self._check_apart("opened once more")
        last = self._selection.last
        return FullParameters(self._source, None if last is None else last.plan)

    def checkpoints(self, doing: str) -> Checkpointer:
        """For the rest of graphzero: the object that saves and loads this Graph. doing: "saved"."""
        self._check_apart(doing)
        return self._checkpoints

    @_compat.cpu_by_default
    def __repr__(self) -> str:
        entries, state, last = modules.tensors(self._source.modules), self._source.state(), self._selection.last
        body = str(last.graph) if last else "  (not compiled: call it, or graph.compile(...))"
        lines = [
            f"{self.name}({self.placement!r})",
            repr(self.config),
            *(last.decisions if last else ()),
            *(f"along {axis} {way}" for axis, way in self._source.transports.items()),
            "parameters:",
            *(_parameter_line(x, state.nd_of(x.tensor)) for x in entries.values() if x.kind == "param"),
        ]
        return "\n".join([*lines, body.rstrip()])

    def _repr_html_(self) -> str:
        """HTML for notebooks: a description, the plan, and the program to unfold, with those of pipeline stages."""
        head = f"<b>{html.escape(self.name)}</b> on {html.escape(repr(self.placement))}"
        last = self._selection.last
        if last is None:
            return f"{head}: not compiled yet; call it, or graph.compile(...)"
        for name, shown in {"plan": last.plan, "program": last.graph, **self.stage_programs}.items():
            head += f"<details><summary>{name}</summary><pre>{html.escape(str(shown))}</pre></details>"
        return head

    def _check_apart(self, what: str) -> None:
        """Raise inside of a build, or of a block of ``full_parameters``."""
        if _compat.dynamo_runs():
            raise ConfigError(
                f"the Graph {self.name} is {what} inside of torch.compile, but it compiles its own step; call it as it "
                'is, and say config.set_executor("inductor") for torch\'s compiler'
            )
        if is_capturing():
            raise CaptureError(
                f"the Graph {self.name} is {what} inside of a build; a step is one graph. Call its modules or its "
                "build there (self.other.build(x)), and Graphs one after another"
            )
        self._check_not_whole(what)

    def _check_not_whole(self, what: str) -> None:
        who = full_tensors.open_graph_of(self._source.modules)
        if who:
            raise ConfigError(
                f"the Graph {self.name} is {what} within full_parameters() of {who}: its modules hold whole tensors "
                "there, for eager code, which are released at the end of the block. Do it before or after the block"
            )

    def __copy__(self) -> Graph:
        return self._copied(object.__new__(type(self)), copy.copy(self.config), lambda attribute: attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        copied = memo[id(self)] = object.__new__(type(self))
        return self._copied(copied, copy.deepcopy(self.config, memo), lambda attribute: copy.deepcopy(attribute, memo))

    def _copied(self, target: Graph, config: GraphConfig, copied: Callable[[Any], Any]) -> Graph:
        """``target`` with settings of its own and ``copied`` attributes.  It compiles programs of its own."""
        self._check_apart("copied")
        target.name, target.placement, target.config = self.name, self.placement, config
        target._begin()
        target._source.take_settings(self._source, copied)
        vars(target).update(
            (name, copied(attribute)) for name, attribute in vars(self).items() if name not in vars(target)
        )
        target._source.take_state(self._source)
        return target

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            f"the Graph {self.name} cannot be pickled: it holds programs and connections of this process. "
            "Save graph.state_dict() (or full_state_dict()), make a new Graph, and load it: load_state_dict(...)"
        )

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(type(self), name, "_steps" in vars(self))

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(type(self), name, value, "_steps" in vars(self))
        super().__setattr__(name, value)

    def compiled_program(self, what: str) -> StepProgram:
        """For the rest of graphzero: the program used or compiled last. Raises ConfigError, which names ``what``, if
        there is none."""
        last = self._selection.last
        if last is None:
            raise ConfigError(
                f"{self.name} has no {what} yet: call it with a batch, or graph.compile(...) to run nothing"
            )
        return last


def _parameter_line(entry: ModuleTensor, nd: Nd) -> str:
    """Path, type and SBP of a parameter, for ``repr``."""
    kind = " DTensor" if isinstance(entry.tensor, DTensor) else ""
    return f"  {entry.path}: {tensor_text(entry.tensor)} {', '.join(map(str, nd))}{kind}"
