"""Every private name of torch that graphzero stands on, and every name that only some of torch 2.11 to 2.15 have.

What changes between versions is met here; the rest of the package imports from here and stays plain.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, lru_cache, wraps
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:  # what comes with sympy and dynamo is loaded where capture needs it
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "StridedShard",
    "annotate",
    "compile_guards",
    "decomposition_table",
    "compiled_functions_inline",
    "cpu_by_default",
    "has_step_hooks",
    "is_compiling",
    "new_symfloat",
    "preserve_node_meta",
    "reparametrize",
    "sequence_number",
    "symbol_name",
    "unhooked_step",
]

P = ParamSpec("P")
R = TypeVar("R")

annotate = fx_traceback.annotate
preserve_node_meta = fx_traceback.preserve_node_meta


def reparametrize(module: torch.nn.Module, tensors: dict[str, Any]) -> Any:
    """Context manager: ``module`` holds ``tensors`` in place of its parameters and buffers, ties kept."""
    return stateless._reparametrize_module(module, tensors, tie_weights=True)


def make_fx(program: Callable[..., Any], table: dict[Any, Callable[..., Any]]) -> Callable[..., torch.fx.GraphModule]:
    """torch's, with a table of decompositions; it makes modules whose code is only written when it is asked for.

    torch keeps the text of all code that it writes, for tracebacks, for as long as the process lives.
    """
    trace = proxy_tensor.make_fx(program, decomposition_table=table)

    def traced(*values: Any) -> torch.fx.GraphModule:
        with _use_lazy_graph_module(True):
            return trace(*values)

    return traced


def forget_fakes() -> None:
    """Let go of what torch remembers of ops on fake tensors, by shapes, for as long as the process lives."""
    FakeTensorMode.cache_clear()


def shape_env() -> ShapeEnv:
    """A new, empty environment of symbolic numbers.

    torch keeps what methods of one have found in caches of the class, without bound and for good.  Here each
    environment is of a class of its own, whose caches end with it.
    """
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Env(ShapeEnv):
        def _get_user_frame(self) -> FrameType | None:
            """Whom to name in torch's log.  torch would import half of Inductor and export to tell its files apart."""
            return inspect.currentframe()

    cached: Any = getattr(symbolic_shapes, "_lru_cache", lru_cache)
    for name, method in vars(ShapeEnv).items():
        if hasattr(method, "cache_info"):
            setattr(Env, name, cached(method.__wrapped__))
    return Env()


def new_symfloat(env: ShapeEnv, value: float, name: str) -> Any:
    """A symbolic float of ``env`` that stands for the run-time number ``name`` and is ``value`` now."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(float(value), source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=float(value), source=source)


def last_traced() -> Any:
    """The last node of the fx graph that ``make_fx`` is writing, None in an empty one."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def is_traced_after(x: Tensor, node: Any) -> bool:
    """Whether the graph that is being written makes ``x``, behind ``node``."""
    tracer = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
    made: Any = proxy_tensor.get_proxy_slot(x, tracer, None, lambda held: held.proxy.node)
    return made is not None and (node is None or made > node)


def traced_from(x: Tensor) -> set[int] | None:
    """The numbers of the inputs of the graph that is being written which ``x`` is computed from, None if it is not."""
    tracer = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
    made: Any = proxy_tensor.get_proxy_slot(x, tracer, None, lambda held: held.proxy.node)
    if made is None:
        return None
    seen, todo = {made}, [made]
    while todo:
        new = [node for node in todo.pop().all_input_nodes if node not in seen]
        seen.update(new)
        todo += new
    return {i for i, node in enumerate(n for n in tracer.graph.nodes if n.op == "placeholder") if node in seen}


def symbol_name(number: Any) -> str:
    """The name that a symbolic float has in guards."""
    return str(number.node.expr)


def compile_guards(env: ShapeEnv) -> tuple[Callable[[dict[str, float]], bool], set[str]]:
    """What tracing has asked of the symbolic numbers of ``env``: a fast check, and the names it reads."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    found: dict[str, set[str]] = {}
    for guard in env.guards:
        expression: Any = guard.expr
        names = {str(symbol) for symbol in expression.free_symbols}
        if names:
            found.setdefault(printer.doprint(expression), names)
    if not found:
        return (lambda values: True), set()
    code = compile(" and ".join(f"({text})" for text in found), "<guards>", "eval")
    return (lambda values: bool(eval(code, dict(SYMPY_INTERP), values))), set().union(*found.values())


def cpu_by_default(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` makes tensors on the CPU where it names no device, whatever the user's default device is."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu":
            with torch.device("cpu"):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return called


def modes_are_on() -> bool:
    """Whether a mode of torch functions or of dispatch is on: what ops do then is for it to say."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Tensors are made as they are outside of torch.inference_mode; entering that for nothing costs a microsecond."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def is_compiling() -> Iterator[None]:
    """torch's own "a graph is being traced" flag, on which optimizers drop their host reads."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _NoFake:
    """In the place of FakeTensor, for those who are told that nothing is traced."""


@contextmanager
def answers_whether_traced(answer: Callable[[FrameType], bool]) -> Iterator[None]:
    """What asks in this thread whether a graph is being traced is told ``answer(its frame)``.

    It asks by ``torch.compiler.is_compiling()`` and its other names, or by whether a tensor is a
    ``torch._subclasses.FakeTensor``.  A module that is imported meanwhile gets the class itself.
    """
    thread, compiler, fakes = get_ident(), torch.compiler, torch._subclasses
    original = compiler.is_compiling

    def is_compiling() -> bool:
        asker: FrameType | None = sys._getframe(1)
        while asker is not None and asker.f_code.co_name in _ASKED_BY and asker.f_globals["__name__"] in _ASKED_IN:
            asker = asker.f_back
        return original() if get_ident() != thread or asker is None else answer(asker)

    def attribute(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {fakes.__name__!r} has no attribute {name!r}")
        asker = sys._getframe(1)
        if get_ident() != thread or asker.f_code.co_name == "<module>" or answer(asker):
            return FakeTensor
        return _NoFake

    compiler.is_compiling = is_compiling
    vars(fakes)["__getattr__"] = attribute
    del vars(fakes)["FakeTensor"]
    try:
        yield
    finally:
        vars(fakes)["FakeTensor"] = FakeTensor
        del vars(fakes)["__getattr__"]
        compiler.is_compiling = original


_ASKED_BY = ("is_compiling", "is_dynamo_compiling")
_ASKED_IN = ("torch._utils", "torch._dynamo.external_utils", "torch.compiler")


@contextmanager
def compiled_functions_inline() -> Iterator[None]:
    """What ``torch.compile`` has wrapped is traced as the plain function that it is.

    ``config.patch`` would do that too, but each of its objects stays in the thread's context for good.
    """
    config: Any = torch._dynamo.config
    before = config.error_on_nested_fx_trace
    config.error_on_nested_fx_trace = False
    try:
        yield
    finally:
        config.error_on_nested_fx_trace = before


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """``step`` of the optimizer's class, without the wrapper that runs hooks and the profiler."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def sequence_number(node: Any = None) -> int:
    """Running number of an autograd node, by default of the one made last."""
    if node is not None:
        return int(node._sequence_nr())
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def gradient_hooks(x: Tensor) -> dict[Any, Any]:
    """What ``x.register_hook`` was given."""
    return dict(x._backward_hooks or {})


def accumulation_hooks(x: Tensor) -> dict[Any, Any]:
    """What ``x.register_post_accumulate_grad_hook`` was given."""
    return dict(getattr(x, "_post_accumulate_grad_hooks", None) or {})


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the class, dtype, device, shape, strides and ``requires_grad`` of these: a fast check.

    It also says no where autocast is another one than now.
    """
    guards = torch._C._dynamo.guards
    check: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


# A number for a dict that every write to it changes; no two dicts have the same.
dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version


def _counts_attributes() -> bool:
    class Probe:
        held = 0

    probe = Probe()
    probe.held = 1
    before = dict_version(vars(probe))
    probe.held = 2
    return dict_version(vars(probe)) != before


# Whether what is assigned to attributes changes the number of an object's ``__dict__``; in Python 3.13.0 it does not.
COUNTS_ATTRIBUTES = _counts_attributes()


@contextmanager
def small_constants(most: int) -> Iterator[None]:
    """Fakes that follow from Python's numbers alone keep their values, up to ``most`` elements."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = most
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


def keep_constant(fake: Any, value: Tensor) -> None:
    """Let ``fake`` be known to have ``value``, until it is written to with what is not known."""
    fake.constant = value
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def constant_of(x: Any) -> Tensor | None:
    """The value of a fake tensor, where it is known."""
    return getattr(x, "constant", None) if isinstance(x, FakeTensor) else None


@contextmanager
def unknown(tensors: Sequence[Any]) -> Iterator[None]:
    """The values of these fakes are not known; nothing may write to them meanwhile."""
    held = [x.constant for x in tensors]
    for x in tensors:
        x.constant = None
    try:
        yield
    finally:
        for x, constant in zip(tensors, held, strict=True):
            x.constant = constant


def no_modes() -> Any:
    """Context manager: ops run for real, whatever is being traced."""
    return _disable_current_modes()


ASSERT_ASYNC: Callable[..., Any] = torch._assert_async
ASSERT: Callable[..., Any] = torch._assert


@contextmanager
def checks_given_to(taken: Callable[[type[Exception], Any, Any], bool]) -> Iterator[None]:
    """``torch._check`` and all of its kind ask ``taken(error type, condition, message)`` first."""
    original = torch._check_with

    def check(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        if not taken(error_type, cond, message):
            original(error_type, cond, message)

    torch._check_with = check
    try:
        yield
    finally:
        torch._check_with = original


@contextmanager
def autograd_under(mode: TorchFunctionMode) -> Iterator[None]:
    """Python code that autograd runs in this thread, what is recomputed among it, runs under ``mode``, as forward does.

    torch leaves a mode for as long as it handles a call of ``backward()``.
    """
    autograd: Any = torch.autograd
    thread, original = get_ident(), autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode if get_ident() == thread else nullcontext():
            return original(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = original


def below_autograd() -> Any:
    """Context manager: ops go straight to their kernels, past the dispatch of autograd."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-untyped-call]


def direct(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What calling ``op`` calls, without the Python frame around it."""
    found: Callable[..., Any] = getattr(op, "_op", op)
    return found


local_of_dtensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def is_saved(module: torch.nn.Module, name: str) -> bool:
    """Whether the parameter or buffer ``name`` of a module is in its state dict."""
    return name not in module._non_persistent_buffers_set


def storage_id(x: Tensor) -> int:
    """A number that tensors share if, and only if, they share storage; fakes have one too."""
    return int(x.untyped_storage()._cdata)


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    return isinstance(x, DTensor)


def local_tensor(x: Tensor) -> Tensor:
    """What this process holds of a DTensor: its own piece, not a view of it; a plain tensor itself."""
    return x._local_tensor if is_dtensor(x) else x


def has_own_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` is written for the CPU, not made up by torch from another op."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"))  # type: ignore[no-untyped-call]


def makes_tensors_of_numbers(op: torch._ops.OpOverload) -> bool:
    """Whether a number may be given to ``op`` where its schema says a tensor."""
    return bool(torch._C._should_allow_numbers_as_tensors(op._opname))  # type: ignore[attr-defined]


def functions() -> Any:
    """The namespace through which ``torch.nn.functional`` reaches ops that have no other Python name."""
    return torch._VF


def overload_of_custom_op(op: Any) -> Any:
    """The overload behind a ``torch.library.custom_op``; anything else as it is."""
    return op._opoverload if isinstance(op, torch._library.custom_ops.CustomOpDef) else op


@contextmanager
def inferring() -> Iterator[None]:
    """Tensors made here have shapes and no data; an op that cannot work so raises, and torch's log stays silent."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
            yield
    finally:
        log.disabled = before


def op_packet(namespace: str, name: str) -> Any:
    """The overloads of a registered op, as ``torch.ops`` holds them, or None; looking makes and loads nothing."""
    holder = getattr(torch.ops, namespace, None) if namespace.isidentifier() else None
    if type(holder) is not torch._ops._OpNamespace:
        return None
    packet = getattr(holder, name, None) if name.isidentifier() and not name.startswith("__") else None
    return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` pass for one that has stepped, else its scheduler warns about their order."""
    vars(optimizer)["_opt_called"] = True


# As these collectives are called from torch 2.13 on, and before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that collectives of a group may take, those of CPU tensors if it has any."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            options = getattr(group._get_backend(torch.device(device)), "options", None)  # type: ignore[no-untyped-call]
            found: timedelta | None = getattr(options, "_timeout", None)
            if found is not None:
                return found.total_seconds()
    return default_pg_timeout.total_seconds()


def job_store(prefix: str) -> Any:
    """The store through which the default process group was made; keys begin with ``prefix``."""
    return prefixed(prefix, dist.distributed_c10d._get_default_store())


def prefixed(prefix: str, store: Any) -> Any:
    """The same store; keys begin with ``prefix`` too."""
    return dist.distributed_c10d.PrefixStore(prefix, store)


def gloo(store: Any, rank: int, ranks: int, seconds: float) -> Any:
    """A gloo connection of some processes that torch.distributed does not list; each of them makes it.

    seconds: how long one of its collectives, and making it, may take.
    """
    return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))


def break_gloo(group: Any) -> None:
    """Close all connections of ``gloo``: who waits for this process, now or later, gets a RuntimeError.

    gloo does that when a receive that nobody has a send for runs out of time.
    """
    for other in range(group.size()):
        if other != group.rank():
            try:
                receive = group.recv([torch.empty(1)], other, _NO_TAG)
            except RuntimeError:  # that connection is closed already
                continue
            with suppress(RuntimeError):
                receive.wait(timedelta(milliseconds=1))
            return


def lost_by_gloo(group: Any) -> list[int]:
    """Of which processes the connections of ``gloo`` are closed, by their numbers in it."""
    found = []
    for other in range(group.size()):
        if other != group.rank():
            try:
                group.send([torch.empty(1)], other, _NO_TAG)  # is only announced, and never taken
            except RuntimeError:
                found.append(other)
    return found


_NO_TAG = 2**31 - 1  # of messages that nobody waits for


def fake_store() -> Any:
    """The store of a process group that exists in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_names(graph: torch.fx.Graph) -> None:
    """Names of nodes that are no longer in the graph are free again, as they are in a copy of it."""
    names = type(graph._graph_namespace)()
    for node in graph.nodes:
        names.create_name(node.name, node)
    graph._graph_namespace = names


def inductor_lacks(device_type: str) -> str:
    """What Inductor misses on this machine to compile for a device, or nothing."""
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
    """Where Inductor is to keep what it compiles for CPUs of this kind: within the folder that it would take.

    Its keys leave out the CPU: code written for vectors of one width is read again where it is compiled for another,
    and then computes part of the values; what ``-march=native`` was compiled to may hold instructions that others lack.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    folder, own = str(cache_dir()), f"cpu-{_kind_of_cpu()}"
    return folder if os.path.basename(folder) == own else os.path.join(folder, own)


@contextmanager
def _compiled_for_this_cpu() -> Iterator[None]:
    """Inductor keeps what it compiles here in ``inductor_folder``."""
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    folder = cache_dir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor_folder()
    try:
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

    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    options = {"inner_compile": inner, "config_patches": settings}
    with without_modes(), functorch.patch(enable_autograd_cache=False), _compiled_for_this_cpu():
        torch._inductor.standalone_compile(module, inputs, dynamic_shapes="from_example_inputs", options=options)
    (compiled,) = made
    found: Callable[..., Any] = compiled.current_callable
    return found


def attention_order() -> list[int]:
    """The numbers of torch's kernels of attention (``torch.nn.attention.SDPBackend``), the preferred ones first."""
    _settle_attention_order()
    return torch._C._get_sdp_priority_order()  # type: ignore[no-any-return]


@cache
def _settle_attention_order() -> None:
    """torch looks at the GPU for it when it first chooses a kernel."""
    if torch.cuda.is_available():
        with without_modes(), suppress(RuntimeError):  # that there is none to choose
            x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """CPU tensors are computed without oneDNN; ``torch.backends.mkldnn`` cannot be set once its flags are frozen."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def without_modes() -> Iterator[None]:
    """Tensors are real and not traced, whatever goes on around."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def clear_workspaces() -> None:
    """Give back the memory in which cuBLAS works; it gets some when it works again.  Nothing may be under way."""
    torch._C._cuda_clearCublasWorkspaces()


_failed: list[Any] = []


def end_failed_capture(graph: Any, pool: Any, device: torch.device) -> bool:
    """Whether torch has left its allocator in a capture into ``pool`` whose end failed; it is out of it then.

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
