"""Ops and their kernels: which there are, how one is called directly, and what autocast does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from graphzero._compat.interrupts import contextmanager
from graphzero._compat.modes import without_modes


def direct(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The function behind ``op``, without the Python frame around it."""
    function: Callable[..., Any] = getattr(op, "_op", op)
    return function


def has_own_kernel(op: torch._ops.OpOverload) -> bool:
    """Return whether ``op`` is written for the CPU, not made up by torch from another op."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"))


@cache
def functional_form(method: Any) -> Any:
    """The op that returns the result of a method that writes in place through another op, as ``Tensor.square_``, which
    functionalization does not know. None for any other method."""
    name = getattr(method, "__name__", "")
    if not name.endswith("_") or name.startswith("__") or getattr(torch.Tensor, name, None) is not method:
        return None
    packet = op_packet("aten", name)
    names = [] if packet is None else [getattr(packet, one).name() for one in packet.overloads()]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    is_made_up = bool(names) and all(composite(one, "CompositeImplicitAutograd") for one in names)
    return getattr(torch.Tensor, name[:-1], None) if is_made_up else None


def makes_tensors_of_numbers(op: torch._ops.OpOverload) -> bool:
    """Return whether a number may be given to ``op`` where its schema says a tensor."""
    return bool(torch._C._should_allow_numbers_as_tensors(op._opname))


def overload_of_custom_op(op: Any) -> Any:
    """The overload behind a ``torch.library.custom_op``; anything else as it is."""
    return op._opoverload if isinstance(op, torch._library.custom_ops.CustomOpDef) else op


def op_packet(namespace: str, name: str) -> Any:
    """The overloads of a registered op, as ``torch.ops`` holds them, or None; looking makes and loads nothing."""
    holder = getattr(torch.ops, namespace, None) if namespace.isidentifier() else None
    if type(holder) is not torch._ops._OpNamespace:
        return None
    packet = getattr(holder, name, None) if name.isidentifier() and not name.startswith("__") else None
    return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None


def attention_order() -> list[int]:
    """The numbers of torch's kernels of attention (``torch.nn.attention.SDPBackend``), the preferred ones first."""
    _settle_attention_order()
    return torch._C._get_sdp_priority_order()


@cache
def _settle_attention_order() -> None:
    """torch looks at the GPU for it when it first chooses a kernel."""
    if torch.cuda.is_available():
        with without_modes(), suppress(RuntimeError):  # that there is none to choose
            x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)


def has_tiles() -> bool:
    """Return whether this CPU has a unit for products of 16-bit matrices (AMX), which oneDNN uses."""
    return bool(torch.cpu._is_amx_tile_supported())


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """CPU tensors are computed without oneDNN; ``torch.backends.mkldnn`` cannot be set once its flags are frozen."""
    before = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


_SPARE: Any = torch._C._dispatch_key_parse("AutocastIPU")  # of a device that torch's builds do not have


_AUTOCASTS: Any = torch._C.DispatchKeySet(_SPARE) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def ops_with_autocast(key: str) -> list[str]:
    """ATen's overloads, such as "softmax.int", that autocast of a device does something for; ``key``: AutocastCUDA."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    aten = "aten::"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(aten)]
    return sorted(name.removeprefix(aten) for name in names if has(name, key))


def add_autocast(kernels: dict[str, Callable[..., Any]]) -> list[Any]:
    """Let these functions be what a spare device's autocast does for overloads; it lasts as long as what is returned.

    They are called within ``spare_autocast`` alone, before autocast of the CPU, with a set of dispatch keys for
    ``behind_autocast`` and the overload's arguments.
    """
    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastIPU")
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "AutocastIPU", with_keyset=True)
    return [everything, aten]


def behind_autocast(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` without autocast; ops that it consists of are under autocast again."""
    return op.redispatch(keys - _AUTOCASTS, *args, **kwargs)


def below_autocast() -> Any:
    """Disable autocast here, the CPU's and the spare one, also in ops that other ops consist of."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCASTS)


@contextmanager
def spare_autocast() -> Iterator[None]:
    """The spare device's autocast, as ``add_autocast`` was given it, counts for all tensors."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(_SPARE)
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_SPARE, False)
        with torch._C._IncludeDispatchKeyGuard(_SPARE):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_SPARE, before)
