"""GraphConfig: what a user chooses for one Graph.

It only holds and checks settings; passes, capture and the runtime read them.  Every Graph has its own, nothing
is process-global, and ``fingerprint`` says whether two configurations compile to the same program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphzero.checks import check_pass
from graphzero.errors import ConfigError
from graphzero.link_files import links_of
from graphzero.passes import NAMES, pass_name
from graphzero.sbp.links import Link, Links
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import Nd, Sbp
from graphzero.zero_config import ALL, ZeroConfig, axes_to_split, check_stage, choices, names_to_keep

EXECUTORS = ("eager", "inductor")
CHECKS = ("always", "first", "values")
MAX_PROGRAMS = 64
MATMULS = ("default", "onednn", "fastest")


class GraphConfig:
    """Settings of one Graph: ``graph.config``.  Wrong values raise ConfigError where they are set."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._zero = ZeroConfig()
        self._executor = "eager"
        self._matmul = "default"
        self._check_inputs = "always"
        self._check_values = True
        self._bucket_bytes: int | None = None
        self._max_programs: int | None = MAX_PROGRAMS
        self._memory_budget: int | None = None
        self._optimizer_in_backward = False
        self._cuda_graph = False
        self._arena = True
        self._links: Links = ()
        self._inputs: dict[str, Nd] = {}
        self._passes: list[tuple[Any, str]] = []

    # ---- what the user calls

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
        if not isinstance(mode, bool):
            raise ConfigError(f"enable_zero({mode!r}): the first argument says yes or no; write stage={mode!r}")
        check_stage(stage)
        if isinstance(shard_min_size, bool) or not isinstance(shard_min_size, int) or shard_min_size < 0:
            raise ConfigError(
                f"enable_zero(shard_min_size={shard_min_size!r}): give the smallest number of elements per rank "
                "that is worth splitting, an int from 0 up; 1 splits everything"
            )
        kept = names_to_keep(keep_gathered, stage)
        self._zero = (
            ZeroConfig(stage, axes_to_split(axis, self._placement), shard_min_size, kept) if mode else ZeroConfig()
        )

    def set_memory_budget(self, nbytes: int | None) -> None:
        """Say how many bytes the plan of a step may peak at on one rank; None, the default, for any number.

        At stage 3 the budget is spent on what stays gathered between forward and backward, so that least is sent; with
        stage "auto" it decides the stage too.  Compiling a step that cannot fit raises ConfigError, with what it needs.
        Operator workspaces, the inputs and the Python process are not in the plan: leave room for them.
        """
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
            raise ConfigError(
                f"set_memory_budget({nbytes!r}): give the bytes that one rank may have, an int of 1 or more, such as "
                "20 * 2**30, or None for no budget"
            )
        self._memory_budget = nbytes

    def set_optimizer_in_backward(self, mode: bool = True) -> None:
        """Step each parameter while backward runs, as soon as its gradient is complete and its old value read.

        Gradients are then not all held until backward ends: up to four bytes less a parameter, and the same bits.
        What the update needs of all gradients first (clip_grad_norm) it still waits for; ``plan.decisions`` says so.
        A step that fails within backward has then changed some parameters.
        """
        self._optimizer_in_backward = _yes_or_no(mode, "set_optimizer_in_backward")

    def set_arena(self, mode: bool) -> None:
        """Whether large temporaries of a step lie at planned places of one buffer that stays; True by default.

        It is so on a CPU with executor "eager": a step then asks the kernel for no memory.  The buffer is what the step
        needs of such values at its worst moment, and held between calls; the plan says it, "arena".  Where the step's
        peak would rise by more than a twentieth, a tenth of the buffer, or over the memory budget, less is put there,
        or nothing.
        """
        self._arena = _yes_or_no(mode, "set_arena")

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
        """Mixed precision.  Not in this version: only ``mode=False`` is accepted."""
        if mode:
            raise ConfigError(
                f"enable_amp(dtype={dtype}): mixed precision of the whole step comes in a later version; until then "
                "write `with torch.autocast(...)` around the forward part inside build, or call model.to(dtype)"
            )

    def set_gradient_accumulation_steps(self, n: int) -> None:
        """Cut each rank's share of the batch in ``n`` micro-batches.  Not in this version: only 1 is accepted."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"set_gradient_accumulation_steps({n!r}): give the number of micro-batches, 1 or more")
        if n > 1:
            raise ConfigError(
                f"set_gradient_accumulation_steps({n}): gradient accumulation comes in a later version; until then "
                f"use more ranks, or write the loop inside build: x.chunk({n}), and loss / {n} for each backward"
            )

    def set_executor(self, name: str) -> None:
        """How programs run: "eager", op by op, the reference; or "inductor", compute between collectives compiled.

        torch's Inductor compiles at the first call, which takes seconds; it keeps the result on disk for the next
        process.  Losses are those of "eager" but for rounding.  The plan, which is of "eager", may be off.
        """
        if name not in EXECUTORS:
            raise ConfigError(f"set_executor({name!r}): {choices(EXECUTORS)}")
        self._executor = name

    def set_cuda_graph(self, mode: bool = True) -> None:
        """Record the step in a CUDA graph and replay it: a call then launches once, not once for each kernel.

        The first calls run op by op; the third one records.  Learning rates and other numbers that change are then read
        from memory where the op that takes them can; ``repr`` of the Graph says how it runs, and a warning why it does
        not replay.  Needs a GPU, and one process: a placement of one rank, or a virtual one.
        """
        self._cuda_graph = _yes_or_no(mode, "set_cuda_graph")

    def set_matmul(self, name: str) -> None:
        """What computes float32 matrix products on a CPU: "default", torch's own kernels, "onednn" or "fastest".

        Before the program first runs, the first rank tries both on each distinct product.  Those for which oneDNN
        rounds more coarsely than torch stay with torch, and so do, under "fastest", those for which it is not faster;
        a warning gives the figures.  "fastest" may choose differently from process to process, and so round.
        """
        if name not in MATMULS:
            raise ConfigError(f"set_matmul({name!r}): {choices(MATMULS)}")
        self._matmul = name

    def set_input(self, name: str, *, sbp: Sbp | tuple[Sbp, ...]) -> None:
        """Say how one input of build lies on the ranks, instead of split along dim 0.

        name: as in the program, ``x`` or ``batch.input_ids``.  sbp: one per placement axis, or one for all of a 1-d
        placement: ``gz.sbp.B`` for class weights, ``gz.sbp.S(1)`` for a batch in dim 1.
        """
        if not isinstance(name, str):
            raise ConfigError(f"set_input({name!r}, ...): give the input's name in build, a text")
        nd = (sbp,) if isinstance(sbp, Sbp) else tuple(sbp) if isinstance(sbp, (tuple, list)) else (sbp,)
        count = len(self._placement.names)
        if not all(isinstance(item, Sbp) for item in nd):
            raise ConfigError(f"set_input({name!r}, sbp={sbp!r}): write gz.sbp.B, gz.sbp.S(0) or gz.sbp.P")
        if len(nd) != count:
            raise ConfigError(
                f"set_input({name!r}, sbp={sbp!r}): {self._placement!r} has {count} axes "
                f"({', '.join(self._placement.names)}); give one SBP for each, a tuple of {count}"
            )
        self._inputs[name] = nd

    def set_links(self, links: Mapping[str, Link] | str | os.PathLike[str] | None) -> None:
        """Say what communication costs on each placement axis: boxing then takes the ways of fewest seconds, not bytes.

        links: a ``gz.Link`` for each axis by name, or a dict of its two numbers; or the path of the file that
        ``graphzero calibrate`` wrote, which every rank reads.  None, the default: all axes are alike and bytes decide.
        """
        self._links = links_of(links, self._placement) if links is not None else ()

    @property
    def check_inputs(self) -> str:
        """When ranks agree on the program: "always", before every call, or "first", before calls that compile or bind;
        of the others then only the program's hash is compared.

        Inputs that several ranks are said to be given alike (0-d tensors, those that are B, a batch along the axes that
        do not split it) are compared too: up to 16 elements on the CPU whenever ranks agree, larger ones in the first
        two calls of a program, and in every call under "values", which reads them all, and waits for a GPU.
        """
        return self._check_inputs

    @check_inputs.setter
    def check_inputs(self, when: str) -> None:
        if when not in CHECKS:
            raise ConfigError(f"check_inputs = {when!r}: {choices(CHECKS)}")
        self._check_inputs = when

    @property
    def check_values(self) -> bool:
        """Whether conditions that build only raises on (assert, torch._check) are checked in every step; True.

        A step whose check is not met raises CheckError on every rank, before it has changed anything.  A check is a
        transfer of one truth between the ranks, and on a GPU a wait for it; False leaves all of them out.
        """
        return self._check_values

    @check_values.setter
    def check_values(self, mode: bool) -> None:
        self._check_values = _yes_or_no(mode, "check_values")

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes that one bucket of collectives holds at most; a larger value is a bucket of its own.

        None, the default, is an eighth of the parameters' bytes, within 64 KiB and 4 MiB.
        """
        return self._bucket_bytes

    @bucket_bytes.setter
    def bucket_bytes(self, size: int | None) -> None:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"bucket_bytes = {size!r}: give a number of bytes, 1 or more, or None for the default")
        self._bucket_bytes = size

    @property
    def max_programs(self) -> int | None:
        """How many compiled programs the Graph keeps; beyond that it lets go of those used longest ago, 64 by default.

        A call that needs one of these again compiles it anew.  None is for no bound.
        """
        return self._max_programs

    @max_programs.setter
    def max_programs(self, count: int | None) -> None:
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"max_programs = {count!r}: give a number of programs, 1 or more, or None for no bound")
        self._max_programs = count

    def add_pass(self, pass_: Callable[[Any], Any], *, after: str = "zero") -> None:
        """Run a pass of your own behind the one named ``after``: a built-in one, or one added before."""
        check_pass(pass_)
        known = (*NAMES, *(pass_name(own) for own, _ in self._passes))
        if after not in known:
            raise ConfigError(f"add_pass({pass_name(pass_)}, after={after!r}): no pass has that name; {choices(known)}")
        self._passes.append((pass_, after))

    # ---- what the rest of graphzero reads

    @property
    def zero(self) -> ZeroConfig:
        """Stage, axes, shard_min_size and keep_gathered as ``enable_zero`` left them; stage 0 without it."""
        return self._zero

    @property
    def memory_budget(self) -> int | None:
        """The bytes that ``set_memory_budget`` was given; None without it."""
        return self._memory_budget

    @property
    def optimizer_in_backward(self) -> bool:
        """What ``set_optimizer_in_backward`` was given; False without it."""
        return self._optimizer_in_backward

    @property
    def arena(self) -> bool:
        """What ``set_arena`` was given; True without it."""
        return self._arena

    @property
    def executor(self) -> str:
        """The name that ``set_executor`` was given; "eager" without it."""
        return self._executor

    @property
    def cuda_graph(self) -> bool:
        """What ``set_cuda_graph`` was given; False without it."""
        return self._cuda_graph

    @property
    def matmul(self) -> str:
        """The name that ``set_matmul`` was given; "default" without it."""
        return self._matmul

    @property
    def links(self) -> Links:
        """One Link per placement axis, outermost first, as ``set_links`` left them; () without it."""
        return self._links

    @property
    def inputs(self) -> dict[str, Nd]:
        """SBP of the inputs that set_input named."""
        return dict(self._inputs)

    @property
    def user_passes(self) -> tuple[tuple[Any, str], ...]:
        """(pass, name of the pass it follows), in the order they were added."""
        return tuple(self._passes)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for configurations that compile to the same program; hashable.

        A pass counts by identity: the same object is the same pass, and it is expected not to change.
        """
        inputs = tuple(sorted((name, tuple(map(str, nd))) for name, nd in self._inputs.items()))
        passes = tuple((id(own), pass_name(own), after) for own, after in self._passes)
        memory = self._memory_budget, self._bucket_bytes, self._optimizer_in_backward, self._arena
        checks = self._check_values
        return self._zero, memory, checks, self._executor, self._cuda_graph, self._matmul, self._links, inputs, passes

    @property
    def description(self) -> str:
        """The fingerprint as text that is the same in every process."""
        return repr(self)

    def __setattr__(self, name: str, held: Any) -> None:
        settable = [n for n, p in vars(type(self)).items() if isinstance(p, property) and p.fset is not None]
        if not name.startswith("_") and name not in settable:
            raise ConfigError(
                f"config.{name} = {held!r}: there is no such setting; settings are made by enable_zero(...), "
                "set_memory_budget(...), set_optimizer_in_backward(...), set_arena(...), set_input(...), "
                "set_links(...), add_pass(...), set_executor(...), set_cuda_graph(...), set_matmul(...), and the "
                f"attributes {', '.join(settable)}"
            )
        super().__setattr__(name, held)

    def __repr__(self) -> str:
        zero = self._zero
        parts = [f"zero=stage {zero.stage}"]
        if zero.stage:
            parts[0] += f" over {', '.join(zero.axes)}"
        if zero.shard_min_size != 1:
            parts.append(f"shard_min_size={zero.shard_min_size}")
        if zero.keep_gathered:
            parts.append(f"keep_gathered={'True' if zero.keep_gathered == ALL else zero.keep_gathered}")
        settings: list[tuple[str, Any, Any]] = [  # name, what it is, what need not be said
            ("memory_budget", self._memory_budget, None),
            ("optimizer_in_backward", self._optimizer_in_backward, False),
            ("arena", self._arena, True),
            ("executor", self._executor, None),
            ("cuda_graph", self._cuda_graph, False),
            ("matmul", self._matmul, "default"),
            ("check_inputs", self._check_inputs, "always"),
            ("check_values", self._check_values, True),
            ("bucket_bytes", self._bucket_bytes, None),
            ("max_programs", self._max_programs, MAX_PROGRAMS),
        ]
        parts += [f"{name}={held}" for name, held, default in settings if held != default]
        named = zip(self._placement.names, self._links, strict=bool(self._links))
        parts += [f"{name}={link!r}" for name, link in named]
        parts += [f"{name}: {', '.join(map(str, nd))}" for name, nd in self._inputs.items()]
        parts += [f"{pass_name(own)} after {after}" for own, after in self._passes]
        return f"GraphConfig({', '.join(parts)})"


def _yes_or_no(mode: Any, where: str) -> bool:
    if not isinstance(mode, bool):
        raise ConfigError(f"{where}({mode!r}): say True or False")
    return mode
