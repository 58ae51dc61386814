"""The tensors of a Graph's modules: their names, every place they are at, and how one is exchanged.

A tensor's path is ``attribute.fqn``; a tied one has the first name that a walk in attribute order meets.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from graphzero import _compat
from graphzero.errors import CaptureError, ConfigError
from graphzero.ir.storage.overlap import without_copies
from graphzero.runtime.state import partial_update
from graphzero.runtime.tensors.stage_tensors import is_here
from graphzero.runtime.transport.communicator import communicator
from graphzero.runtime.world.consensus import tensor_text
from graphzero.runtime.world.launch import has_fake_world
from graphzero.runtime.world.shared_gpus import backend_of, check_own_gpus
from graphzero.sbp.placement import Placement


class Holder(Protocol):
    """Something of graphzero's own that keeps tensors of the user's between calls: an executor."""

    @property
    def is_bound(self) -> bool:
        """Whether it has all that it needs."""

    def release(self, x: Tensor) -> None:
        """Keep nothing that lies in the memory of ``x``."""


_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register_optimizer(optimizer: Optimizer) -> None:
    """A Graph has been given ``optimizer``: it follows when a tensor is replaced, whichever Graph does that."""
    _optimizers.add(optimizer)


def register_holder(holder: Holder) -> None:
    """``holder`` is told to release a tensor that is replaced, whichever Graph does that."""
    _holders.add(holder)


@dataclass
class ModuleTensor:
    """One parameter or buffer: its path, the tensor, and each (module, name) under which it is."""

    path: str
    kind: str  # "param" or "buffer"
    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def walk(modules: Mapping[str, nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Yield each module once, with the first path that leads to it, parents before children."""
    seen: set[nn.Module] = set()
    for name, module in modules.items():
        yield from module.named_modules(seen, name)


def tensors(modules: Mapping[str, nn.Module]) -> dict[str, ModuleTensor]:
    """Parameters and buffers by path; ties are one entry with several places."""
    tensors_by_path: dict[str, ModuleTensor] = {}
    by_id: dict[int, ModuleTensor] = {}
    for path, module in walk(modules):
        prefix = f"{path}." if path else ""
        for kind, tensors_of_kind in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors_of_kind.items():
                if tensor is None:
                    continue
                entry = by_id.get(id(tensor))
                if entry is None:
                    entry = by_id[id(tensor)] = tensors_by_path[prefix + name] = ModuleTensor(
                        prefix + name, kind, tensor
                    )
                entry.places.append((module, name))
    return tensors_by_path


def paths_by_id(entries: Mapping[str, ModuleTensor]) -> dict[int, str]:
    """id of each tensor -> its path."""
    return {id(entry.tensor): path for path, entry in entries.items()}


def group_paths(optimizer: Optimizer, names: Mapping[int, str], index: int) -> tuple[tuple[str, ...], ...]:
    """Paths of the parameters of its groups.  Raises ConfigError for one that no module has.

    names: id of a parameter -> its path.
    """
    for j, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer {index} ({type(optimizer).__name__}) holds in group {j} a parameter "
                    f"{tensor_text(param)} that is in no module of the Graph; assign its module to an attribute "
                    "(self.model = model) before calling, and make the optimizer after the module is final"
                )
    return tuple(tuple(names[id(param)] for param in group["params"]) for group in optimizer.param_groups)


def module_mode(module: nn.Module) -> tuple[Any, ...]:
    """Facts of a module, besides its tensors, that a capture of its forward depends on."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    back_before, back_after = module._backward_pre_hooks, module._backward_hooks
    forward = vars(module).get("forward")  # put over the class's own
    if before or after or back_before or back_after:
        return module.training, forward, tuple(before), tuple(after), tuple(back_before), tuple(back_after)
    return module.training, forward


def hook_ids(x: Tensor) -> tuple[int, ...]:
    """Numbers of the hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``."""
    return (*_compat.gradient_hooks(x), *_compat.accumulation_hooks(x))


def data_address(x: Tensor) -> int:
    """Address of the first element of this process' part of ``x``. Raises CaptureError for a parameter of a lazy
    module, which has no shape yet."""
    if isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        raise CaptureError(
            "a lazy module (nn.LazyLinear or the like) has parameters without a shape yet; run it once on an example "
            "before the Graph's first call, and before it is given to an optimizer: model(x)"
        )
    return _compat.local_tensor(x).data_ptr()


def put_tensor(entry: ModuleTensor, x: Tensor) -> None:
    """Put ``x``, a parameter if ``entry`` is one, into modules wherever ``entry`` is."""
    for module, name in entry.places:
        if entry.kind == "param":
            setattr(module, name, x)  # modules that keep their own lists (nn.LSTM) follow
        else:
            module._buffers[name] = x


def module_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()``, in which a tensor of other ranks, too, lies where the module's own does.

    Detached, a DTensor of which this rank holds nothing is in a storage of its own, as if it were not tied to another.
    """
    values = module.state_dict()
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    for name, x in named:
        if not is_here(x) and isinstance(x, DTensor) and isinstance(values.get(name), DTensor):
            values[name] = _compat.alias(x)
    return values


def copy_attributes(new: Tensor, old: Tensor) -> Tensor:
    """``new`` with what users may have said about ``old``: a parameter if it is one, its attributes and hooks."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    _compat.take_class(new, old)
    if new.requires_grad:
        new._backward_hooks = old._backward_hooks
    return new


def replace_tensor(entry: ModuleTensor, new: Tensor, optimizers: Iterable[Optimizer] = ()) -> Tensor:
    """Put ``new`` wherever ``entry`` is: in modules, param_groups and as key of optimizer state.

    Optimizers that any Graph has been given follow, besides ``optimizers``.
    A parameter becomes a new nn.Parameter with the old one's attributes; the old object is emptied.  Its memory goes
    with the last tensor in it: a state dict or an array of numpy that other code has taken keeps its values.
    """
    new = copy_attributes(new, entry.tensor)
    put_everywhere = partial(_put_everywhere, entry, entry.tensor, new, {*optimizers, *_optimizers})
    with _compat.undoing(put_everywhere):  # an interrupt finds it everywhere
        put_everywhere()
    return new


def _put_everywhere(entry: ModuleTensor, old: Tensor, new: Tensor, optimizers: Iterable[Optimizer]) -> None:
    partial_update.move_mark(old, new)
    put_tensor(entry, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state[old]
            del optimizer.state[old]
    for holder in list(_holders):
        holder.release(old)
    with torch.no_grad():
        old.grad = None
        old.data = old.detach().new_empty(0)
    entry.tensor = new


def to_device(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor and keep its identity; one on the meta device has nothing to move."""
    if tensor.device != device and not tensor.is_meta:
        tensor.data = tensor.data.to(device)


def from_first_rank(tensor: Tensor, placement: Placement) -> None:
    """Give a plain tensor on every rank the values that it has on the placement's first rank, if it has any.

    Within ``consensus.CollectiveCall``: a rank that stops on the way wakes the others.
    """
    if placement.virtual or placement.size == 1 or has_fake_world() or tensor.numel() == 0 or tensor.is_meta:
        return
    own = without_copies(tensor.detach())
    flat = own.contiguous()
    ranks: list[int] = placement.ranks.ravel().tolist()
    if flat.device.type == "cpu":
        line = flat.as_strided((flat.numel(),), (1,))  # the stride of a single element may be any
        communicator(ranks).fill(line.view(torch.uint8), ranks[0], f"what rank {ranks[0]} holds")
    else:
        _broadcast(flat, placement)
    if flat.data_ptr() != own.data_ptr():
        own.copy_(flat)


def _broadcast(x: Tensor, placement: Placement) -> None:
    """Broadcast over the process groups of a placement, one axis after the other."""
    mesh, at = placement.mesh(), placement.coordinate(dist.get_rank())
    check_own_gpus(placement, x.device, [backend_of(group, x.device) for group in mesh.get_all_groups()])
    for axis in range(mesh.ndim):
        first = int(placement.ranks[(*at[:axis], 0, *at[axis + 1 :])])
        dist.broadcast(x, src=first, group=mesh.get_group(axis))
