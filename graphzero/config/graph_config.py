"""GraphConfig: the user's object, ``graph.config``.  It replaces the fields of its ``Settings``.

Every Graph has its own, nothing is process-global.  Which settings there are is ``settings``'s.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from graphzero.config.amp import amp_of
from graphzero.config.links import links_of
from graphzero.config.named import with_input, with_pass
from graphzero.config.setting import Setting, settings_of
from graphzero.config.settings import Settings
from graphzero.config.zero import zero_of
from graphzero.errors import ConfigError
from graphzero.sbp.links import Link
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd, Sbp


class GraphConfig:
    """Settings of one Graph: ``graph.config``.  Wrong values raise ConfigError where they are set."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._settings = Settings()

    def _set(self, **changes: Any) -> None:
        self._settings = replace(self._settings, **changes)

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

    def set_memory_budget(self, nbytes: int | None) -> None:
        """Say how many bytes the plan of a step may peak at on one rank; None, the default, for any number.

        At stage 3 the budget is spent on what stays gathered between forward and backward, so that least is sent; with
        stage "auto" it decides the stage too.  Where a step does not fit otherwise, backward computes values of forward
        again instead of holding them.  Compiling a step that cannot fit raises ConfigError, with what it needs.
        Operator workspaces, the inputs and the Python process are not in the plan: leave room for them.
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

    def set_optimizer_in_backward(self, mode: bool = True) -> None:
        """Step each parameter while backward runs, as soon as its gradient is complete and its old value read.

        Gradients are then not all held until backward ends: up to four bytes less a parameter, and the same bits.
        What the update needs of all gradients first (clip_grad_norm) it still waits for; ``plan.decisions`` says so.
        A step that fails within backward has then changed some parameters.
        """
        self._set(optimizer_in_backward=mode)

    def set_arena(self, mode: bool) -> None:
        """Whether large temporaries of a step lie at planned places of one buffer that stays; True by default.

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
            )
        )

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Cut each rank's share of the batch in ``steps`` micro-batches, which run one after the other.

        The step stays that of the whole batch: losses, token means, masked means, clipping and the new parameters are
        those of one micro-batch, but for rounding.  What hangs on the batch alone, such as the number of tokens, is
        computed first, of all micro-batches.  Activations are those of one micro-batch, and gradients are added up: at
        stages 0 and 1 whole, and reduced once; from stage 2 on each rank adds up its part, or all of it where a memory
        budget has room for that.

        Outputs that are split along the batch come back complete, in order.  What cannot be known before all
        micro-batches are through and is read while they run, the statistics of a batch norm, is that of a micro-batch;
        a warning names the lines.  Buffers that follow from it change with each micro-batch.
        """
        self._set(gradient_accumulation_steps=steps)

    def set_executor(self, name: str) -> None:
        """How programs run: "eager", op by op, the reference; or "inductor", compute between collectives compiled.

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
        self._set(links=links_of(links, self._placement) if links is not None else ())

    def add_pass(self, pass_: Callable[[Any], Any], *, after: str = "zero") -> None:
        """Run a pass of your own behind the one named ``after``: a built-in one, or one added before."""
        self._set(user_passes=with_pass(self._settings.user_passes, pass_, after))

    # ---- what was set; of each field there is a member too, see ``_member``

    @property
    def settings(self) -> Settings:
        """All that is set, frozen: a later change makes another one."""
        return self._settings

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
        """What is not as by default, as text that is the same in every process; what ranks compare."""
        return self._settings.description

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the members made below

    def __setattr__(self, name: str, held: Any) -> None:
        member = vars(GraphConfig).get(name)
        if not name.startswith("_") and getattr(member, "fset", None) is None:
            raise ConfigError(f"config.{name} = {held!r}: {_no_such_setting(name)}")
        super().__setattr__(name, held)

    def __repr__(self) -> str:
        return f"GraphConfig({self.description})"


def _member(one: Setting) -> property:
    """What reads a field, and sets it if no method does."""

    def read(config: GraphConfig) -> Any:
        return getattr(config.settings, one.name)

    def write(config: GraphConfig, value: Any) -> None:
        config._set(**{one.name: value})

    doc = one.doc or f"What ``{one.method}`` was given; {one.default!r} without it."
    return property(read, None if one.method else write, doc=doc)


for _one in settings_of(Settings).values():
    if _one.name not in vars(GraphConfig):
        setattr(GraphConfig, _one.name, _member(_one))


_VERB = re.compile("^(set|enable|add)_")


def _no_such_setting(name: str) -> str:
    """The ways to make a setting; first those of which one who wrote ``name`` may have thought."""
    methods = {name: f"{name}(...)" for name in vars(GraphConfig) if _VERB.match(name)}
    assigned = {one.name: one.name for one in settings_of(Settings).values() if not one.method}
    about = {_VERB.sub("", name): way for name, way in (methods | assigned).items()}
    near = [about[found] for found in difflib.get_close_matches(_VERB.sub("", name), about, cutoff=0.5)]
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"there is no such setting. {guess}"
        f"Settings are made by {', '.join(methods.values())}, and the attributes {', '.join(assigned)}"
    )
