"""GraphConfig: the user's object, ``graph.config``.  It replaces the fields of its ``Settings``.

Every Graph has its own, nothing is process-global.  Which settings there are is ``settings``'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphzero.config.amp import amp_of
from graphzero.config.links import links_of
from graphzero.config.members import PluginMembers, add_members, no_such_setting, plugin_members
from graphzero.config.named import with_input, with_pass
from graphzero.config.offload import offload_of
from graphzero.config.plugin_settings import with_value
from graphzero.config.settings import Settings
from graphzero.config.stages import read_auto_stages, with_stage
from graphzero.config.zero import zero_of
from graphzero.errors import ConfigError
from graphzero.extensions import STAGES, extensions
from graphzero.plan.device import Device
from graphzero.runtime.world import launch
from graphzero.sbp.link_costs import Link
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd, Sbp
from graphzero.schedules import Action, PipelineSchedule


class GraphConfig(metaclass=PluginMembers):
    """Settings of one Graph: ``graph.config``.  Wrong values raise ConfigError where they are set."""

    def __init__(self, placement: Placement | DeviceMesh | None = None) -> None:
        """placement: of the Graphs that take it, by default all ranks of the world."""
        self._placement = launch.resolve(placement)
        self._settings = Settings()
        self._readings: dict[str, Any] = {}  # by system: what a reader of its configuration gave apart from settings

    def _set(self, **changes: Any) -> None:
        self._settings = replace(self._settings, **changes)

    def _set_plugins(self, values: Mapping[str, Any]) -> None:
        plugins = self._settings.plugins
        for name, value in values.items():
            plugins = with_value(plugins, name, value)
        self._set(plugins=plugins)

    def enable_zero(
        self,
        mode: bool = True,
        *,
        stage: int | str = 2,
        shard_min_size: int = 1,
        axis: str | Iterable[str] | None = None,
        keep_gathered: bool | Iterable[str] = False,
    ) -> None:
        """Split model state over the ranks instead of keeping it whole on each (ZeRO, arXiv 1910.02054).

        stage: 1 splits optimizer states, 2 gradients too, 3 parameters too.  ``mode=False`` is stage 0.  "auto" takes
        the first of 1, 2 and 3 whose plan peaks within the memory budget.  Without ``set_memory_budget`` the budget is
        0.9 of the device's memory, divided by the ranks on it, on the rank that has least.
        shard_min_size: parameters with fewer than this many elements per rank stay broadcast.
        axis: placement axes to split over, a name or names; by default every data axis.
        keep_gathered: at stage 3, keep gathered parameters from forward to backward instead of gathering them again:
        less is sent, and more is held.  True for all parameters, or names and patterns (``"model.head.*"``) of some.
        False leaves the choice to the memory budget; without one, no parameter stays gathered.
        """
        self._set(zero=zero_of(mode, stage, shard_min_size, axis, keep_gathered, self._placement))

    def enable_offload(
        self,
        states: bool = True,
        *,
        activations: int | str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Keep optimizer states in host memory, and activations beyond so many bytes; the same bits.

        States, of any optimizer of torch's form: the device holds those of two buckets, while it steps them.  A bucket
        is the states of one parameter, or of several with ``bucket_bytes`` in all; it comes while the one before it is
        stepped, and goes back after its own step.  States that are 0-d stay on the device.  A step moves them all over
        the link to the host, once in each direction.
        states: False leaves them on the device.
        activations: the bytes of what forward leaves for backward, ``plan.memory.activations``, that one rank may have
        on its device at a time.  As much as it takes waits in host memory, what backward reads last first: it sets out
        when forward has read it last, and comes back while backward works on what it reads ``bucket_bytes`` before.
        Nothing is computed again for it; what ``set_activation_memory`` and the budget have computed again does not
        wait, and they are asked first.  "auto": where the step does not fit the memory budget, by default 0.9 of the
        device's memory, values wait on the host or are computed again, whichever makes the step less longer; copies
        that overlap with compute cost nothing.  None, the default, holds all on the device.  On pipeline stages values
        wait between the calls of a micro-batch, each rank its own, and "auto" does not work yet.
        path: of a folder in which each rank keeps both in files, instead of in memory; it is made if it is not there.
        The files go when the Graph does.  Of CPU ranks this is how memory is saved.

        Raises ConfigError with ``set_cuda_graph``; when the step is compiled, for "auto" on pipeline stages, and for
        fewer bytes of activations than it can do with, which it names; when states are laid out, for a folder that
        cannot be written, or a disk that has no room.
        """
        self._set(offload=offload_of(states, activations, path))

    def set_memory_budget(self, nbytes: int | None) -> None:
        """Limit the bytes at which the plan of a step may peak on one rank; None, the default, sets no limit.

        At stage 3 the budget is spent on parameters that stay gathered between forward and backward, so that the least
        is sent.  With stage "auto" it decides the stage too.  If a step does not fit otherwise, its largest values are
        computed in tiles of rows (``set_row_tiles``), and values of forward are recomputed in backward instead of held.
        Compiling a step that cannot fit raises ConfigError, with the bytes that it needs.  Operator workspaces, the
        inputs and the Python process are not in the plan: leave room for them.
        """
        self._set(memory_budget=nbytes)

    def set_activation_memory(self, memory: int | str | None) -> None:
        """Limit the activations that are held for backward; the others are recomputed in backward, with the same bits.

        memory: the most bytes of activations that one rank may hold at a time, including recomputed ones; values that
        are cheap to compute are recomputed first.  "checkpoint" cuts forward into segments at points where few values
        cross, holds these, and recomputes all others, as torch.utils.checkpoint around blocks does: the least memory,
        for at most one more forward.  None, the default, holds everything, unless ``set_memory_budget`` needs
        otherwise.  If the bytes are too few, compiling the step raises ConfigError with the bytes that it needs.
        """
        self._set(activation_memory=memory)

    def set_optimizer_in_backward(self, mode: bool = True) -> None:
        """Step each parameter while backward runs, as soon as its gradient is complete and its old value has been read.

        Gradients are then not all held until backward ends: up to four bytes a parameter less, with the same bits.  An
        update that needs all gradients first (clip_grad_norm) still waits for them; ``plan.decisions`` says so.  A step
        that fails within backward has then changed some parameters.
        """
        self._set(optimizer_in_backward=mode)

    def set_arena(self, mode: bool) -> None:
        """Set whether large temporaries of a step have planned places in one buffer that is kept; True by default.

        This is for a CPU with executor "eager": a step then asks the kernel for no memory.  The buffer is as large as
        these values are at the worst moment of the step, and is held between calls; the plan counts it as "arena".  If
        the step's peak would rise by more than a twentieth, a tenth of the buffer, or over the memory budget, the
        buffer holds fewer values, or none.
        """
        self._set(arena=mode)

    def enable_amp(
        self,
        mode: bool = True,
        *,
        dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        """Mixed precision: forward and backward in 16 bits, parameters, optimizer states and update in full precision.

        Forward reads each floating parameter as a cast to ``dtype``.  The cast is computed from the piece that a rank
        holds, so gathers move 16-bit values.  ``build`` runs under ``torch.autocast``.  The user's parameters are the
        masters, split over the ranks from ZeRO stage 1 on.  ``mode=False`` turns it off.
        dtype: torch.bfloat16, or torch.float16, under which the loss is scaled so that small gradients do not vanish.
        reduce_dtype: the dtype in which ranks add up gradients, by default ``dtype``; after that they are float32.
        init_scale: the first loss scale (float16 only, like all arguments up to the last).  A step whose gradients are
        not all finite is skipped on every rank, ``graph.skipped``, and counts as an overflow.
        growth_factor, growth_interval: after this many steps in a row without an overflow the scale grows.
        hysteresis, backoff_factor: the scale falls at the ``hysteresis``-th overflow, and at each one after it; the
        count starts again when the scale grows.  With 1 the scale is that of torch.amp.GradScaler.
        min_scale: the scale does not fall below it.
        consecutive_hysteresis: start the count of overflows again after each step without one too, as DeepSpeed can.
        stochastic_rounding: bfloat16 parameters are masters too (bfloat16 only).  They and their optimizer states are
        kept in bfloat16, 6 bytes a parameter less with Adam, and forward reads them as they are.  The update is
        computed in float32, and rounded up or down at random so that the mean is exact.  The direction follows from the
        Graph's seed, the step and the element, and is the same on any placement.
        """
        self._set(
            amp=amp_of(
                mode,
                dtype,
                reduce_dtype=reduce_dtype,
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                min_scale=min_scale,
                consecutive_hysteresis=consecutive_hysteresis,
                stochastic_rounding=stochastic_rounding,
            )
        )

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Cut each rank's share of the batch into ``steps`` micro-batches, which run one after the other.

        The step stays that of the whole batch: losses, token means, masked means, clipping and the new parameters are
        those of ``steps=1``, except for rounding.  Values that depend on the batch alone, such as the number of tokens,
        are computed first, over all micro-batches.  Activations are those of one micro-batch.  Gradients are added up:
        at stages 0 and 1 whole, and reduced once; from stage 2 on each rank adds up its part, or all of it if a memory
        budget has room for that.

        Outputs that are split along the batch come back complete, in order.  Values that depend on trained parameters
        and on the whole batch, and that are read while micro-batches run, such as the statistics of a batch norm, are
        those of a micro-batch; a warning names the lines.  Buffers that follow from them change with each micro-batch.
        """
        self._set(gradient_accumulation_steps=steps)

    def set_stage(
        self,
        module: nn.Module | str,
        stage: int | None = None,
        *,
        device: Device | str | os.PathLike[str] | None = None,
    ) -> None:
        """Put a module on a stage of the pipeline: its parameters, their states, and the ops that compute it.

        module: a module in an attribute of the Graph, its path, ``"model.layers.0"``, or a pattern of paths,
        ``"model.layers.*"``.  A module inside it may have another mark.
        stage: from 0 on, in the order of forward.
        An op that is not marked is computed on the last stage of its operands; a parameter that is not marked is on the
        first stage that reads it.

        ``set_stage("auto")`` chooses: the modules that build calls are cut, in their order, into ``stage`` stages, by
        default as many as the schedule needs: one for each rank along ``pp``, or two.  The cuts are between the entries
        of lists of blocks, and between modules before and after these; if a transformers configuration has a
        ``base_model_pp_plan``, between the modules that it names.  Modules that are also marked stay where they are.
        device: for "auto", a name or file, as for ``graphzero plan``: the slowest stage then takes the fewest seconds,
        planned for forward and backward.  Without it stages have equal numbers of parameters to read, if possible.
        A plug-in may add other choosers, ``set_stage("NAME")``.

        Raises ConfigError for a placement without an axis "pp".
        """
        if isinstance(module, str) and module in extensions(STAGES):
            self._set(auto_stages=read_auto_stages(module, stage, device, self._placement))
            return
        if device is not None:
            raise ConfigError('set_stage(..., device=...): a device is of set_stage("auto"); leave it out')
        self._set(stages=with_stage(self._settings.stages, module, stage, self._placement))

    def set_pipeline(self, schedule: str | Sequence[Sequence[str | Action | None]] | PipelineSchedule) -> None:
        """Set the order in which pipeline stages run micro-batches; "1f1b" is the default.

        schedule: a name; rows of actions, one for each rank along ``pp``, ``["0F0", "0F1", "0B0", "0B1"]``; or the path
        of a .csv file of them, in the grammar of torch.distributed.pipelining.  When the step is compiled, the schedule
        is checked to be complete and executable.

        ========================= ======================================================================================
        "gpipe"                   forward of all micro-batches, then backward of all
        "1f1b"                    backward as soon as it may run: stage i of p keeps values of p - i micro-batches
        "interleaved"             1f1b with two or more stages a rank (Megatron)
        "looped_bfs"              gpipe with two or more stages a rank
        "zb1p"                    1f1b that computes gradients of weights after those that are sent (ZB-H1)
        "interleaved_zero_bubble" the same with two or more stages a rank
        "zbv"                     two stages a rank, on the way there and back (ZB-V)
        ========================= ======================================================================================

        Raises ConfigError for a name that is none of these, and for cells that are not actions.
        """
        if isinstance(schedule, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in schedule):
            schedule = PipelineSchedule.from_rows(schedule)
        self._set(pipeline=schedule)

    def set_executor(self, name: str) -> None:
        """Set how programs run: "eager", op by op, the reference; or "inductor", with compute between collectives
        compiled; or an executor that a plug-in adds.

        torch's Inductor compiles at the first call, which takes seconds; it keeps the result on disk for the next
        process.  Losses equal those of "eager" except for rounding.  The plan is that of "eager" and may differ.
        """
        self._set(executor=name)

    def set_cuda_graph(self, mode: bool = True) -> None:
        """Record the step in a CUDA graph and replay it: a call then launches once, not once for each kernel.

        The first two calls run op by op; the third one records.  Learning rates and other numbers that change are then
        read from memory, if the op that takes them can do so.  ``repr`` of the Graph says how it runs, and a warning
        says why it does not replay.  Needs a GPU, and one process: a placement of one rank, or a virtual one.
        """
        self._set(cuda_graph=mode)

    def set_input(self, name: str, *, sbp: Sbp | tuple[Sbp, ...]) -> None:
        """Set the SBP of one input of build, which is otherwise split along dim 0.

        name: as in the program, ``x`` or ``batch.input_ids``.  sbp: one per placement axis, or one SBP on a 1-d
        placement: ``gz.sbp.B`` for class weights, ``gz.sbp.S(1)`` for a batch in dim 1.
        """
        self._set(inputs=with_input(self._settings.inputs, name, sbp, self._placement))

    def set_links(self, links: Mapping[str, Link] | str | os.PathLike[str] | None) -> None:
        """Set the cost of communication on each placement axis: boxing then minimizes seconds instead of bytes.

        links: a ``gz.Link`` for each axis by name, or a dict of its two numbers; or the path of the file that
        ``graphzero calibrate`` wrote, which every rank reads.  None, the default: all axes are alike and bytes decide.
        """
        self._set(links=links_of(links, self._placement.without_pipeline()) if links is not None else ())

    def add_pass(self, pass_: Callable[[Any], Any], *, after: str = "zero") -> None:
        """Run your own pass after the pass named ``after``: a built-in one, or one added before."""
        self._set(user_passes=with_pass(self._settings.user_passes, pass_, after))

    # ---- what was set; of each field there is a member too, see ``members``

    @property
    def settings(self) -> Settings:
        """All settings, frozen: a later change makes a new object."""
        return self._settings

    @property
    def placement(self) -> Placement:
        """The ranks that it is for."""
        return self._placement

    @property
    def inputs(self) -> dict[str, Nd]:
        """SBP of the inputs that set_input named."""
        return dict(self._settings.inputs)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for configurations that compile to the same program; hashable.

        A pass counts by identity: the same object is the same pass, and it is expected not to change.
        """
        return self._settings.fingerprint

    @property
    def description(self) -> str:
        """Settings that differ from their defaults, as text that is equal in every process; ranks compare it."""
        return self._settings.description

    def __getattr__(self, name: str) -> Any:
        """A member that a plug-in adds."""
        member = None if name.startswith("_") else plugin_members(type(self)).get(name)
        if member is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return member.__get__(self, type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or getattr(vars(GraphConfig).get(name), "fset", None) is not None:
            super().__setattr__(name, value)
            return
        member = plugin_members(type(self)).get(name)
        assign = member.fset if isinstance(member, property) else None
        if assign is None:
            raise ConfigError(f"config.{name} = {value!r}: {no_such_setting(GraphConfig, name)}")
        assign(self, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *plugin_members(type(self))})

    def __repr__(self) -> str:
        return f"GraphConfig({self.description})"


add_members(GraphConfig)
