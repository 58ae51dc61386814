"""Inductor, and the CUDA graphs that record what it makes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from graphzero._compat.interrupts import contextmanager
from graphzero._compat.modes import without_modes


def inductor_lacks(device_type: str) -> str:
    """Name what Inductor lacks on this machine to compile for a device; "" if nothing."""
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return "" if has_triton() else f"Inductor finds no Triton for {device_type}"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return "Inductor finds no C++ compiler (g++ or clang++ in PATH, or what the environment variable CXX names)"
    return ""


def inductor_folder() -> str:
    """Folder for Inductor's compiled code for CPUs of this kind, within the folder that it would use.

    Its keys leave out the CPU: code written for vectors of one width is read again where it is compiled for another,
    and then computes part of the values; what ``-march=native`` was compiled to may hold instructions that others lack.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    folder, own = str(cache_dir()), f"cpu-{_kind_of_cpu()}"
    return folder if os.path.basename(folder) == own else os.path.join(folder, own)


@contextmanager
def _compiled_for_this_cpu() -> Iterator[None]:
    """Inductor keeps what it compiles here in ``inductor_folder``."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    folder = cache_dir()
    try:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor_folder()
        yield
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


@cache
def _kind_of_cpu() -> str:
    """The instructions that kernels of this process use, and those that its CPU has."""
    known = {"flags": "", "Features": "", "model name": platform.processor()}
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, text = line.partition(":")
            if name.strip() in known:
                known[name.strip()] = text.strip()
            elif not line.strip():  # one CPU stands for all
                break
    digest = hashlib.sha256(repr((platform.machine(), known)).encode()).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability().lower()}-{digest[:12]}"


def inductor_compile(module: torch.fx.GraphModule, inputs: list[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Compile a module of ATen ops, free of writes, for inputs of these layouts; ``settings`` are Inductor's.

    What is returned takes one list of inputs, which it empties, and returns a list.  It is what Inductor made, without
    the wrappers of AOTAutograd, which here have nothing to do; that is why it is caught on its way out.
    """
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import compile_fx_inner

    compiled_graphs: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        compiled_graphs.append(compile_fx_inner(*args, **kwargs))
        return compiled_graphs[-1]

    options = {"inner_compile": inner, "config_patches": settings}
    with without_modes(), functorch.patch(enable_autograd_cache=False), _compiled_for_this_cpu():
        torch._inductor.standalone_compile(module, inputs, dynamic_shapes="from_example_inputs", options=options)
    (compiled,) = compiled_graphs
    function: Callable[..., Any] = compiled.current_callable
    return function


def clear_workspaces() -> None:
    """Give back the memory in which cuBLAS works; it gets some when it works again.  Nothing may be under way."""
    torch._C._cuda_clearCublasWorkspaces()


_failed: list[Any] = []


def end_failed_capture(graph: Any, pool: Any, device: torch.device) -> bool:
    """Return whether torch has left its allocator in a capture into ``pool`` whose end failed; it is out of it then.

    Until then no memory can be given back, and none of another graph's had.
    """
    try:
        graph.pool()
    except RuntimeError:  # it has not ended well
        _failed.append(graph)  # torch's allocators may go on to ask it what it captures
    else:
        return False
    with suppress(RuntimeError):  # a later torch has left it itself
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    return True
