"""The user's build, forward and backward, as one fx graph over fake tensors.

Two steps: ``make_fx`` traces build as it is, then, if it writes in place, the graph is run once more under
``functionalize``.  Fakes are made from shapes on the CPU, whatever device and form the real tensors have, so a meta
model and a split one trace alike; nothing real is touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.annotations.local_regions import TracedRegions, regions
from graphzero.capture.annotations.pins import Pinned, collecting_pins
from graphzero.capture.guards.attribute_guards import (
    AttributeGuards,
    forward_tensor_attributes,
    warn_of_new_attributes,
)
from graphzero.capture.guards.guarded_values import ObjectIdentity
from graphzero.capture.guards.referenced_names import ReferencedNames
from graphzero.capture.host_values.floats import FloatInput, holds_nan, math_of_inputs, symbols_of
from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.host_values.value_reads import PLACES, ValueReads, read_problem
from graphzero.capture.objects import pytrees as tree
from graphzero.capture.objects.side_effects import restoring_side_effects
from graphzero.capture.problems import first_line, problem, raising_recorded_problems, tracing
from graphzero.capture.randomness import Draws
from graphzero.capture.rewrite import decompositions
from graphzero.capture.rewrite.functionalize import functionalize_writes
from graphzero.capture.spec import LOSS_SCALE, Inputs, Step
from graphzero.capture.trace.attribute_bindings import AttributeBindings
from graphzero.capture.trace.captured_constants import CapturedConstants
from graphzero.capture.trace.casts import ParameterCasts
from graphzero.capture.trace.gradients import GradientRecorder
from graphzero.capture.trace.is_compiling import CompilingAnswers
from graphzero.capture.trace.modes import OpMode, UserCodeMode
from graphzero.capture.trace.other_threads import blocking_other_threads
from graphzero.capture.trace.refusals import forbidding_calls
from graphzero.capture.trace.tracing_context import forbidding_optimizer_steps, tracing_context
from graphzero.errors import CaptureError, GraphZeroError
from graphzero.ir.source_location import line_of


@dataclass
class TracedBuild:
    """Result of tracing build.

    module: the fx graph, its inputs in the order batch, scalars, params, buffers, seed.
    results: its outputs: build's ("outputs"), "losses", gradients when backward "ended" and as build left them
        ("final"), both in the order of ``with_grad``, new "params" and new "buffers", and "checks"; under mixed
        precision also the "wide" gradients that build sees, of those that "ended".
    trains: whether build makes gradients.  with_wide: of which parameters there is a "wide" one.
    out: build's flat outputs; a ``OutputSlot`` names a tensor among the graph's outputs.
    """

    module: fx.GraphModule
    out: list[Any]
    out_spec: pytree.TreeSpec
    trains: bool
    with_grad: list[str]
    with_wide: list[str]
    env: Any
    symbols: dict[str, str]  # symbol -> name of the float input
    fixed: dict[str, float]  # float inputs that build was given as they are
    goes_by_values: bool  # whether it is to be given all of them so
    results: dict[str, list[fx.Node]]
    pins: list[Pinned]
    attributes: dict[str, Any]
    namespaces: dict[str, Any]
    constants: list[tuple[Tensor, ObjectIdentity]]
    asks_whether_traced: Iterable[str] = ()  # lines that branch on the answer that build is being traced


@dataclass(frozen=True)
class OutputSlot:
    """A place among the tensor outputs of build."""

    index: int


class BuildTrace:
    """One tracing of a step's build."""

    def __init__(
        self, step: Step, root: nn.Module, inputs: Inputs, answers: CompilingAnswers, fixed: dict[str, float]
    ) -> None:
        self.step, self.root, self.inputs, self.asked, self.fixed = step, root, inputs, answers, fixed
        self.env = _compat.shape_env()
        self.mode = _compat.FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.params = dict(root.named_parameters())
        self.buffers = dict(root.named_buffers())
        self.code = getattr(step.build, "__code__", None)
        self.free = CapturedConstants(self.mode, {**self.params, **self.buffers})
        self.value_reads = ValueReads()
        paths = {id(module): path for path, module in root.named_modules() if path}
        self.watch = OpMode(self.free, self.value_reads, paths)
        self.value_reads.paused = lambda: self.watch.running  # what backward recomputes was checked in forward
        self.out: list[Any] = []
        self.out_spec: Any = None
        self.counts: dict[str, int] = {}  # of the results of each name
        self.symbols: dict[str, str] = {}
        self.reals: dict[int, tuple[Tensor, str]] = {}  # id of a fake -> what it stands for, and its path
        self.bindings = AttributeBindings(root, step.build)

    # ---- fakes

    def _fakes(self) -> list[list[Any]]:
        with self.mode:
            batch = [torch.empty(x.shape or (), dtype=x.raw.dtype) for x in self.inputs.tensors]
            params = [
                nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
                for p in self.params.values()
            ]
            buffers = [torch.empty(b.shape, dtype=b.dtype) for b in self.buffers.values()]
            key = torch.empty((), dtype=torch.int64)
        for real, fake in zip((*self.params.values(), *self.buffers.values()), (*params, *buffers), strict=True):
            _compat.take_class(fake, real)
        for real, fake in zip(self.params.values(), params, strict=True):
            for hook in (_compat.gradient_hooks(real) if real.requires_grad else {}).values():
                fake.register_hook(hook)
        scalars = []
        for leaf in self.inputs.floats:
            scalars.append(_compat.new_symbol(self.env, float(leaf.raw), leaf.name))
            self.symbols[_compat.symbol_name(scalars[-1])] = leaf.name
        return [batch, scalars, params, buffers, [key]]

    # ---- tracing

    def trace(self) -> TracedBuild:
        groups = self._fakes()
        flat, spec = pytree.tree_flatten(groups)
        kinds = ("input", "input", "state", "state", "seed")
        self.value_reads.sources = [kind for kind, group in zip(kinds, groups, strict=True) for _ in group]
        draws = Draws(groups[4][0])
        table = {**decompositions.TABLE, **draws.table()}

        def program(*values: Any) -> list[Any]:
            batch, scalars, params, buffers, _ = pytree.tree_unflatten(list(values), spec)
            return self._build(batch, scalars, params, buffers)

        place = self.step.placement
        around, inside = tracing_context(place), regions(TracedRegions(place, draws))
        snapshots = restoring_side_effects(self.step, self.root, self.bindings.line, self.free.lies_in)
        with snapshots as self.snapshots, draws.as_generator(), around, inside, collecting_pins(place) as pins:
            try:
                with (
                    tracing(self.step.build),
                    forbidding_optimizer_steps(self.step.optimizers),
                    self.mode,
                    _compat.preserve_node_meta(),
                ):
                    graph = getattr(self.step.build, "__self__", None)
                    referenced = ReferencedNames(self.step.build, graph, self.root)
                    recorded = AttributeGuards(self.root, graph, referenced)
                    with recorded as self.guards, forward_tensor_attributes(self.reals, self.guards):
                        module = _compat.make_fx(program, table)(*flat)
                    module = functionalize_writes(module, flat, table, self.mode)
            except CaptureError:
                raise
            except Exception as error:
                failed = self._failed(error)
                if failed is None:  # the user's own exception
                    raise
                raise failed from error
            finally:
                self.free.restore()
        self.value_reads.warn_of_texts()
        self.guards.warn_of_large_arrays(self.free.is_whole)
        return self._traced(module, pins)

    def _build(self, batch: list[Any], scalars: list[Any], params: list[Any], buffers: list[Any]) -> list[Any]:
        tensors, floats = iter(batch), iter(self.fixed.values() or map(FloatInput, scalars))
        args, kwargs = pytree.tree_unflatten(
            [next(tensors) if x.is_tensor else next(floats) if x.is_float else x.raw for x in self.inputs.leaves],
            self.inputs.spec,
        )
        named_params = dict(zip(self.params, params, strict=True))
        named_buffers = dict(zip(self.buffers, buffers, strict=True))
        state = {**named_params, **named_buffers}
        reals = {**self.params, **self.buffers}
        stand_ins = {id(reals[name]): fake for name, fake in state.items()}
        attributes = {name: frozenset(vars(fake)) for name, fake in state.items()}
        self.reals.update({id(fake): (reals[name], name) for name, fake in state.items()})
        versions = [fake._version for fake in batch]
        fed = zip([leaf.name for leaf in self.inputs.tensors], batch, strict=True)
        self.watch.given = {id(fake): name for name, fake in (*fed, *state.items())}
        precision = self.step.precision
        casts = ParameterCasts(precision.dtype if precision is not None else None, params)
        self.gradients = GradientRecorder(self.step, self.watch, casts, named_buffers.get(f"{LOSS_SCALE}.scale"))
        user_code = UserCodeMode(stand_ins, self.free, self.value_reads, casts, self.step.placement.device_type)
        user_code.has_floats = bool(self.inputs.floats) and not self.fixed
        with blocking_other_threads(self.root), _compat.reparametrize(self.root, dict(state)), self.watch, user_code:
            with (
                self.gradients.watching(named_params),
                _compat.autograd_under(user_code),
                _compat.small_constants(PLACES),
                torch.enable_grad(),
                forbidding_calls(),
                math_of_inputs() if user_code.has_floats else nullcontext(),
                self.value_reads.watching(),
                raising_recorded_problems(),
                self.asked.answering(),
                self.bindings.watching([*batch, *scalars, *params, *buffers]),
                torch.autocast("cpu", precision.dtype) if precision else nullcontext(),
            ):
                result = self.step.build(*args, **kwargs)
            now = self.bindings.buffers()
            self.bindings.refuse_state(self.snapshots, self.free, self.guards)
        warn_of_new_attributes(state, attributes)
        self._warn_of_written([fake._version != seen for fake, seen in zip(batch, versions, strict=True)])
        with self.watch, torch.no_grad():
            return self._results(result, named_params, {name: now[name] for name in named_buffers})

    def _warn_of_written(self, written: list[bool]) -> None:
        """An input is a value here: what build writes into it in place, the caller does not see."""
        names = [leaf.name for leaf, was in zip(self.inputs.tensors, written, strict=True) if was]
        if names:
            warnings.warn(
                f"build of {self.step.name} writes in place to its input {', '.join(names)}: the step continues with "
                "the new values, but the caller's tensor does not change. Return the value, or clone the input first "
                "to avoid this warning",
                stacklevel=2,
            )

    def _results(self, result: Any, params: dict[str, Any], buffers: dict[str, Any]) -> list[Any]:
        flat, self.out_spec = tree.flatten(symbols_of(result))
        tensors: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, (Tensor, torch.SymFloat, torch.SymInt, torch.SymBool)):
                self.out.append(OutputSlot(len(tensors)))
                tensors.append(
                    leaf if isinstance(leaf, _compat.FakeTensor) or not isinstance(leaf, Tensor) else leaf.clone()
                )
            else:
                self.out.append(_checked_literal(leaf))
        losses, ended = self.gradients.losses, self.gradients.ended
        final = [params[name].grad for name in ended]
        wide = [self.gradients.wide[name] for name in ended if name in self.gradients.wide]
        results: dict[str, list[Any]] = {
            "outputs": tensors,
            "losses": losses,
            "ended": list(ended.values()),
            "final": final,
            "params": list(params.values()),
            "buffers": list(buffers.values()),
            "checks": self.value_reads.checks,
            "wide": wide,
        }
        self.counts = {name: len(items) for name, items in results.items()}
        return [item for items in results.values() for item in items]

    # ---- results

    def _failed(self, error: Exception) -> GraphZeroError | None:
        """The error with the user's lines, or None if it is raised by the user's own code."""
        where: list[str] = []
        traceback, line = error.__traceback__, ""
        while traceback is not None:
            code = traceback.tb_frame.f_code
            line = line_of(code, traceback.tb_lineno)
            where = [] if code is self.code else where
            where += [line] if line else []
            traceback = traceback.tb_next
        written = self.free.problem_of(error, where[::-1][:3])
        if written is not None:
            return written
        if "data is not allocated yet" in str(error):  # torch.tensor([a, b]) of tensors, x[(a, b)]
            return read_problem("a tensor made from the values of others", where[::-1][:3])
        owners = nn.Module, type(getattr(self.step.build, "__self__", self.root))  # the user's Graph
        if line or (isinstance(error, AttributeError) and isinstance(error.obj, owners)):
            return None
        if isinstance(error, GraphZeroError):  # by a function of ours that build calls
            shown = "".join(f"\n  at {place}" for place in where[::-1][:1])
            return type(error)(f"{error}\n{shown}")
        if self._plain_error() == first_line(error):
            inputs = [
                f"{x.name}: {str(x.raw.dtype).removeprefix('torch.')}{list(x.shape or ())}" for x in self.inputs.tensors
            ]
            return problem(
                f"build of {self.step.name} does not run in plain PyTorch either: {first_line(error)}",
                "Fix this line first; these are the inputs of the whole batch",
                where[::-1][:3],
                inputs,
            )
        return problem(
            f"build of {self.step.name} cannot be traced as a graph: {first_line(error)}",
            "It needs values, which do not exist while build is traced. GRAPHZERO_TRACEBACK=1 in the environment "
            "shows where in torch it ends",
            where[::-1][:3],
        )

    def _plain_error(self) -> str:
        """The error, in one line, that plain PyTorch raises for build on tensors without values; "" where it runs."""
        meta = {
            name: torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            for name, x in {**self.params, **self.buffers}.items()
        }
        leaves = [
            torch.empty(x.shape or (), dtype=x.raw.dtype, device="meta") if x.is_tensor else x.raw
            for x in self.inputs.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.inputs.spec)
        precision = self.step.precision
        try:
            autocast = torch.autocast("cpu", precision.dtype) if precision else nullcontext()
            with _compat.reparametrize(self.root, meta), torch.enable_grad(), autocast:
                self.step.build(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return first_line(error)
        return ""

    def _traced(self, module: fx.GraphModule, pins: list[Pinned]) -> TracedBuild:
        self.gradients.settle_phases(module.graph)
        with_grad = list(self.gradients.ended)
        flat: Any = iter(module.graph.output_node().args[0])  # type: ignore[arg-type]
        return TracedBuild(
            module,
            self.out,
            self.out_spec,
            trains=bool(self.gradients.losses or with_grad),
            with_grad=with_grad,
            with_wide=[name for name in with_grad if name in self.gradients.wide],
            env=self.env,
            symbols=self.symbols,
            fixed=self.fixed,
            goes_by_values=not self.fixed and (self.guards.has_exact_float or holds_nan(module)),
            results={name: list(islice(flat, count)) for name, count in self.counts.items()},
            pins=pins,
            attributes=self.guards.unchanged_values(),
            namespaces=self.guards.namespaces,
            constants=self.free.identities(),
        )


def _checked_literal(leaf: Any) -> Any:
    plain = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
    if isinstance(leaf, plain):
        return leaf
    if isinstance(leaf, HostNumber):
        raise read_problem(".item(), returned by build", [])
    raise problem(
        f"build returns an object of type {type(leaf).__name__}, which may hold tensors that the graph cannot follow",
        "return tensors and plain values in dicts, lists, tuples and dataclasses, or register the type with "
        "torch.utils._pytree",
    )
