"""Gradients in build: by ``backward()``, or by ``torch.autograd.grad`` and the like and ``p.grad = g``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphzero import _compat
from graphzero.capture.annotations.local_regions import refuse_inside
from graphzero.capture.problems import place_of, problem, problem_here
from graphzero.capture.spec import Step
from graphzero.capture.trace.casts import ParameterCasts, is_master, of_masters
from graphzero.capture.trace.modes import OpMode
from graphzero.errors import CaptureError
from graphzero.sbp.placement import DEVICE_TYPES

_CLEARED = "build calls zero_grad() after backward(), which clears the gradients that the step is to be made with"
_CLEARED_HINT = "leave out zero_grad(): the graph clears gradients after its step, so every call begins without any"
_LOCAL_LOSS = "Return the ranks' losses, out_sbp P adds them up, and call backward() on that sum"
_NO_OPTIMIZER = "call self.add_optimizer(optimizer) in __init__ to train, or leave out {} to evaluate"
_GRAD_CALLS = "gradients asked for"  # the phase of what follows torch.autograd.grad of parameters, until it is known


class GradientRecorder:
    """Gradients of one trace of build.

    losses: what backward() was called on, or, where it was not, what ``torch.autograd.grad`` was of.
    ended: path -> the gradient that the last backward() left, or that build has put into ``p.grad`` by hand.  Under
    mixed precision it is what ranks add up, in the dtype for that and still scaled, and ``wide`` what follows from it:
    ``p.grad`` in the dtype of the parameter, as the code behind backward() finds it.
    """

    def __init__(self, step: Step, watch: OpMode, casts: ParameterCasts, scale: Tensor | None) -> None:
        """casts: of the trace.  scale: what a loss is multiplied by before backward; None for nothing."""
        self.step, self.watch, self._casts, self._scale = step, watch, casts, scale
        self.losses: list[Tensor] = []
        self.ended: dict[str, Tensor] = {}
        self.wide: dict[str, Tensor] = {}
        self._left: dict[str, tuple[Tensor, Tensor, int]] = {}  # as autograd left it, ``wide``, and its version
        self._asked: list[Tensor] = []
        self._asking = False
        self._cleared: CaptureError | None = None  # zero_grad() after the last backward()

    @_compat.contextmanager
    def watching(self, params: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """While this is open, what build calls to make or clear gradients of ``params`` is what the step needs."""
        backward = self._begins(torch.autograd.backward, params)
        patches: list[tuple[Any, str, Any]] = [
            (Tensor, "backward", backward),
            (torch.autograd, "backward", backward),
            (torch.autograd, "grad", self._asks(torch.autograd.grad, params)),
        ]
        for holder in (nn.Module, torch.optim.Optimizer):
            patches.append((holder, "zero_grad", self._clears(holder.zero_grad, params)))
        with _compat.patched_all(patches):
            yield
        if self._cleared is not None:
            raise self._cleared
        self._take_by_hand(params)

    def _take_by_hand(self, params: Mapping[str, nn.Parameter]) -> None:
        given = {name: param.grad for name, param in params.items() if param.grad is not None}
        if self._scale is not None and (by_hand := [name for name in given if name not in self.ended]):
            raise problem(
                f"build of {self.step.name} puts gradients into p.grad by hand, under enable_amp(dtype=torch.float16), "
                "which scales the loss that backward() is called on",
                "call loss.backward(), or use enable_amp(dtype=torch.bfloat16), which scales nothing",
                [place_of(self.step.build)],
                facts=by_hand,
            )
        if given and not self.step.optimizers:
            raise problem(
                f"build of {self.step.name} puts gradients into p.grad, but the Graph has no optimizer",
                _NO_OPTIMIZER.format("p.grad = ..."),
                [place_of(self.step.build)],
            )
        self.losses = self.losses or (self._asked if given else [])
        self.ended = {**given, **self.ended}
        self.ended = {name: self.ended[name] for name in params if name in self.ended}

    def settle_phases(self, graph: fx.Graph) -> None:
        """Mark ops after the first ``torch.autograd.grad`` of parameters as backward, if its gradients are the step's:
        build does not call backward()."""
        phase = "backward" if self.losses and self.losses is self._asked else "forward"
        for node in graph.nodes:
            custom = node.meta.get("custom", {})
            if custom.get("phase") == _GRAD_CALLS:
                node.meta["custom"] = {**custom, "phase": phase}

    # ---- backward()

    def _begins(self, autograd: Any, params: Mapping[str, nn.Parameter]) -> Callable[..., None]:
        """``loss.backward()`` and ``torch.autograd.backward(loss)`` as the step needs them."""

        @of_masters
        def begin(losses: Any, *args: Any, **kwargs: Any) -> None:
            if self.watch.running:  # a checkpointed region, or torch calling itself
                autograd(losses, *args, **kwargs)
                return
            names = ("gradient", "retain_graph", "create_graph", "inputs")
            more = {**dict(zip(names, args, strict=False)), **kwargs}
            gradient = more.pop("grad_tensors", more.pop("gradient", None))
            retain_graph = more.pop("retain_graph", None)
            many = [losses] if isinstance(losses, Tensor) else list(losses)
            weights = list(gradient) if isinstance(gradient, (list, tuple)) else [gradient] * len(many)
            self._put_back(params)
            for loss, weight in zip(many, weights, strict=True):
                self._backward(autograd, loss, weight, True if len(many) > 1 else retain_graph, **more)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                grads = {name: p for name, p in params.items() if p.grad is not None}
                self.ended = {name: self._completed(name, p) for name, p in grads.items()}

        return begin

    # ---- mixed precision

    def _completed(self, name: str, p: nn.Parameter) -> Tensor:
        """The gradient that ranks add up; ``p.grad`` becomes what follows from it."""
        precision, grad = self.step.precision, p.grad
        assert grad is not None
        if precision is None:
            return grad.clone()
        reduced = grad.to(precision.reduce_dtype) if is_master(p) or precision.rounds(p) else grad.clone()
        wide = reduced.to(torch.float32) if self._scale is not None else reduced
        if self._scale is not None:
            wide = wide * self._scale.double().reciprocal().float()
        wide = wide.to(p.dtype)
        wide = wide.clone() if wide is reduced else wide
        p.grad, self.wide[name] = wide, wide.clone()  # build may write to the one
        self._left[name] = grad, wide, wide._version
        return reduced

    def _put_back(self, params: Mapping[str, nn.Parameter]) -> None:
        """Restore the gradients that an earlier backward() left, to which the next one adds, unless build changed
        them."""
        with torch.no_grad():
            for name, (grad, wide, version) in self._left.items():
                current = params[name].grad
                if current is wide and wide._version == version:
                    params[name].grad = grad
                elif current is not None and self._scale is not None:
                    params[name].grad = (current.float() * self._scale).to(current.dtype)
        self._left = {}

    def _weight(self, loss: Tensor, gradient: Any) -> Any:
        """Gradient with which backward begins: that of the scaled loss."""
        if self._scale is None:
            return gradient
        with torch.no_grad():
            begun = torch.ones_like(loss) if gradient is None else gradient
            return begun * self._scale.to(begun.dtype)

    def _backward(self, autograd: Any, loss: Tensor, gradient: Any, retain_graph: Any, **more: Any) -> None:
        """Record one ``loss.backward()`` of build; ``autograd`` is torch.autograd.backward."""
        refuse_inside("backward() is called inside of a local_region", _LOCAL_LOSS)
        self._check_loss(loss, gradient)
        self.losses.append(loss)
        self._cleared, self._casts.begun = None, True
        self.watch.phase, self.watch.running = "backward", True
        gradient = self._weight(loss, gradient)
        try:
            with ExitStack() as stack:
                stack.enter_context(self.watch.following([loss]))
                for device in filter(torch.is_autocast_enabled, DEVICE_TYPES):
                    stack.enter_context(torch.autocast(device, enabled=False))
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                autograd(loss, gradient, retain_graph, **more)
        finally:
            self.watch.running = False

    def _check_loss(self, loss: Tensor, gradient: Any) -> None:
        if not self.step.optimizers:
            what = f"build of {self.step.name} calls backward(), but the Graph has no optimizer"
            raise problem_here(what, _NO_OPTIMIZER.format("backward()"))
        if loss.numel() != 1 and gradient is None:
            raise problem_here(
                f"backward() is called on a tensor of shape {list(loss.shape)}, not on one number",
                "reduce it to a scalar first, loss.mean().backward() or loss.sum().backward(), or say what the "
                "gradient of each element is: loss.backward(gradient)",
            )
        if isinstance(gradient, Tensor) and gradient.shape != loss.shape:
            raise problem_here(
                f"backward() is called on a tensor of shape {list(loss.shape)} with a gradient of shape "
                f"{list(gradient.shape)}",
                "give a gradient of the shape of the tensor: torch.ones_like(loss)",
            )
        if not loss.requires_grad:
            raise problem_here(
                "backward() is called on a value that depends on no parameter with requires_grad=True",
                "check that the loss comes from the modules of this Graph, outside of torch.no_grad() and .detach()",
            )

    # ---- by hand

    def _asks(self, grad: Any, params: Mapping[str, nn.Parameter]) -> Callable[..., Any]:
        """``torch.autograd.grad``, which may be what is in place of backward()."""
        ours = {id(param) for param in params.values()}

        @of_masters
        def ask(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            of_params = any(id(x) in ours for x in _listed(inputs))
            if self.watch.running or self._asking or self.losses or not of_params:
                return grad(outputs, inputs, *args, **kwargs)
            self._asked += _listed(outputs)
            self.watch.phase, self._asking = _GRAD_CALLS, True
            try:
                with self.watch.following(_listed(outputs)):
                    return grad(outputs, inputs, *args, **kwargs)
            finally:
                self._asking = False

        return ask

    def _clears(self, original: Any, params: Mapping[str, nn.Parameter]) -> Callable[..., None]:
        def zero_grad(this: Any, set_to_none: bool = True) -> None:
            if any(p.grad is not None for p in params.values()):
                self._cleared = problem_here(_CLEARED, _CLEARED_HINT)
            original(this, set_to_none)

        return zero_grad


def _listed(given: Any) -> Sequence[Any]:
    """One or several tensors as a list."""
    return [given] if isinstance(given, Tensor) else list(given)
