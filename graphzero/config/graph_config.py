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
        self._readings: dict[str, Any] = {}  # by system: what a reader of its configuration gave beside settings

    def _set(self, **changes: Any) -> None:
        self._settings = replace(self._settings, **changes)

    def _set_plugin(self, name: str, value: Any) -> None:
        self._set(plugins=with_value(self._settings.plugins, name, value))

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

        stage: 1 splits optimizer states, 2 gradients too, 3 parameters too.  ``mode=False`` is stage 0.  "auto" is the
        first of 1, 2 and 3, in the order of what they send, whose plan peaks within the memory budget; without
        ``set_memory_budget`` that is 0.9 of the device's memory, shared by the ranks on it, on the rank that has least.
        shard_min_size: parameters with fewer than this many elements per rank stay broadcast.
        axis: placement axes to split over, a name or names; by default every data axis.
        keep_gathered: at stage 3, what forward gathers of a parameter stays until backward has read it, and is not
        gathered again: less is sent, more held.  True for all, or names and patterns (``"model.head.*"``) of some.
        False leaves it to the memory budget; without one, nothing stays.
        """
        self._set(zero=zero_of(mode, stage, shard_min_size, axis, keep_gathered, self._placement))

    def enable_offload(self, states: bool = True, *, path: str | os.PathLike[str] | None = None) -> None:
        """Keep optimizer states in host memory: the device holds those of two buckets, while it steps them.

        The same bits, with any optimizer of torch's form.  A bucket is the states of one parameter, or of several with
        ``bucket_bytes`` in all; it comes while the one before it is stepped, and goes back behind its own step.  States
        that are 0-d stay on the device.  A step moves them all over the link to the host, once in each direction.
        states: False turns it off.
        path: of a folder in which each rank keeps its states in a file, instead of in memory; it is made if it is not
        there.  The file goes when the Graph does.  Of CPU ranks this is how memory is saved.

        Raises ConfigError beside ``set_cuda_graph``; when the step is compiled, with pipeline stages; when states are
        laid out, for a folder that cannot be written, or a disk that has no room for them.
        """
        self._set(offload=offload_of(states, path))

    def set_memory_budget(self, nbytes: int | None) -> None:
        """Say how many bytes the plan of a step may peak at on one rank; None, the default, for any number.

        At stage 3 the budget is spent on what stays gathered between forward and backward, so that least is sent; with
        stage "auto" it decides the stage too.  Where a step does not fit otherwise, its largest values are computed in
        tiles of rows (``set_row_tiles``), and backward computes values of forward again instead of holding them.
        Compiling a step that cannot fit raises ConfigError, with what it needs.  Operator workspaces, the inputs and
        the Python process are not in the plan: leave room for them.
        """
        self._set(memory_budget=nbytes)

    def set_activation_memory(self, memory: int | str | None) -> None:
        """Say what backward may need of forward: the rest is computed again in backward, with the same bits.

        memory: the most bytes of activations that one rank may hold at a time, copies that are made again included;
        what is cheap to compute is computed again first.  "checkpoint" cuts forward in segments where little crosses,
        holds what crosses, and computes all else again, as torch.utils.checkpoint around blocks does: the least memory
        for at most one forward more.  None, the default, holds everything, unless ``set_memory_budget`` needs it
        otherwise.  Bytes that are too few raise ConfigError when the step is compiled, with what it needs.
        """
        self._set(activation_memory=memory)

    def set_row_tiles(self, count: int) -> None:
        """Compute the largest values of a step in so many tiles of rows, if they are needed only on the way; 1, the
        default, for none.

        The logits of a language model are such values: [tokens, classes] between hidden values and a loss.  Forward
        and backward of a tile run together, then those of the next, so that only a tile's logits are held at a time;
        nothing is computed twice, and only sums over rows are rounded otherwise.  Tiles are equal: where ``count`` does
        not divide a rank's rows, it is the next number up to its double that does, else the next below.  A step
        without such values stays as it is, and ``plan.decisions`` says why.
        """
        self._set(row_tiles=count)

    def set_split_attention(self, way: str) -> None:
        """Say how attention over a split sequence gives each query all keys; "auto", the default, or one of these.

        ========== =====================================================================================================
        "exchange" ranks exchange pieces of the sequence for heads, and back behind attention (DeepSpeed Ulysses)
        "gather"   queries stay split, and each rank gathers keys and values
        "ring"     queries stay split, and blocks of keys and values go from rank to rank (Ring Attention)
        "auto"     exchange where pieces of queries have unequal work; else what sends fewer bytes
        ========== =====================================================================================================

        An exchange needs as many heads as there are ranks; where there are fewer, keys are gathered whatever it says.
        Contiguous pieces of queries have unequal work under a causal mask; tokens dealt out in turn, by an input of
        ``S(1, length / ranks)``, have equal work.
        The step is the same either way, but for rounding.  ``gz.explain`` of an attention shows the bytes of both.
        """
        self._set(split_attention=way)

    def set_optimizer_in_backward(self, mode: bool = True) -> None:
        """Step each parameter while backward runs, as soon as its gradient is complete and its old value read.

        Gradients are then not all held until backward ends: up to four bytes less a parameter, and the same bits.
        What the update needs of all gradients first (clip_grad_norm) it still waits for; ``plan.decisions`` says so.
        A step that fails within backward has then changed some parameters.
        """
        self._set(optimizer_in_backward=mode)

    def set_arena(self, mode: bool) -> None:
        """Set whether large temporaries of a step lie at planned places of one buffer that stays; True by default.

        It is so on a CPU with executor "eager": a step then asks the kernel for no memory.  The buffer is what the step
        needs of such values at its worst moment, and held between calls; the plan says it, "arena".  Where the step's
        peak would rise by more than a twentieth, a tenth of the buffer, or over the memory budget, less is put there,
        or nothing.
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
        """Mixed precision: forward and backward in 16 bit, parameters, optimizer states and update in full precision.

        Every floating parameter that forward reads is its cast to ``dtype``, made of the piece that a rank holds, so
        that gathers move 16-bit values; ``build`` runs under ``torch.autocast``.  The user's parameters are the
        masters, split over the ranks from ZeRO's stage 1 on.  ``mode=False`` turns it off.
        dtype: torch.bfloat16, or torch.float16, under which the loss is scaled so that small gradients do not vanish.
        reduce_dtype: in which ranks add up gradients, by default ``dtype``; behind that they are float32.
        init_scale: what the loss is multiplied by at first (float16 only, as all that follows).  A step whose gradients
        are not all finite is skipped on every rank, ``graph.skipped``, and counts as an overflow.
        growth_factor, growth_interval: after so many steps in a row without an overflow the scale grows.
        hysteresis, backoff_factor: so many overflows, counted anew when the scale grows, and each one after them, let
        the scale fall; with 1 it is torch.amp.GradScaler's.
        min_scale: what it does not fall below.
        consecutive_hysteresis: count overflows anew after each step without one, too, as DeepSpeed can.
        stochastic_rounding: parameters that are bfloat16 are masters too (bfloat16 only): they and their optimizer
        states are kept in it, 6 bytes a parameter less with Adam, and forward reads them as they are. The update is
        computed in float32, and rounded up or down at random so that the mean is exact; which way follows from the
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
        """Cut each rank's share of the batch in ``steps`` micro-batches, which run one after the other.

        The step stays that of the whole batch: losses, token means, masked means, clipping and the new parameters are
        those of one micro-batch, but for rounding.  What depends on the batch alone, such as the number of tokens, is
        computed first, of all micro-batches.  Activations are those of one micro-batch, and gradients are added up: at
        stages 0 and 1 whole, and reduced once; from stage 2 on each rank adds up its part, or all of it where a memory
        budget has room for that.

        Outputs that are split along the batch come back complete, in order.  What cannot be known before all
        micro-batches are through and is read while they run, the statistics of a batch norm, is that of a micro-batch;
        a warning names the lines.  Buffers that follow from it change with each micro-batch.
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

        module: in an attribute of the Graph, or its path, ``"model.layers.0"``, or a pattern of paths,
        ``"model.layers.*"``.  A mark of a module inside it counts for that one.
        stage: from 0 on, in the order of forward.
        An op that is not marked is computed on the last stage of what it reads; a parameter that is not marked is on
        the first stage that reads it.

        ``set_stage("auto")`` chooses: the modules that build calls are cut into ``stage`` stages one after the other,
        by default as many as the schedule needs, one for each rank along ``pp``, or two.  The cuts are between the
        entries of lists of blocks, and the modules before and behind them; where a transformers configuration has a
        ``base_model_pp_plan``, between the modules that it names.  Modules marked beside it are where they are marked.
        device: of "auto", by its name or file, as ``graphzero plan`` takes it: the slowest stage then takes the fewest
        seconds, planned for forward and backward; without it, the parameters that stages read are evened out.

        Raises ConfigError for a placement without an axis "pp".
        """
        if isinstance(module, str) and module == "auto":
            self._set(auto_stages=read_auto_stages(stage, device, self._placement))
            return
        if device is not None:
            raise ConfigError('set_stage(..., device=...): a device is of set_stage("auto"); leave it out')
        self._set(stages=with_stage(self._settings.stages, module, stage, self._placement))

    def set_pipeline(self, schedule: str | Sequence[Sequence[str | Action | None]] | PipelineSchedule) -> None:
        """Say in which order pipeline stages run micro-batches; "1f1b" is the default.

        schedule: a name; rows of actions, one for each rank along ``pp``, ``["0F0", "0F1", "0B0", "0B1"]``; or the path
        of a .csv file of them, in the grammar of torch.distributed.pipelining.  It is proved to be complete and
        executable when the step is compiled.

        ========================= ======================================================================================
        "gpipe"                   forward of all micro-batches, then backward of all
        "1f1b"                    backward as soon as it may run: stage i of p keeps values of p - i micro-batches
        "interleaved"             1f1b with two or more stages a rank (Megatron)
        "looped_bfs"              gpipe with two or more stages a rank
        "zb1p"                    1f1b with gradients of weights behind those that are sent (ZB-H1)
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
        compiled.

        torch's Inductor compiles at the first call, which takes seconds; it keeps the result on disk for the next
        process.  Losses are those of "eager" but for rounding.  The plan, which is of "eager", may be off.
        """
        self._set(executor=name)

    def set_cuda_graph(self, mode: bool = True) -> None:
        """Record the step in a CUDA graph and replay it: a call then launches once, not once for each kernel.

        The first calls run op by op; the third one records.  Learning rates and other numbers that change are then read
        from memory where the op that takes them can; ``repr`` of the Graph says how it runs, and a warning why it does
        not replay.  Needs a GPU, and one process: a placement of one rank, or a virtual one.
        """
        self._set(cuda_graph=mode)

    def set_input(self, name: str, *, sbp: Sbp | tuple[Sbp, ...]) -> None:
        """Say how one input of build lies on the ranks, instead of split along dim 0.

        name: as in the program, ``x`` or ``batch.input_ids``.  sbp: one per placement axis, or one for all of a 1-d
        placement: ``gz.sbp.B`` for class weights, ``gz.sbp.S(1)`` for a batch in dim 1.
        """
        self._set(inputs=with_input(self._settings.inputs, name, sbp, self._placement))

    def set_links(self, links: Mapping[str, Link] | str | os.PathLike[str] | None) -> None:
        """Say what communication costs on each placement axis: boxing then takes the ways of fewest seconds, not bytes.

        links: a ``gz.Link`` for each axis by name, or a dict of its two numbers; or the path of the file that
        ``graphzero calibrate`` wrote, which every rank reads.  None, the default: all axes are alike and bytes decide.
        """
        self._set(links=links_of(links, self._placement.without_pipeline()) if links is not None else ())

    def add_pass(self, pass_: Callable[[Any], Any], *, after: str = "zero") -> None:
        """Run a pass of your own behind the one named ``after``: a built-in one, or one added before."""
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
