"""The real tensors behind a program's roles: watched before each call, kept true after it.

Parameters and buffers live in the user's modules, states in ``optimizer.state``, hyperparameters in
``param_groups``; this module never keeps a second truth.  How a program gets them is ``binding``'s, which program
runs is ``step``'s.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphzero import _compat
from graphzero.ir.value import Role, StateSpec
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state import partial_update
from graphzero.runtime.state.first_rank import FirstValues, decisions_of, follow
from graphzero.runtime.state.layout import check_real
from graphzero.runtime.state.modules import Holder, ModuleTensor
from graphzero.runtime.state.mutation_watch import ModulesWatch, StatesWatch
from graphzero.runtime.state.placement_checks import check_held
from graphzero.runtime.state.seed import RandomStream
from graphzero.runtime.state.tensor_ref import TensorRef
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.runtime.world.consensus import Ranks
from graphzero.runtime.world.world import World, check_device
from graphzero.sbp.dtensor import annotation, annotation_count
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd


@dataclass
class StepCounter:
    """A 0-d state that a program keeps once: its tensor, and the user's copies, one per parameter.

    copies: one tensor; what the user holds are its elements, ``own``, so that one write sets all.
    """

    tensor: Tensor
    copies: Tensor
    own: Sequence[Tensor]

    def flush(self) -> None:
        self.copies.copy_(self.tensor)


@dataclass
class Binding:
    """Tensors that are bound to a program: counters, and pieces that are not views.

    copies: (view of the whole tensor, piece) where a rank's tensor is not a view; written: those that a step writes.
    states: of (optimizer, path), the parameter, its dict in optimizer.state, and the keys that are bound.
    created: (optimizer, parameter, key, tensor) of each state that the step creates.
    entries: parameters and buffers by path; params: the former.  holder: the executor that keeps them.
    """

    counters: list[StepCounter] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    states: dict[tuple[int, str], tuple[Tensor, dict[str, Any], list[str]]] = field(default_factory=dict)
    created: list[tuple[Optimizer, Tensor, str, Tensor]] = field(default_factory=list)
    entries: Mapping[str, ModuleTensor] = field(default_factory=dict)
    params: list[Tensor] = field(default_factory=list)
    watch: StatesWatch | None = None
    holder: Holder | None = None

    def add(self, spec: StateSpec, param: Tensor, state: dict[str, Any]) -> None:
        self.states.setdefault((spec.optimizer, spec.param), (param, state, []))[2].append(spec.key)

    def is_unchanged(self) -> bool:
        """Return whether the states are the same, where they were, and the program still has everything."""
        return self.watch is not None and self.holder is not None and self.holder.is_bound and self.watch.is_unchanged()


@dataclass(frozen=True)
class Moved:
    """A parameter or buffer that a program has laid out: ``tensor`` is what the user holds now, as ``after`` says.

    Until then it lay as ``before`` says, in a plain tensor if ``was_plain``.
    """

    tensor: TensorRef
    was_plain: bool
    before: Nd
    after: Nd


class State:
    """The tensors of one Graph.

    world: makes the world, for which all ranks are needed: they have agreed on it before ``world`` is read.
    placement: the ranks of a program; ``ranks`` has those of all stages.
    modules: attribute -> module.  optimizers: as add_optimizer was called.
    random: the stream of draws.  moved: what programs have made lie otherwise than the user has placed it.
    counters: by the states that each counts for.  program: which one's state is bound, and as it was left; or None.
    apart: graph -> where all tensors lay when nothing that it writes overlapped.
    """

    def __init__(
        self, world: Callable[[], World], placement: Placement, ranks: Ranks, modules: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
    ):  # fmt: skip
        self.placement, self._make_world = placement, world
        self.ranks, self.modules, self.optimizers = ranks, modules, optimizers
        self.random = RandomStream()
        self.moved: dict[str, Moved] = {}  # by path
        self.counters: dict[tuple[Any, ...], StepCounter] = {}
        self.program: object = None
        self.apart: WeakKeyDictionary[object, list[Any]] = WeakKeyDictionary()
        self._binding: Binding | None = None
        self._stateless: str | None = None  # see ``stateless``; None: look
        self._nds: tuple[Mapping[str, ModuleTensor], int, tuple[Nd, ...]] | None = None
        self._watch: ModulesWatch | None = None
        self._entries: dict[str, ModuleTensor] = {}
        self.is_started = False

    @cached_property
    def world(self) -> World:
        return self._make_world()

    @cached_property
    def first_values(self) -> FirstValues:
        return FirstValues(self.world.device, self.ranks.placement)

    def take_over(self, other: State) -> None:
        """Go on as ``other``, of whose tensors this one's are copies, or which they are."""
        here, there = self.tensors(), other.tensors()
        self.random = copy.copy(other.random)
        self.moved = {
            path: replace(moved, tensor=TensorRef(here[path].tensor))
            for path, moved in other.moved.items()
            if path in here and path in there and moved.tensor.is_of(there[path].tensor)
        }
        why = other.partial_update_reason()
        if why:
            self.mark_partial_update(why)

    def ensure_world(self) -> None:
        """Have a world from here on.  Every rank calls it."""
        assert self.world is not None

    @property
    def under_way(self) -> str:
        """See ``World.under_way``."""
        return self.world.under_way if "world" in vars(self) else ""

    # ---- what there is

    def tensors(self) -> dict[str, ModuleTensor]:
        """Parameters and buffers by path; the same object as long as nothing has changed."""
        if self._watch is None or not self._watch.is_unchanged():
            self._entries = tree.tensors(self.modules)
            self._watch = ModulesWatch(self.modules, self._entries)
        return self._entries

    def nd_of(self, tensor: Tensor) -> Nd:
        """SBP in which the user has placed a parameter or buffer: that of a DTensor or an annotated tensor, else B."""
        if isinstance(tensor, DTensor):
            return nd_on(tensor, self.placement, "a parameter or buffer")
        known = annotation(tensor)
        if known is not None and known[0] == self.placement:
            return known[1]
        return (B,) * len(self.placement.names)

    def given(self, entry: ModuleTensor) -> Nd:
        """SBP of a parameter or buffer before ZeRO moved it, from which a program for another configuration begins."""
        check_held(entry, self.placement)
        nd, moved = self.nd_of(entry.tensor), self.moved.get(entry.path)
        return moved.before if moved is not None and moved.tensor.is_of(entry.tensor) and moved.after == nd else nd

    def given_nds(self, entries: Mapping[str, ModuleTensor]) -> tuple[Nd, ...]:
        """``given`` of all parameters and buffers; looked up again when a tensor, or an annotation, has changed."""
        count = annotation_count()
        if self._nds is None or self._nds[0] is not entries or self._nds[1] != count:
            self._nds = entries, count, tuple(map(self.given, entries.values()))
        return self._nds[2]

    def placed(self, entries: Mapping[str, ModuleTensor], specs: Sequence[StateSpec]) -> dict[Role, Nd]:
        """SBP of parameters, buffers and states before ZeRO moves any; a parameter's states lie as it does."""
        placed = {Role(entry.kind, path): self.given(entry) for path, entry in entries.items()}
        for spec in specs:
            param = entries[spec.param]
            if spec.shape and spec.shape == tuple(param.tensor.shape):
                placed[Role("state", spec.param, spec.key)] = placed[Role("param", spec.param)]
        return placed

    # ---- the first call

    def check_real(self) -> None:
        """Raise ConfigError for a parameter or buffer without values, PlacementError for a device that is not there."""
        check_device(self.placement)
        for entry in self.tensors().values():
            check_real(entry.tensor, f"{entry.kind} {entry.path}")

    def start(self, schedulers: Sequence[Any] = ()) -> None:
        """Once per Graph: hyperparameters, a loaded seed and the list of existing states are rank 0's.  Every rank
        calls it.

        So are the numbers that schedulers go by, ``base_lrs`` and ``last_epoch``.
        """
        if self.is_started:
            return
        names = tree.paths_by_id(self.tensors())
        (seed, step), theirs = self.ranks.share(
            lambda: ((self.random.seed, self.random.step), decisions_of(self.optimizers, schedulers, names))
        )
        self.random.set(seed, step)
        self.is_started = True
        if self.ranks.active:
            follow(theirs, self.optimizers, schedulers, names)

    # ---- what is bound

    def invalidate(self) -> None:
        """Bind again at the next call: other code has replaced or rewritten tensors."""
        self._binding = self._stateless = self.program = None

    def forget(self) -> None:
        """Forget the watch of modules and the SBPs; nothing is bound any more."""
        self.invalidate()
        self._watch = self._nds = None

    def set_binding(self, binding: Binding) -> None:
        """``binding`` is what a program reads and writes, when ``finish_binding`` has been called."""
        self._binding, self.program = binding, None

    def finish_binding(self, program: object, holder: Holder) -> None:
        """Take what is bound for ``program`` as true: from here on another tensor, or another storage, is a change.

        holder: keeps what is bound.
        """
        tree.register_holder(holder)
        binding, self._stateless = self._binding, None
        assert binding is not None
        binding.entries = self.tensors()
        binding.params = [entry.tensor for entry in binding.entries.values() if entry.kind == "param"]
        binding.watch = StatesWatch(self.optimizers, binding.states, [counter.copies for counter in binding.counters])
        binding.holder, self.program = holder, program

    # ---- values of no whole number of steps

    def mark_partial_update(self, why: str, paths: Container[str] | None = None) -> None:
        """Mark what a step, or a load, writes as partly updated.  paths: of the parameters and buffers; all if None.

        A buffer that no state dict has is left out: none could bring it back.
        """
        written = [entry for path, entry in self.tensors().items() if paths is None or path in paths]
        partial_update.mark((entry.tensor for entry in written if _compat.is_saved(*entry.places[0])), why)
        partial_update.mark(self._states(), why)

    def partial_update_reason(self) -> str:
        """Reason of the first tensor that is marked as partly updated; empty without one."""
        if not partial_update.is_any_marked():
            return ""
        tensors = chain((entry.tensor for entry in self.tensors().values()), self._states())
        return next(filter(None, map(partial_update.reason_of, tensors)), "")

    def _states(self) -> Iterator[Tensor]:
        """The tensors in optimizers' states of parameters of this Graph."""
        ours = {id(entry.tensor) for entry in self.tensors().values()}
        for optimizer in self.optimizers:
            for param, states in optimizer.state.items():
                if id(param) in ours:
                    yield from (x for x in states.values() if isinstance(x, Tensor))

    # ---- every call

    def check_binding(self) -> tuple[dict[str, ModuleTensor], bool]:
        """``tensors()``, and whether what is bound is as it was left: nothing has put other tensors in place of bound
        ones, or written to a step counter.  If it is not, nothing is bound any more."""
        entries, binding = self.tensors(), self._binding
        is_whole = binding is not None and binding.entries is entries and binding.is_unchanged()
        if not is_whole:
            self.invalidate()
        return entries, is_whole

    def read_pieces(self) -> None:
        """Read pieces that are not views from the whole tensors."""
        if self._binding is not None and self._binding.copies:
            torch._foreach_copy_(
                [piece for _, piece in self._binding.copies], [place for place, _ in self._binding.copies]
            )

    def write_back(self, training: bool, drew: bool) -> None:
        """Make the user's tensors true: pieces written back, counters, gradients gone; count the step."""
        binding = self._binding
        assert binding is not None and binding.watch is not None
        if training:
            deque(map(setattr, binding.params, repeat("grad"), repeat(None)), maxlen=0)
            for counter in binding.counters:
                counter.flush()
            binding.watch.accept_counters()
        if binding.written:
            torch._foreach_copy_([place for place, _ in binding.written], [piece for _, piece in binding.written])
        for optimizer, param, key, new_state in binding.created:
            optimizer.state[param][key] = new_state
        if binding.created:
            self.invalidate()  # the next step is another: it finds this state
        self.random.step += training or drew

    def has_state(self, optimizer: int, path: str) -> bool:
        """Return whether an optimizer holds state of a parameter, one of ``tensors()`` when that was called last."""
        states = self.optimizers[optimizer].state.get(self._entries[path].tensor, {})
        return any(isinstance(x, Tensor) and not x.is_meta for x in states.values())

    def stateless(self) -> str:
        """The parameters for which an optimizer holds no state: ranks must agree on them."""
        if self._stateless is None:
            names = tree.paths_by_id(self._entries)
            params = [
                (i, names.get(id(p), ""))
                for i, o in enumerate(self.optimizers)
                for g in o.param_groups
                for p in g["params"]
            ]
            without = (f"optimizer {i}: {path}" for i, path in params if path and not self.has_state(i, path))
            self._stateless = ", ".join(without)
        return self._stateless

    def counter_layout(self, names: Mapping[int, str]) -> tuple[Any, ...]:
        """Groups of parameters whose 0-d states differ within a parameter group; () while all are equal. Capture
        depends on it."""
        odd = []
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                counts_by_key: dict[str, dict[str, float]] = {}
                for param in group["params"]:
                    for key, x in optimizer.state.get(param, {}).items():
                        if isinstance(x, Tensor) and not (x.dim() or x.is_meta) and (param.dim() or key == "step"):
                            counts_by_key.setdefault(key, {})[names.get(id(param), "")] = float(x)
                for key, by_name in counts_by_key.items():
                    classes = {number: at for at, number in enumerate(dict.fromkeys(by_name.values()))}
                    if len(classes) > 1:
                        odd.append((i, j, key, tuple((name, classes[number]) for name, number in by_name.items())))
        return tuple(odd)
