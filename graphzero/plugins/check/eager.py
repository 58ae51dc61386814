"""The reference: the user's own ``build``, backward, clipping and optimizers in plain PyTorch, on whole copies.

The copies stand in for the real tensors wherever those are reached; everything is put back, whatever happens.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero import _compat
from graphzero.capture.annotations.dtensor_calls import dtensor_calls
from graphzero.capture.annotations.local_region_sbps import RegionSignature, checked_results
from graphzero.capture.annotations.local_regions import regions
from graphzero.capture.objects.side_effects import restoring_side_effects
from graphzero.capture.optimizer.stepping import OptimizerTracer
from graphzero.capture.randomness import Draws
from graphzero.capture.trace.casts import ParameterCasts
from graphzero.capture.trace.other_threads import blocking_other_threads, capture_lock
from graphzero.capture.trace.tracing_context import tracing_context
from graphzero.ops import RANK_KEY
from graphzero.plugins.check.float64_step import Float64Mode
from graphzero.plugins.check.initial_state import StepStart
from graphzero.plugins.check.scaled_loss import overflows, scale_after, scaling_losses
from graphzero.runtime.tensors.shards import coordinates, join, piece
from graphzero.sbp.placement import Placement


def eager_step(start: StepStart) -> dict[str, Any]:
    """Run one step; returns "output 0", "gradient w", "grad_norm.0", "new w" and "new w/exp_avg" by name.

    ``start`` is left as it is.  Random draws are those that the program makes.
    """
    root = nn.Module()
    for name, module in start.step.modules.items():
        root.add_module(name, module)
    reals = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    params = {path: _parameter(reals[path], x) for path, x in start.params.items()}
    gradients = _GradientVersions(params.values())
    buffers = {path: x.clone() for path, x in start.buffers.items()}
    state: dict[str, Any] = {**params, **buffers}
    stand_ins = {id(real): state[path] for path, real in reals.items()}
    results: dict[str, Any] = {}
    dtypes = [x.dtype for x in reals.values() if x.is_floating_point()]
    narrow = (dtypes or [torch.get_default_dtype()])[0] if start.is_wide else None
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", message="build sets")  # capture has said so
        stack.enter_context(capture_lock)
        stack.enter_context(restoring_side_effects(start.step, root, lambda holder, name: ""))
        stack.enter_context(_numbers(start))
        args, kwargs = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (start.args, start.kwargs))
        with (
            blocking_other_threads(root),
            _compat.reparametrize(root, dict(state)),
            torch.enable_grad(),
            _precise(start),
            scaling_losses(start, params.values(), gradients.note),
        ):
            with _StandIns(stand_ins, _casts(start, params), narrow) as mode, _compat.autograd_under(mode):
                result = start.step.build(*args, **kwargs)
            now = dict(root.named_buffers())
        for i, leaf in enumerate(pytree.tree_leaves(result)):
            results[f"output {i}"] = leaf.detach() if isinstance(leaf, Tensor) else leaf
        grads = {path: p.grad for path, p in params.items() if p.grad is not None}
        overflow, scaled = overflows(start, reals, grads), 1.0
        if overflow is not None:
            results["skipped"], scaled = overflow, scale_after(start, overflow, now)
        as_computed = {path: grad for path, grad in grads.items() if gradients.are_as_computed(params[path])}
        results |= {f"gradient {path}": grad.detach() * scaled for path, grad in as_computed.items()}
        _widen(start, params.values())
        if grads and not overflow:
            results |= _update(
                start, {id(real): params[path] for path, real in reals.items() if path in params}, params
            )
        if grads and start.step.averages:
            with _compat.reparametrize(root, {**state, **now}):
                for average in start.step.averages:
                    average.averaged.update_parameters(average.of)
    results |= {f"new {path}": p.detach() for path, p in params.items()}
    results |= {f"new {path}": now.get(path, x).detach() for path, x in buffers.items()}
    return results


def _casts(start: StepStart, params: dict[str, nn.Parameter]) -> ParameterCasts:
    """Casts of mixed precision; there are none in float64."""
    precision = None if start.is_wide else start.step.precision
    return ParameterCasts(precision.dtype if precision is not None else None, params.values())


@_compat.contextmanager
def _precise(start: StepStart) -> Iterator[None]:
    precision = start.step.precision
    if precision is None or start.is_wide:
        yield
        return
    with torch.autocast(start.step.placement.device_type, precision.dtype):
        yield


def _parameter(real: Tensor, whole: Tensor) -> nn.Parameter:
    param = nn.Parameter(whole.clone(), requires_grad=real.requires_grad)
    param.__dict__.update(vars(real))
    _compat.take_class(param, real)
    for hook in (_compat.gradient_hooks(real) if real.requires_grad else {}).values():
        param.register_hook(hook)
    return param


class _GradientVersions:
    """Gradients as backward computed them: whether build has left one so, and not clipped it, say."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._versions: dict[int, tuple[Tensor | None, int]] = {}
        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.note)

    def note(self, param: Tensor) -> None:
        assert param.grad is not None
        self._versions[id(param)] = param.grad, param.grad._version

    def are_as_computed(self, param: nn.Parameter) -> bool:
        grad, version = self._versions.get(id(param), (param.grad, -1))
        return grad is param.grad and (version < 0 or grad is None or grad._version == version)


def _update(start: StepStart, copy_of: dict[int, nn.Parameter], params: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Clip and step every optimizer on the copies; the norms and the new states."""
    results: dict[str, Any] = {}
    paths = {id(param): path for path, param in params.items()}
    for i, spec in enumerate(start.optimizers):
        optimizer = spec.optimizer
        stepping = OptimizerTracer(optimizer, i)
        stand_ins = {id(p): copy_of[id(p)] for group in optimizer.param_groups for p in group["params"]}
        groups = [{**group, "params": [stand_ins[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        owned = list(stand_ins.values())
        state: Any = defaultdict(dict)
        for (index, path), entry in start.states.items():
            if index == i:
                copies = {k: x.clone() if isinstance(x, Tensor) else x for k, x in entry.items()}
                state[params[path]] = {k: _unrounded(start, x) for k, x in copies.items()}
        with stepping.standing_in(groups, state, {key: copy_of[key] for key in stepping.owned}, strict=False):
            if spec.clip_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(owned, spec.clip_grad_norm, spec.norm_type)
                results[f"grad_norm.{i}"] = norm.detach()
            if spec.clip_grad_value is not None:
                nn.utils.clip_grad_value_(owned, spec.clip_grad_value)
            stepping.step()
        for param in owned:
            for key, x in state.get(param, {}).items():
                if isinstance(x, Tensor):
                    results[f"new {paths[id(param)]}/{key}"] = x.detach()
    return results


def _widen(start: StepStart, params: Iterable[nn.Parameter]) -> None:
    """Widen parameters to float32 that the program steps in float32 and rounds stochastically; here they are not
    rounded."""
    for param in params:
        grad, param.grad = param.grad, None
        param.data = _unrounded(start, param.data)
        param.grad = None if grad is None else grad.to(param.dtype)


def _unrounded(start: StepStart, x: Any) -> Any:
    precision = start.step.precision
    return x.float() if isinstance(x, Tensor) and precision is not None and precision.rounds(x) else x


class _StandIns(TorchFunctionMode):
    """A real parameter that build has kept by itself is its copy.

    narrow: the program's dtype where this run is in float64.  torch gives an RMS norm without an epsilon that of the
        dtype, and rounds one that is given to it: here too.
    """

    def __init__(self, stand_ins: dict[int, Tensor], casts: ParameterCasts, narrow: torch.dtype | None) -> None:
        super().__init__()
        self.stand_ins, self.casts, self.narrow = stand_ins, casts, narrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: self.stand_ins.get(id(x), x), (args, kwargs or {}))
        if self.narrow is not None and func in (F.rms_norm, torch.rms_norm):
            (given,) = args[3:] or [kwargs.get("eps")]
            epsilon = torch.finfo(self.narrow).eps if given is None else given
            with _compat.no_modes():
                rounded = torch.tensor(epsilon, dtype=torch.promote_types(self.narrow, torch.float32)).item()
            args, kwargs = args[:3], kwargs | {"eps": rounded}
        return self.casts.call(func, args, kwargs)


@_compat.contextmanager
def _numbers(start: StepStart) -> Iterator[None]:
    """Context of a run: float64 if it is asked for, and the program's random draws if it makes any."""
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        if start.is_wide:
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(torch.float64)
            stack.enter_context(Float64Mode())
        stack.enter_context(dtensor_calls(start.step.placement))
        draws = Draws(start.key) if start.key is not None else None
        stack.enter_context(regions(EagerRegions(start.step.placement, draws)))
        if draws is not None:
            stack.enter_context(draws.as_generator())
            stack.enter_context(tracing_context(start.step.placement))
            stack.enter_context(_SameDraws(draws.table()))
        yield


class _SameDraws(TorchDispatchMode):
    """Draws as the program does: by (key, op, index)."""

    def __init__(self, table: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.table.get(func, lambda *_, **__: NotImplemented)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


class EagerRegions:
    """Carries out a ``local_region`` on whole tensors: calls its function once for each rank, with that rank's parts.

    draws: the step's, if any.
    """

    def __init__(self, placement: Placement, draws: Draws | None) -> None:
        self.placement, self.draws = placement, draws

    def __call__(
        self, fn: Callable[..., Any], in_sbp: Any, out_sbp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hierarchy = self.placement.hierarchy
        flat, spec = pytree.tree_flatten((args, kwargs))
        count = sum(isinstance(x, Tensor) for x in flat)
        ends = RegionSignature(in_sbp, count, out_sbp, self.placement)
        per_rank: list[list[Any]] = []
        start = self.draws.count if self.draws is not None else 0
        for position in range(self.placement.size):
            nds = iter(ends.ins)
            local = [piece(x, next(nds), hierarchy, position) if isinstance(x, Tensor) else x for x in flat]
            given_args, given_kwargs = pytree.tree_unflatten(local, spec)
            results, out_spec = checked_results(self._on_rank(fn, given_args, given_kwargs, ends, position, start))
            per_rank.append(results)
        outs = iter(ends.outs_of(sum(isinstance(y, Tensor) for y in per_rank[0])))
        columns = zip(*per_rank, strict=True)
        whole = [join(ys, next(outs), hierarchy) if isinstance(ys[0], Tensor) else ys[0] for ys in columns]
        return pytree.tree_unflatten(whole, out_spec)

    def _on_rank(self, fn: Any, args: Any, kwargs: Any, ends: RegionSignature, position: int, start: int) -> Any:
        if self.draws is None:
            return fn(*args, **kwargs)
        at = coordinates(self.placement.hierarchy, position)
        key, self.draws.count = self.draws.key, start
        try:
            self.draws.key = RANK_KEY(key, [at[axis] for axis in ends.apart])
            return fn(*args, **kwargs)
        finally:
            self.draws.key = key
