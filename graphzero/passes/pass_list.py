"""The list of passes: their order, the level each runs on, and the condition under which it is there.

``default_passes`` returns all passes, those up to one, or those that remain; nothing else lists or cuts them.  The
search for options is in ``graphzero.plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from graphzero.extensions import PASSES, SETTINGS, Extension, extensions
from graphzero.ir.value import Role
from graphzero.passes.base import Group, Pass, pass_name, snake_case
from graphzero.passes.boxing.insert_boxing import InsertBoxing
from graphzero.passes.boxing.localize import Localize
from graphzero.passes.boxing.lower_boxing import LowerBoxing
from graphzero.passes.memory.dead_code import DeadCode
from graphzero.passes.memory.delay_gradients import DelayGradients
from graphzero.passes.memory.in_place import InPlace
from graphzero.passes.memory.keep_gathered import KeepGathered
from graphzero.passes.memory.recompute import Recompute
from graphzero.passes.micro.count_targets import CountTargets
from graphzero.passes.micro.micro_batches import MicroBatches
from graphzero.passes.place.cast_before_gather import CastBeforeGather
from graphzero.passes.place.expand import Expand
from graphzero.passes.place.pin import Pin
from graphzero.passes.place.propagate import Propagate
from graphzero.passes.place.zero import Zero
from graphzero.passes.schedule.assign import Assign
from graphzero.passes.schedule.bucket import Bucket
from graphzero.passes.schedule.copy_old import CopyOld
from graphzero.passes.schedule.gather_casts import GatherCasts
from graphzero.passes.schedule.launch import Launch
from graphzero.passes.schedule.offload_activations import OffloadActivations
from graphzero.passes.schedule.offload_states import OffloadStates
from graphzero.passes.schedule.optimizer_in_backward import OptimizerInBackward
from graphzero.passes.schedule.overlap import Overlap, OverlapUpdate
from graphzero.passes.schedule.slots import Slots
from graphzero.passes.stages.assign_stages import AssignStages
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import Nd


@dataclass(frozen=True)
class Options:
    """Options of the built-in passes: a pass gets those for which it has a field of the same name.

    placed: role of a placeholder -> its SBP, where the user said; see ``Pin``.
    stage: of ZeRO; 0 for none.
    shard_min_size, axis: see ``Zero``.
    masters: whether parameters are masters of 16-bit casts, which forward reads.
    optimizer_in_backward: whether the optimizer steps a parameter while backward runs.
    links: what communication costs on each placement axis, outermost first; () where bytes decide.
    recompute: names and patterns of values of forward that are computed again in backward.
    keep_gathered: where forward gathers parameters, names and patterns of those that stay gathered until backward has
        read them; None leaves the pass out.
    delay_gradients: whether what backward makes may wait, to lower the most bytes held at a time.
    pipeline_stages: marks of modules, "model.layers.0@1"; see ``AssignStages``.
    micro_batches: in which a step computes the batch; the placement has an axis ``mb`` of that size.
    whole_accumulators, whole_on: see ``MicroBatches``.
    offload_states: whether optimizer states are in host memory.
    offload_activations: names and patterns of values of forward that wait in host memory for backward.
    bucket_bytes: of one bucket, and of what is under way at a time; None follows the size of the model.
    cuda_graph: whether the step is recorded in a CUDA graph, in which no check can stop it.
    plugins: values of plug-ins' settings that are not as by default, by name.
    optimise: whether passes are there that a program also runs without, only with more memory or time.
    """

    placed: Mapping[Role, Nd] = field(default_factory=dict)
    stage: int = 0
    shard_min_size: int = 1
    axis: tuple[str, ...] | None = None
    masters: bool = False
    optimizer_in_backward: bool = False
    links: Links = ()
    recompute: tuple[str, ...] = ()
    keep_gathered: tuple[str, ...] | None = None
    delay_gradients: bool = False
    pipeline_stages: tuple[str, ...] = ()
    micro_batches: int = 1
    whole_accumulators: bool = False
    whole_on: tuple[int, ...] = ()
    offload_states: bool = False
    offload_activations: tuple[str, ...] = ()
    bucket_bytes: int | None = None
    cuda_graph: bool = False
    optimise: bool = True
    plugins: Mapping[str, Any] = field(default_factory=dict, metadata={"in_text": False})

    @property
    def gathers(self) -> bool:
        """Whether parameters are split between steps, so that forward gathers them."""
        return self.stage == 3 or (self.masters and self.stage > 0)

    @property
    def adds_up(self) -> bool:
        """Whether what is a sum over the batch is added up part by part."""
        return any(entry.adds_up and entry.is_there(self) for entry in pass_entries())


@dataclass(frozen=True)
class PassEntry:
    """One entry of the list of passes.

    kind: a dataclass that is called with a graph; its name in snake case is the pass's.
    level: of the graphs that it runs on.  when: the options with which it is there.  group: what it and the passes
    next to it also go by, one of ``GROUPS``.
    after: of a plug-in's pass, the name of the pass that it follows: one of its group, or what is right before that.
    adds_up: whether it computes the batch in parts, over which sums over the batch are added up.
    """

    kind: type[Pass]
    level: str
    when: Callable[[Options], bool] = field(default=lambda options: True, repr=False)
    group: str = ""
    after: str = ""
    adds_up: bool = False

    @property
    def name(self) -> str:
        """The pass's."""
        return snake_case(self.kind.__name__)

    def is_there(self, options: Options) -> bool:
        """Whether the pass is in the list, by ``when``."""
        with self._named_errors():
            return bool(self.when(options))

    def create_pass(self, options: Options) -> Pass:
        """The pass with those of the options, and of the values of plug-ins' settings, that it has a field for.

        A field has the name of the option, or that name as ``setting`` in its metadata.
        """
        values = {one.name: getattr(options, one.name) for one in fields(options)} | dict(options.plugins)
        own: Any = self.kind
        with self._named_errors():
            pass_: Pass = own(**{field: values[name] for field, name in _settings(own).items() if name in values})
        return pass_

    def _named_errors(self) -> AbstractContextManager[None]:
        plugin = extensions(PASSES).get(self.name)
        return nullcontext() if plugin is None else plugin.name_errors()


def _settings(kind: Any) -> dict[str, str]:
    """Field of a pass -> the name of the option, or of the setting, whose value it is given."""
    return {one.name: one.metadata.get("setting", one.name) for one in fields(kind)}


BUILT_IN: tuple[PassEntry, ...] = (
    PassEntry(Pin, "captured"),
    PassEntry(Zero, "captured", lambda options: options.stage > 0),
    PassEntry(CastBeforeGather, "captured", lambda options: options.masters),
    PassEntry(CountTargets, "captured", lambda options: options.adds_up),
    PassEntry(AssignStages, "captured", lambda options: bool(options.pipeline_stages)),
    PassEntry(Expand, "captured"),
    PassEntry(Propagate, "captured"),
    PassEntry(InsertBoxing, "propagated"),
    PassEntry(MicroBatches, "boxed", lambda options: options.micro_batches > 1, adds_up=True),
    PassEntry(LowerBoxing, "boxed"),
    PassEntry(Localize, "lowered"),
    PassEntry(Recompute, "local", lambda options: bool(options.recompute)),
    PassEntry(KeepGathered, "local", lambda options: options.gathers and options.keep_gathered is not None),
    PassEntry(DelayGradients, "local", lambda options: options.delay_gradients),
    PassEntry(GatherCasts, "local", lambda options: options.optimise and options.masters),
    PassEntry(Bucket, "local"),
    PassEntry(Launch, "local", group="schedule"),
    PassEntry(Overlap, "local", group="schedule"),
    PassEntry(OptimizerInBackward, "local", lambda options: options.optimizer_in_backward, "schedule"),
    PassEntry(OverlapUpdate, "local", group="schedule"),
    PassEntry(CopyOld, "local", group="schedule"),
    PassEntry(Assign, "local", group="schedule"),
    PassEntry(Slots, "local", group="schedule"),
    PassEntry(DeadCode, "local"),
    PassEntry(OffloadStates, "local", lambda options: options.offload_states),
    PassEntry(OffloadActivations, "local", lambda options: bool(options.offload_activations)),
    PassEntry(InPlace, "local", lambda options: options.optimise),
)


@cache
def pass_entries() -> tuple[PassEntry, ...]:
    """The list with the passes of plug-ins in their places.  Raises ConfigError for a plug-in without a place."""
    entries, waiting = list(BUILT_IN), dict(extensions(PASSES))
    while waiting:
        placed = [name for name, plugin in waiting.items() if _insert_entry(entries, plugin)]
        if not placed:
            plugin = next(iter(waiting.values()))
            names = ", ".join((*(entry.name for entry in entries), *GROUPS))
            raise plugin.refusal(f"follows {plugin.load().after!r}, and no pass has that name; they are {names}")
        for name in placed:
            del waiting[name]
    return tuple(entries)


def _insert_entry(entries: list[PassEntry], plugin: Extension) -> bool:
    """Put a plug-in's pass after the pass that it follows, if that is there."""
    entry = plugin.load()
    if not isinstance(entry, PassEntry) or not isinstance(entry.kind, type) or not is_dataclass(entry.kind):
        raise plugin.refusal("is not a pass: give a graphzero.passes.PassEntry of a dataclass")
    if not any("__call__" in vars(base) for base in entry.kind.__mro__):
        raise plugin.refusal("is not a pass: objects of its dataclass cannot be called with a graph")
    if required := [one.name for one in fields(entry.kind) if one.default is MISSING is one.default_factory]:
        raise plugin.refusal(f"has a pass whose field {required[0]!r} has no default, which it needs where none is set")
    if entry.name != plugin.name or any(entry.name in (other.name, other.group) for other in entries):
        raise plugin.refusal(f"has a pass called {entry.name!r}: that is the name of another pass, or not its own")
    known = {*extensions(SETTINGS), *(one.name for one in fields(Options))}
    if unknown := {setting for field, setting in _settings(entry.kind).items() if setting != field} - known:
        raise plugin.refusal(f"has a field of the setting {min(unknown)!r}, which no plug-in has")
    if entry.group and entry.group not in GROUPS:
        raise plugin.refusal(f"has a pass in the group {entry.group!r}; groups are {', '.join(GROUPS)}")
    followed = [i for i, other in enumerate(entries) if entry.after in (other.name, other.group)]
    if not followed or not entry.after:
        return False
    grouped = [i for i, other in enumerate(entries) if entry.group and other.group == entry.group]
    at, group = followed[-1] + 1, entry.group if grouped else ""
    if grouped and followed[-1] not in grouped:
        if at > grouped[0] or any(not other.after for other in entries[at : grouped[0]]):
            begin = next(other.name for other in reversed(entries[: grouped[0]]) if not other.after)
            members = ", ".join(entries[i].name for i in grouped)
            raise plugin.refusal(
                f"has a pass in the group {entry.group!r} that follows {entry.after!r}, which is neither of the group "
                f"nor right before it: give after= one of {begin}, {members}, or leave group= out"
            )
        at = grouped[0]
    while at < len(entries) and entries[at].after == entry.after and entries[at].group == group:
        at += 1
    level = level_after(entries, at - 1)
    if entry.level != level:
        raise plugin.refusal(f"runs on {entry.level!r} graphs, and after {entry.after} they are {level!r}")
    entries.insert(at, entry)
    return True


def pass_names() -> tuple[str, ...]:
    """The names of all passes, in order."""
    return tuple(entry.name for entry in pass_entries())


@dataclass(frozen=True)
class Fuse(Group):
    """Several ops become one that computes the same, in less memory or time: passes of plug-ins, after ``localize``.

    Changes no value, but for the rounding of Adam's update and the sign of zeros.  Sizes in arguments are this rank's
    by now: an op that is still ATen's sees the dims that it works on whole.
    """

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes in order."""
        return _group("fuse", Options())


@dataclass(frozen=True)
class Schedule(Group):
    """Orders the program in time; it changes no value.

    bucket_bytes: of whole values under way at a time; by default what ``Bucket`` takes for a bucket.
    optimizer_in_backward: whether the optimizer steps a parameter while backward runs, as soon as its gradient is
        there.
    """

    bucket_bytes: int | None = None
    optimizer_in_backward: bool = False

    def __post_init__(self) -> None:
        Overlap(self.bucket_bytes)  # which checks it

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes in order."""
        options = Options(bucket_bytes=self.bucket_bytes, optimizer_in_backward=self.optimizer_in_backward)
        return _group("schedule", options)


GROUPS: Mapping[str, type[Group]] = {"fuse": Fuse, "schedule": Schedule}


def _group(name: str, options: Options) -> tuple[Pass, ...]:
    return tuple(
        entry.create_pass(options) for entry in pass_entries() if entry.group == name and entry.is_there(options)
    )


def default_passes(
    options: Options | None = None, own: Sequence[tuple[Pass, str]] = (), *, since: str = "", until: str = ""
) -> list[Pass]:
    """The passes in order.

    options: by default plain data parallelism, stage 0.
    own: passes of the user's, each with the name of the pass that it follows, a built-in one or one above; where that
        is not there, it has the place that that would have.
    since, until: only those from the built-in pass of that name on, there or not, and only those before it.
    """
    options, left, passes = options or Options(), list(own), list[Pass]()
    last = {entry.group: entry for entry in pass_entries() if entry.group}
    for entry in pass_entries()[slice(_first(since) if since else None, _first(until) if until else None)]:
        passes += [entry.create_pass(options)] if entry.is_there(options) else []
        passes += _after(entry.name, left)
        passes += _after(entry.group, left) if last.get(entry.group) is entry else ()
    return passes


def _first(name: str) -> int:
    """The index of the first entry with a name."""
    return next(i for i, entry in enumerate(pass_entries()) if name in (entry.name, entry.group))


def _after(name: str, own: list[tuple[Pass, str]]) -> Iterator[Pass]:
    """The user's passes that follow the pass of that name, each with those that follow it; they are taken out."""
    for one in [one for one in own if one[1] == name]:
        if one in own:
            own.remove(one)
            yield one[0]
            yield from _after(pass_name(one[0]), own)


def first_on(level: str) -> str:
    """The name of the first pass that runs on graphs of that level."""
    return next(entry.name for entry in pass_entries() if entry.level == level)


def level_after(entries: Sequence[PassEntry], i: int) -> str:
    """The level of what pass number ``i`` returns: the last one of a level takes a graph on to the next."""
    return entries[min(i + 1, len(entries) - 1)].level
