"""The real tensors behind a program's roles: bound once, watched before each call, kept true after it.

Parameters and buffers live in the user's modules, states in ``optimizer.state``, hyperparameters in
``param_groups``; this module never keeps a second truth.  How one tensor is laid out is ``storage``'s, which
program runs is the Graph's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphzero.errors import CaptureError, ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role
from graphzero.runtime import modules as tree
from graphzero.runtime.agree import Ranks
from graphzero.runtime.bound import Bound, Counter, Spec
from graphzero.runtime.modules import Found
from graphzero.runtime.seed import Stream
from graphzero.runtime.storage import check_real, filled, lay_out
from graphzero.runtime.world import World, check_device
from graphzero.sbp.dtensor import annotation, annotation_count, nd_of_dtensor
from graphzero.sbp.types import B, Nd


class State:
    """The tensors of one Graph.

    modules: attribute -> module.  optimizers: as add_optimizer was called.
    random: the stream of draws.  moved: what programs have made lie otherwise than the user has placed it.
    """

    def __init__(self, world: World, ranks: Ranks, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]):
        self.world, self.ranks, self.modules, self.optimizers = world, ranks, modules, optimizers
        self.random = Stream()
        self.moved: dict[str, Moved] = {}  # by path
        self._bound: Bound | None = None
        self._synced: dict[str, weakref.ref[Tensor] | None] = {}  # what has rank 0's values, and in which tensor
        self._nds: tuple[tuple[Mapping[str, Found], int], tuple[Nd, ...]] | None = None
        self._seen: tuple[list[Any], dict[str, Found]] = ([], {})
        self.is_started = False

    # ---- what there is

    def tensors(self) -> dict[str, Found]:
        """Parameters and buffers by path; the same object as long as nothing has changed."""
        now = tree.snapshot(self.modules)
        if self._seen[0] != now:
            self._seen = (now, tree.tensors(self.modules))
        return self._seen[1]

    def nd_of(self, tensor: Tensor) -> Nd:
        """How the user has placed a parameter or buffer: a DTensor as it says, an annotated tensor likewise, else B."""
        if isinstance(tensor, DTensor):
            return nd_of_dtensor(tensor)
        known = annotation(tensor)
        if known is not None and known[0] == self.world.placement:
            return known[1]
        return (B,) * len(self.world.placement.names)

    def given(self, entry: Found) -> Nd:
        """How a parameter or buffer lay before ZeRO moved it: what a program for another configuration begins from."""
        nd, moved = self.nd_of(entry.tensor), self.moved.get(entry.path)
        return moved.before if moved is not None and moved.tensor() is entry.tensor and moved.after == nd else nd

    def nds(self, found: Mapping[str, Found]) -> tuple[Nd, ...]:
        """``given`` of all parameters and buffers; looked up anew when a tensor, or an annotation, has changed."""
        now = (found, annotation_count())
        if self._nds is None or self._nds[0][0] is not found or self._nds[0][1] != now[1]:
            self._nds = (now, tuple(map(self.given, found.values())))
        return self._nds[1]

    def placed(self, found: Mapping[str, Found], specs: Sequence[Spec]) -> dict[Role, Nd]:
        """SBP of parameters, buffers and states before ZeRO moves any; a parameter's states lie as it does."""
        placed = {Role(entry.kind, path): self.given(entry) for path, entry in found.items()}
        for spec in specs:
            param = found[spec.param]
            if spec.shape and spec.shape == tuple(param.tensor.shape):
                placed[Role("state", spec.param, spec.key)] = placed[Role("param", spec.param)]
        return placed

    # ---- the first call

    def check_real(self) -> None:
        """Raise ConfigError for a parameter or buffer without values, PlacementError for a device that is not there."""
        check_device(self.world.placement)
        for entry in self.tensors().values():
            check_real(entry.tensor, f"{entry.kind} {entry.path}")

    def start(self, schedulers: Sequence[Any] = ()) -> None:
        """Once per Graph: hyperparameters, a loaded seed and the list of existing states are rank 0's.  Every rank
        calls it.

        So are the numbers that schedulers go by, ``base_lrs`` and ``last_epoch``.
        """
        if self.is_started:
            return
        names = {id(entry.tensor): path for path, entry in self.tensors().items()}
        theirs = self.ranks.share(lambda: self._facts(names, schedulers))
        self.random.set(*theirs["random"])
        self.is_started = True
        if not self.ranks.active:
            return
        for optimizer, groups in zip(self.optimizers, theirs["groups"], strict=True):
            for group, changed in zip(optimizer.param_groups, groups, strict=True):
                group.update(changed)
        for scheduler, counts in zip(schedulers, theirs["schedulers"], strict=True):
            if scheduler is not None:
                vars(scheduler).update(counts)
        for i, optimizer in enumerate(self.optimizers):
            for param in [p for group in optimizer.param_groups for p in group["params"]]:
                _match_states(optimizer, param, theirs["states"].get((i, names[id(param)]), {}))

    def _facts(self, names: Mapping[int, str], schedulers: Sequence[Any]) -> dict[str, Any]:
        groups = [
            [{k: v for k, v in group.items() if k != "params" and _is_plain(v)} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        states = {}
        for i, optimizer in enumerate(self.optimizers):
            for param, held in optimizer.state.items():
                if id(param) in names:
                    states[i, names[id(param)]] = {
                        key: (x.dtype, tuple(x.shape), isinstance(x, DTensor))
                        for key, x in held.items()
                        if isinstance(x, Tensor)
                    }
        counts = [{k: v for k, v in vars(s).items() if _is_plain(v)} if s is not None else {} for s in schedulers]
        return {
            "random": (self.random.seed, self.random.step),
            "groups": groups,
            "states": states,
            "schedulers": counts,
        }

    # ---- binding

    def invalidate(self) -> None:
        """Bind anew at the next call: somebody has replaced or rewritten tensors."""
        self._bound = None

    def bind(
        self, graph: StepGraph, specs: Sequence[Spec], constants: Mapping[str, Tensor], found: Mapping[str, Found]
    ) -> dict[str, list[Tensor]]:
        """Lay out everything that ``graph`` keeps between calls; returns one tensor per local rank by placeholder.

        Every rank calls it for the same graph: at first sight of a plain tensor its values are taken from rank 0.
        """
        bound, values = Bound(), {}
        members: dict[str, list[Spec]] = {}
        for spec in specs:
            members.setdefault(spec.placeholder, []).append(spec)
        with torch.no_grad():
            for node in graph.placeholders("param", "buffer"):
                values[node.name] = self._bind_tensor(node, found[_role(node).of], bound)
            for node in graph.placeholders("state"):
                specs_here = members.get(node.name, [])
                if not specs_here:
                    raise CaptureError(f"nobody says how the optimizer state '{node.name}' begins")
                if len(specs_here) > 1 or _is_counter(found[specs_here[0].param].tensor, specs_here[0]):
                    values[node.name] = self._bind_counter(specs_here, found, bound)
                else:
                    values[node.name] = self._bind_state(node, specs_here[0], found, bound)
            for node in graph.placeholders("constant"):
                laid = lay_out(constants[node.name].to(self.world.device), value.nd_of(node), self.world, node.name)
                values[node.name] = laid.ranks
            for entry in found.values():  # those that the program does not read
                if not isinstance(entry.tensor, DTensor) and not entry.tensor.is_meta:
                    self._take(entry.tensor, entry.path)
        self._bound = bound
        return values

    def settle(self) -> None:
        """Take what is bound now as true: from here on any other tensor, or another storage, is a change."""
        assert self._bound is not None
        self._bound.found = self.tensors()
        self._bound.watched = self._bound.watch(self.optimizers)

    def _bind_tensor(self, node: fx.Node, entry: Found, bound: Bound) -> list[Tensor]:
        check_real(entry.tensor, f"{entry.kind} {entry.path}")
        if not isinstance(entry.tensor, DTensor):
            self._take(entry.tensor, entry.path)
        before, now, known = self.given(entry), self.nd_of(entry.tensor), self.moved.get(entry.path)
        was_plain = known.was_plain if known is not None and before != now else not isinstance(entry.tensor, DTensor)
        laid = lay_out(entry.tensor, value.nd_of(node), self.world, entry.path, plain=was_plain)
        if laid.kept is not entry.tensor:
            tree.replace(entry, laid.kept, self.optimizers)
        self.moved[entry.path] = Moved(weakref.ref(entry.tensor), was_plain, before, value.nd_of(node))
        bound.copies += laid.copies
        return laid.ranks

    def _bind_state(self, node: fx.Node, spec: Spec, found: Mapping[str, Found], bound: Bound) -> list[Tensor]:
        what, nd = f"state {spec.param}/{spec.key}", value.nd_of(node)
        param = found[spec.param].tensor
        if spec.born:
            laid = lay_out(filled(spec.shape, spec.dtype, 0.0, nd, self.world), nd, self.world, what, plain=True)
            bound.births.append((self.optimizers[spec.optimizer], param, spec.key, laid.kept))
            bound.copies += laid.copies
            return laid.ranks
        state = self.optimizers[spec.optimizer].state[param]
        tensor = state.get(spec.key)
        if tensor is None:
            tensor = filled(spec.shape, spec.dtype, spec.fill, nd, self.world)
        elif tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            tensor = tensor.to(spec.dtype)
            if tuple(tensor.shape) != spec.shape:
                raise ConfigError(
                    f"{what} has shape {list(tensor.shape)}, the program's is {list(spec.shape)}; where a parameter "
                    "was reshaped, its old state no longer fits: del optimizer.state[p], or make the optimizer anew"
                )
        if spec.key in state and not isinstance(tensor, DTensor):
            self._take(tensor, what)
        laid = lay_out(tensor, nd, self.world, what, plain=True)
        state[spec.key] = laid.kept
        bound.add(spec, param, state)
        bound.copies += laid.copies
        return laid.ranks

    def _bind_counter(self, specs: Sequence[Spec], found: Mapping[str, Found], bound: Bound) -> list[Tensor]:
        held: list[Tensor] = []
        for spec in specs:
            optimizer, param = self.optimizers[spec.optimizer], found[spec.param].tensor
            if spec.born:
                held.append(torch.zeros((), dtype=spec.dtype, device=param.device))
                bound.births.append((optimizer, param, spec.key, held[-1]))
                continue
            state = optimizer.state[param]
            if not isinstance(state.get(spec.key), Tensor):
                start = spec.fill if state.get(spec.key) is None else float(state[spec.key])
                state[spec.key] = torch.full((), start, dtype=spec.dtype, device=param.device)
            # On the device, as torch's fused optimizers keep it: on the host a step would have to wait for it.
            tree.to_device(state[spec.key], self.world.device)
            held.append(state[spec.key])
            bound.add(spec, param, state)
        if len({float(x) for x in held}) > 1:
            raise CaptureError(
                f"the parameters from {specs[0].param} on have taken different numbers of steps ({specs[0].key}), or "
                "some have no state: load a checkpoint that holds the state of every parameter"
            )
        tensor = held[0].detach().to(self.world.device, specs[0].dtype, copy=True)
        if (name := f"counter {specs[0].param}/{specs[0].key}") not in self._synced:
            tree.from_first_rank(tensor, self.world.placement)
            self._synced[name] = None
        bound.counters.append(Counter(tensor, held))
        return [tensor] * len(self.world.local_ranks)

    def _take(self, tensor: Tensor, what: str) -> None:
        """Move a plain tensor to the device; the first time it is seen, take rank 0's values."""
        tree.to_device(tensor, self.world.device)
        known = self._synced.get(what)
        if known is None or known() is not tensor:
            tree.from_first_rank(tensor, self.world.placement)
            self._synced[what] = weakref.ref(tensor)

    # ---- every call

    def is_stale(self, found: Mapping[str, Found]) -> bool:
        """Whether somebody has put other tensors in place of bound ones, or written to a step counter."""
        bound = self._bound
        return bound is None or bound.found is not found or bound.watched != bound.watch(self.optimizers)

    def before(self) -> None:
        """Read pieces that are no views from the whole tensors."""
        if self._bound is not None and self._bound.copies:
            torch._foreach_copy_([own for _, own in self._bound.copies], [place for place, _ in self._bound.copies])

    def after(self, training: bool, drew: bool) -> None:
        """Make the user's tensors true: pieces written back, counters, gradients gone; count the step."""
        assert self._bound is not None
        if training:
            for entry in (self._bound.found or {}).values():
                entry.tensor.grad = None
            for counter in self._bound.counters:
                counter.flush()
        if self._bound.copies:
            torch._foreach_copy_([place for place, _ in self._bound.copies], [own for _, own in self._bound.copies])
        self._bound.watched = self._bound.watch(self.optimizers)
        for optimizer, param, key, made in self._bound.births:
            optimizer.state[param][key] = made
        if self._bound.births:
            self.invalidate()  # the next step is another: it finds this state
        self.random.step += training or drew

    def has_state(self, optimizer: int, path: str) -> bool:
        """Whether an optimizer holds state of a parameter, one of ``tensors()`` when that was called last."""
        held = self.optimizers[optimizer].state.get(self._seen[1][path].tensor, {})
        return any(isinstance(x, Tensor) and not x.is_meta for x in held.values())

    def stateless(self) -> str:
        """The parameters for which an optimizer holds no state: ranks must agree on them."""
        names = {id(entry.tensor): path for path, entry in self._seen[1].items()}
        held = [
            (i, names.get(id(p), ""))
            for i, o in enumerate(self.optimizers)
            for g in o.param_groups
            for p in g["params"]
        ]
        return ", ".join(f"optimizer {i}: {path}" for i, path in held if path and not self.has_state(i, path))

    def counter_layout(self, names: Mapping[int, str]) -> tuple[Any, ...]:
        """Which parameters' 0-d states differ inside a group; () while all are equal.  Capture depends on it."""
        odd = []
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                held: dict[str, dict[str, float]] = {}
                for param in group["params"]:
                    for key, x in optimizer.state.get(param, {}).items():
                        if isinstance(x, Tensor) and not (x.dim() or x.is_meta) and (param.dim() or key == "step"):
                            held.setdefault(key, {})[names.get(id(param), "")] = float(x)
                for key, by_name in held.items():
                    classes = {number: at for at, number in enumerate(dict.fromkeys(by_name.values()))}
                    if len(classes) > 1:
                        odd.append((i, j, key, tuple((name, classes[number]) for name, number in by_name.items())))
        return tuple(odd)


@dataclass(frozen=True)
class Moved:
    """tensor: what the user holds now, which lies as ``after`` says; it was a plain tensor, or none, ``before``."""

    tensor: weakref.ref[Tensor]
    was_plain: bool
    before: Nd
    after: Nd


def _role(node: fx.Node) -> Role:
    role = value.role_of(node)
    assert role is not None
    return role


def _is_plain(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(_is_plain(item) for item in x)
    return x is None or isinstance(x, (bool, int, float, str))


def _is_counter(param: Tensor, spec: Spec) -> bool:
    """Whether a 0-d state counts, as step does; the moments of a 0-d parameter do not."""
    return not spec.shape and (param.dim() > 0 or spec.key == "step")


def _match_states(
    optimizer: Optimizer, param: Tensor, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...], bool]]
) -> None:
    """Make a parameter's states exist exactly as on rank 0; their values follow when they are bound."""
    held = optimizer.state.get(param, {})
    for key in [key for key, x in held.items() if isinstance(x, Tensor) and key not in wanted]:
        del held[key]
    for key, (dtype, shape, is_split) in wanted.items():
        if not isinstance(held.get(key), Tensor) and not is_split:
            optimizer.state[param][key] = torch.zeros(shape, dtype=dtype, device=param.device if shape else "cpu")
